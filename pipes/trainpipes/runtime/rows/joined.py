"""Arrow tables joined as they come.

What a row group was decoded to is copied at once and let go, so that the next one is decoded into the same
memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.arrays import TEXTS, Array, apart, offset_dtype, one_chunk, to_numpy
from trainpipes.errors import SchemaError

__all__ = ["Joining", "joined_tables"]

#: Bytes from which it matters.
LARGE = 4 << 20
#: How much more than expected there is room for, and how much more there is when that is not enough.
MARGIN, GROWTH = 1.1, 1.5


def joined_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """All rows one after the other, each column in one piece.

    Raises:
        SchemaError: the tables differ in their columns.
    """
    odd = next((table for table in tables if not table.schema.equals(tables[0].schema)), None)
    if odd is not None:
        raise unlike(tables[0].schema, odd.schema)
    return pa.concat_tables(tables).combine_chunks()


def unlike(one: pa.Schema, other: pa.Schema) -> SchemaError:
    """What to raise where rows of one chain have different columns."""
    names = [*one.names, *(name for name in other.names if name not in one.names)]
    kinds = [[s.field(n).type if n in s.names else "missing" for n in names] for s in (one, other)]
    name, a, b = next(
        ((n, a, b) for n, a, b in zip(names, *kinds, strict=True) if a != b), ("", one, other)
    )
    return SchemaError(
        f"rows have column {name!r} as {a}, and later ones as {b}: have the function that makes them, in "
        "map_batches() or a stage of your own, return columns of the same types each time"
    )


class Joining:
    """Tables of one schema, one after the other.

    Args:
        rows: about how many there will be in all.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._tables: list[pa.Table] = []  # as they came, where they are not copied
        self._schema: pa.Schema | None = None
        self._columns: list[_Column] = []

    def add(self, table: pa.Table) -> None:
        """The next rows, which are copied, or referred to where there are few, or no more to come."""
        if self._schema is None:
            self._schema = table.schema
        elif table.schema != self._schema:
            raise unlike(self._schema, table.schema)
        share = self._rows / max(1, len(table)) * MARGIN
        if not self._columns and (len(table) >= self._rows or table.nbytes * share < LARGE):
            self._tables.append(table)
            return
        self._columns = self._columns or [_Column() for _ in table.columns]
        for column, given in zip(self._columns, table.columns, strict=True):
            column.add(given, share)

    def table(self) -> pa.Table:
        """All rows, each column in one chunk where one can hold it."""
        if not self._columns:
            return pa.concat_tables(self._tables).combine_chunks()
        assert self._schema is not None
        columns = [
            column.joined(field.type)
            for column, field in zip(self._columns, self._schema, strict=True)
        ]
        copied = pa.table(columns, schema=self._schema)
        return (
            pa.concat_tables([*self._tables, copied]).combine_chunks() if self._tables else copied
        )


class _Column:
    """What has come of one column: some of it copied, and chunks after that."""

    def __init__(self) -> None:
        self._filled: _Filled | None = None
        self._chunks: list[Any] = []

    def add(self, given: pa.ChunkedArray, share: float) -> None:
        for chunk in given.chunks:
            if not len(chunk):
                continue
            if not self._chunks:
                filled = self._filled
                if filled is None and given.nbytes * share >= LARGE:
                    filled = _filled_for(given.type, share)
                if filled is not None and filled.add(chunk):
                    self._filled = filled
                    continue
            self._chunks.append(chunk)

    def joined(self, kind: pa.DataType) -> Any:
        filled = [] if self._filled is None else [self._filled.array(kind)]
        chunks = filled + self._chunks
        if len(chunks) == 1 and filled:
            return chunks[0]
        try:
            return one_chunk(pa.chunked_array(chunks, kind))
        except pa.ArrowInvalid:  # there is more than 32-bit offsets count
            return pa.chunked_array(chunks, kind)


def _filled_for(kind: pa.DataType, share: float) -> _Filled | None:
    """What a column of a type is copied to; None for types that Arrow joins."""
    asked = pa.types
    if _is_number(kind):
        return _Numbers(share)
    if asked.is_list(kind) or asked.is_large_list(kind):
        return _Lists(share) if _is_number(kind.value_type) else None
    return _Strings(share) if kind in TEXTS else None


class _Values:
    """Numbers one after the other."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._room: Array | None = None
        self.count = 0

    def add(self, values: Array) -> None:
        stop = self.count + len(values)
        if self._room is None:
            room = int(len(values) * max(1, self._share)) + 1
            self._room = self._taken(room, values.dtype)
        elif stop > len(self._room):
            before = self._room[: self.count]
            self._room = self._taken(int(stop * GROWTH), values.dtype)
            self._room[: self.count] = before
        self._room[self.count : stop] = values
        self.count = stop

    def _taken(self, count: int, dtype: Any) -> Array:
        found: Array = np.empty(count, dtype)
        return found

    def buffer(self) -> pa.Buffer:
        return pa.py_buffer(b"" if self._room is None else self._room[: self.count])


class _Filled(ABC):
    """A column that is copied."""

    def __init__(self, share: float) -> None:
        self.values = _Values(share)

    @abstractmethod
    def add(self, chunk: Any) -> bool:
        """Copy a chunk; False where it cannot be, which leaves all as it was."""

    @abstractmethod
    def array(self, kind: pa.DataType) -> Any:
        """All that was copied."""


class _Numbers(_Filled):
    def add(self, chunk: Any) -> bool:
        if chunk.null_count:
            return False
        self.values.add(to_numpy(chunk))
        return True

    def array(self, kind: pa.DataType) -> Any:
        return pa.Array.from_buffers(kind, self.values.count, [None, self.values.buffer()])


class _Ranges(_Filled):
    """A column of rows of different lengths."""

    def __init__(self, share: float) -> None:
        super().__init__(share)
        self._lengths: list[Array] = []

    def _add(self, edges: Array, values: Array) -> bool:
        if self.values.count + len(values) > largest(edges.dtype):
            return False
        self.values.add(values)
        self._lengths.append(np.diff(edges))
        return True

    def _offsets(self, dtype: Any) -> tuple[int, pa.Buffer]:
        """The number of rows, and where each begins and the last one ends."""
        lengths = np.concatenate(self._lengths)
        offsets = np.zeros(len(lengths) + 1, dtype=dtype)
        np.cumsum(lengths, out=offsets[1:])
        return len(lengths), pa.py_buffer(offsets)


class _Lists(_Ranges):
    def add(self, chunk: Any) -> bool:
        if chunk.null_count:
            return False
        values, edges = apart(chunk)
        return not values.null_count and self._add(edges, to_numpy(values))

    def array(self, kind: pa.DataType) -> Any:
        rows, offsets = self._offsets(offset_dtype(kind))
        content = [None, self.values.buffer()]
        child = pa.Array.from_buffers(kind.value_type, self.values.count, content)
        return pa.Array.from_buffers(kind, rows, [None, offsets], children=[child])


class _Strings(_Ranges):
    def add(self, chunk: Any) -> bool:
        if chunk.null_count:
            return False
        content, edges = apart(chunk)
        return self._add(edges, content)

    def array(self, kind: pa.DataType) -> Any:
        rows, offsets = self._offsets(offset_dtype(kind))
        return pa.Array.from_buffers(kind, rows, [None, offsets, self.values.buffer()])


def largest(offsets: Any) -> int:
    """The largest place that offsets of a type can hold."""
    return int(np.iinfo(offsets).max)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))
