"""Arrow tables joined as they come, so that each one's memory serves for decoding the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.types import IntArray
from trainpipes.columns.arrays import (
    TEXTS,
    Array,
    apart,
    dtype_of,
    gathered,
    is_list,
    numbers,
    offset_dtype,
    one_chunk,
    to_numpy,
)
from trainpipes.columns.matrices import matrix_kinds
from trainpipes.columns.types import difference
from trainpipes.errors import SchemaError

#: Bytes from which it matters.
LARGE = 4 << 20
#: How much more than expected there is room for, and how much more there is when that is not enough.
MARGIN, GROWTH = 1.1, 1.5


def unlike(first: pa.Schema, second: pa.Schema) -> SchemaError:
    name, *types = difference(first, second) or ("", first, second)
    before, later = ("missing" if kind is None else kind for kind in types)
    return SchemaError(
        f"rows have column {name!r} as {before}, and later ones as {later}: have the function that makes "
        "them, in map_batches() or a stage of your own, return columns of the same types each time"
    )


class Joining:
    """Tables joined one by one, into columns with room for about ``rows`` rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._schema: pa.Schema | None = None
        self._columns: list[_Column] = []
        self.rows = 0
        #: Whether most columns are numbers that lie side by side; see ``matrices``.
        self.is_wide = False

    def add(self, table: pa.Table) -> None:
        """The next rows, copied, or referred to where they are few or the last."""
        if self._schema is None:
            self._schema = table.schema
            self._columns = [_Column(field.type) for field in table.schema]
            self._lay_side_by_side(len(table))
        elif table.schema != self._schema:
            raise unlike(self._schema, table.schema)
        self.rows += len(table)
        share = self._rows / max(1, len(table)) * MARGIN if len(table) < self._rows else 0
        for column, given in zip(self._columns, table.columns, strict=True):
            column.add(given, share)

    def _lay_side_by_side(self, rows: int) -> None:
        """Give columns of one type, if there are many, room in one array; see ``matrices``."""
        assert self._schema is not None
        room = rows if self._rows <= rows else int(self._rows * MARGIN) + 1
        kinds = matrix_kinds(self._schema)
        self.is_wide = 2 * sum(map(len, kinds.values())) > len(self._schema)
        for kind, places in kinds.items():
            rooms = np.empty((len(places), room), dtype_of(kind))
            for place, own in zip(places, rooms, strict=True):
                self._columns[place].fill(own)

    def table(self, order: IntArray | None = None) -> pa.Table:
        """The rows, in this order of their places if one is given."""
        assert self._schema is not None
        columns = [column.joined(order) for column in self._columns]
        return pa.table(columns, schema=self._schema)


class _Column:
    """One column of the joined table, in memory that grows."""

    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        self._is_ragged = kind in TEXTS or is_list(kind)
        inner = kind.value_type if is_list(kind) else kind
        plain = pa.types.is_integer(inner) or pa.types.is_floating(inner)
        self._can_be_copied = kind in TEXTS or plain  # Arrow joins all others
        self._room: Array | None = None
        self._is_number = False
        self._count = 0  # values in it
        self._lengths: list[Array] = []  # of rows, where those differ
        self._chunks: list[Any] = []

    def fill(self, room: Array) -> None:
        """Copy the rows to come, numbers, into this array, as long as they fit."""
        self._room, self._is_number = room, True

    def add(self, given: pa.ChunkedArray, share: float) -> None:
        """The next rows; in all there will be about ``share`` times as many, or if 0 no more."""
        if self._is_number and not self._chunks and not given.null_count:
            assert self._room is not None
            for chunk in given.chunks:  # the usual case of many columns, in few calls
                self._write(numbers(chunk, self._room.dtype), 0)
            return
        copies = self._room is not None or (
            self._can_be_copied and share > 0 and given.nbytes * share >= LARGE
        )
        for chunk in filter(len, given.chunks):
            copies = copies and not self._chunks
            if not copies or not self._copy(chunk, share * len(given) / len(chunk)):
                self._chunks.append(chunk)

    def _copy(self, chunk: Any, share: float) -> bool:
        """Copy a chunk; False, with nothing changed, if it cannot be."""
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
        self._write(values, share)
        return True

    def _write(self, values: Array, share: float) -> None:
        stop = self._count + len(values)
        if self._room is None:
            self._room = np.empty(int(len(values) * max(1, share)) + 1, values.dtype)
        elif stop > len(self._room):
            before = self._room[: self._count]
            self._room = np.empty(int(stop * GROWTH), values.dtype)
            self._room[: self._count] = before
        self._room[self._count : stop] = values
        self._count = stop

    def joined(self, order: IntArray | None = None) -> Any:
        if order is None:
            return self._joined()
        if self._room is None or self._chunks or self._is_ragged:
            return gathered(one_chunk(self._joined()), order)
        self._room[: self._count] = self._room[: self._count].take(order)
        return self._joined()

    def _joined(self) -> Any:
        has_rows = self._count or self._lengths
        filled = [] if self._room is None or not has_rows else [self._filled(self._room)]
        column = pa.chunked_array(filled + self._chunks, self._kind)
        try:
            return one_chunk(column)
        except pa.ArrowInvalid:  # there is more than 32-bit offsets count
            return column

    def _filled(self, room: Array) -> Any:
        kind, content = self._kind, pa.py_buffer(room[: self._count])
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
    return int(np.iinfo(offsets).max)
