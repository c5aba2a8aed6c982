"""Arrow tables joined as they come.

What a row group was decoded to is copied at once and let go, so that the next one is decoded into the same
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import TEXTS, Array, apart, offset_dtype, one_chunk, to_numpy
from trainpipes.errors import SchemaError

#: Bytes from which it matters.
LARGE = 4 << 20
#: How much more than expected there is room for, and how much more there is when that is not enough.
MARGIN, GROWTH = 1.1, 1.5


def joined_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """All rows one after the other, each column in one piece."""
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
    """Tables of one schema, one after the other."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._schema: pa.Schema | None = None
        self._columns: list[_Column] = []

    def add(self, table: pa.Table) -> None:
        """The next rows, which are copied, or referred to where there are few, or no more to come."""
        if self._schema is None:
            self._schema = table.schema
            self._columns = [_Column() for _ in table.columns]
        elif table.schema != self._schema:
            raise unlike(self._schema, table.schema)
        share = self._rows / max(1, len(table)) * MARGIN if len(table) < self._rows else 0
        for column, given in zip(self._columns, table.columns, strict=True):
            column.add(given, share)

    def table(self) -> pa.Table:
        """All rows, each column in one chunk where one can hold it."""
        assert self._schema is not None
        columns = [c.joined(field) for c, field in zip(self._columns, self._schema, strict=True)]
        return pa.table(columns, schema=self._schema)


class _Column:
    """What has come of one column: some of it copied, and chunks after that."""

    def __init__(self) -> None:
        self._filled: _Filled | None = None
        self._chunks: list[Any] = []

    def add(self, given: pa.ChunkedArray, share: float) -> None:
        """The next rows."""
        for chunk in given.chunks:
            if not len(chunk):
                continue
            if not self._chunks:
                filled = self._filled
                is_large = filled is None and share > 0 and given.nbytes * share >= LARGE
                if is_large and _can_be_copied(given.type):
                    filled = _Filled(given.type, share)
                if filled is not None and filled.add(chunk):
                    self._filled = filled
                    continue
            self._chunks.append(chunk)

    def joined(self, field: pa.Field) -> Any:
        """All rows."""
        filled = [] if self._filled is None else [self._filled.array()]
        column = pa.chunked_array(filled + self._chunks, field.type)
        try:
            return one_chunk(column)
        except pa.ArrowInvalid:  # there is more than 32-bit offsets count
            return column


def _can_be_copied(kind: pa.DataType) -> bool:
    """Whether a column of a type is copied; Arrow joins all others."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    elif kind in TEXTS:
        return True
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


class _Filled:
    """A column that is copied: numbers, or lists of numbers, texts or bytes."""

    def __init__(self, kind: pa.DataType, share: float) -> None:
        self._kind = kind
        self._is_ragged = kind in TEXTS or bool(kind.num_fields)
        self._share = share
        self._room: Array | None = None
        self._count = 0  # values
        self._lengths: list[Array] = []  # of rows, where those differ

    def add(self, chunk: Any) -> bool:
        """Copy a chunk; False where it cannot be, which leaves all as it was."""
        if chunk.null_count:
            return False
        values, edges = apart(chunk) if self._is_ragged else (chunk, None)
        if isinstance(values, pa.Array):
            if values.null_count:
                return False
            values = to_numpy(values)
        if edges is not None:
            if self._count + len(values) > largest(edges.dtype):
                return False
            self._lengths.append(np.diff(edges))
        self._copy(values)
        return True

    def _copy(self, values: Array) -> None:
        stop = self._count + len(values)
        if self._room is None:
            self._room = np.empty(int(len(values) * max(1, self._share)) + 1, values.dtype)
        elif stop > len(self._room):
            before = self._room[: self._count]
            self._room = np.empty(int(stop * GROWTH), values.dtype)
            self._room[: self._count] = before
        self._room[self._count : stop] = values
        self._count = stop

    def array(self) -> Any:
        """All that was copied."""
        kind = self._kind
        assert self._room is not None
        content = pa.py_buffer(self._room[: self._count])
        if not self._is_ragged:
            return pa.Array.from_buffers(kind, self._count, [None, content])
        lengths = np.concatenate(self._lengths)
        edges = np.zeros(len(lengths) + 1, dtype=offset_dtype(kind))
        np.cumsum(lengths, out=edges[1:])
        offsets = pa.py_buffer(edges)
        if kind in TEXTS:
            return pa.Array.from_buffers(kind, len(lengths), [None, offsets, content])
        child = pa.Array.from_buffers(kind.value_type, self._count, [None, content])
        return pa.Array.from_buffers(kind, len(lengths), [None, offsets], children=[child])


def largest(offsets: Any) -> int:
    """The largest place that offsets of a type can hold."""
    return int(np.iinfo(offsets).max)
