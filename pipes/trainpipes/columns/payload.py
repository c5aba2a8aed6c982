"""What rows are made of, never changed: a ``pyarrow.Table`` of columns; ``TensorRows``, tensors with a
common first dimension (``from_tensors``); or a ``list`` of Python objects, one a row (``from_dataset``,
or after a row function). And how parts of it are joined.

Arrow tables are joined as they come, so that each one's memory serves for decoding the next. Of tables of
many columns the numbers wait until all are there: then Arrow copies those of several columns in a call,
in the order in which the rows are given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.checks import IntArray
from trainpipes._internal.pool import in_parts
from trainpipes.columns import arrays
from trainpipes.columns.python_values import python_rows
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.columns.types import difference
from trainpipes.errors import SchemaError

#: Columns of the same type from which it is worth it.
LEAST_COLUMNS = 8
#: Columns that are put in order at a time, after which the memory that they had is free.
AT_A_TIME = 16


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """Columns of a table of the same type, at ``places`` in it: their names, and the values of each,
    ``[rows]``.
    """

    kind: pa.DataType
    places: Sequence[int]
    names: Sequence[str]
    columns: Sequence[arrays.Array]

    def picked(self, index: IntArray | None) -> Sequence[arrays.Array]:
        """The rows at ``index``, or all if None; views where they follow each other."""
        if index is None:
            return self.columns
        start = first_of_consecutive(index)
        if start is not None:
            return [values[start : start + len(index)] for values in self.columns]
        return [values.take(index) for values in self.columns]


def first_of_consecutive(index: IntArray) -> int | None:
    """Where rows begin that follow each other; None of others."""
    start, count = int(index[0]) if len(index) else 0, len(index)
    if count and index[-1] - start != count - 1:
        return None
    return start if (index == np.arange(start, start + count)).all() else None


def number_kinds(schema: pa.Schema) -> dict[pa.DataType, list[int]]:
    """Types of numbers that many columns have, with the columns' places."""
    if len(schema) < LEAST_COLUMNS:
        return {}
    kinds = schema.types
    places: dict[int, list[int]] = defaultdict(list)
    for place, kind in enumerate(kinds):
        places[kind.id].append(place)
    many = {kinds[some[0]]: some for some in places.values() if len(some) >= LEAST_COLUMNS}
    return {
        kind: some for kind, some in many.items() if arrays.is_number(kind) and kind != pa.bool_()
    }


def is_wide(schema: pa.Schema) -> bool:
    """Whether most columns are numbers of a type that many have."""
    return 2 * sum(map(len, number_kinds(schema).values())) > len(schema)


def numbers_of(table: pa.Table) -> tuple[Numbers, ...]:
    """The columns of numbers without nulls, each in one piece, of types that many have. Each holds its own
    memory.
    """
    if table.num_columns < LEAST_COLUMNS or not len(table):
        return ()
    return _of_table(table)


@arrays.once_for_each
def _of_table(table: pa.Table) -> tuple[Numbers, ...]:
    return tuple(_found(table))


def _found(table: pa.Table) -> Iterator[Numbers]:
    names, kinds = table.column_names, number_kinds(table.schema)
    pieces = table.to_batches() if kinds else []
    columns = pieces[0].columns if len(pieces) == 1 else table.columns
    for kind, places in kinds.items():
        found: dict[int, arrays.Array] = {}
        for place in places:
            column = columns[place]
            if len(pieces) > 1:
                column = column.chunk(0) if column.num_chunks == 1 else None
            if column is not None and not column.null_count:
                found[place] = np.from_dlpack(column)
        if len(found) >= LEAST_COLUMNS:
            some = [names[place] for place in found]
            yield Numbers(kind, tuple(found), some, list(found.values()))


@arrays.once_for_each
def different_names(table: pa.Table) -> list[str]:
    """The names of the columns; raises ValueError if two are the same."""
    names: list[str] = table.column_names
    if len(set(names)) < len(names):
        raise ValueError("two columns have the same name")
    return names


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
    """Tables joined in turn, into columns with room for about ``rows`` rows. Of wide tables the numbers stay
    where they are until all rows are there, and are then copied once.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._schema: pa.Schema | None = None
        #: Columns by their places, but the numbers of a wide table; and tables of these.
        self._columns: dict[int, _Column] = {}
        self._numbers: list[int] = []
        self._tables: list[pa.Table] = []
        self.rows = 0
        #: Whether most columns are numbers of a type that many have.
        self.is_wide = False

    def add(self, table: pa.Table) -> None:
        """The next rows, copied, or referred to where they are few or the last."""
        if self._schema is None:
            self._begin(table.schema)
        elif table.schema != self._schema:
            raise unlike(self._schema, table.schema)
        self.rows += len(table)
        share = self._rows / max(1, len(table)) * MARGIN if len(table) < self._rows else 0
        if self._numbers:
            self._tables.append(table.select(self._numbers))
        for place, column in self._columns.items():
            column.add(table.column(place), share)

    def _begin(self, schema: pa.Schema) -> None:
        self._schema, self.is_wide = schema, is_wide(schema)
        for place, kind in enumerate(schema.types):
            if self.is_wide and arrays.is_number(kind):
                self._numbers.append(place)
            else:
                self._columns[place] = _Column(kind)

    def table(self, order: IntArray | None = None) -> pa.Table:
        """The rows, at these places if ``order`` is given. To be asked for once."""
        assert self._schema is not None
        columns = dict(zip(self._numbers, self._numbers_joined(order), strict=True))
        columns |= {place: column.joined(order) for place, column in self._columns.items()}
        return pa.table([columns[place] for place in range(len(columns))], schema=self._schema)

    def _numbers_joined(self, order: IntArray | None) -> Iterator[pa.ChunkedArray]:
        """The numbers of a wide table, each in one piece; what they were made of is let go meanwhile."""
        if not self._numbers:
            return
        table = pa.concat_tables(self._tables)
        places = range(len(self._numbers))
        some = [[table.select(places[n : n + AT_A_TIME])] for n in places[::AT_A_TIME]]
        self._tables = []
        del table
        index = None if order is None else arrays.places_to_arrow(order, self.rows)

        def joined(columns: list[pa.Table]) -> pa.Table:
            if index is None:
                return columns.pop().combine_chunks()
            return pc.take(columns.pop(), index, boundscheck=False)

        for columns in in_parts(joined, some):
            yield from columns.columns


class _Column:
    """One column of the joined table, in memory that grows."""

    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        self._is_ragged = kind in arrays.TEXTS or arrays.is_list(kind)
        inner = kind.value_type if arrays.is_list(kind) else kind
        plain = pa.types.is_integer(inner) or pa.types.is_floating(inner)
        self._can_be_copied = kind in arrays.TEXTS or plain  # Arrow joins all others
        self._room: arrays.Array | None = None
        self._count = 0  # values in it
        self._lengths: list[arrays.Array] = []  # of rows, where those differ
        self._chunks: list[Any] = []

    def add(self, column: pa.ChunkedArray, share: float) -> None:
        """The next rows; in all there will be about ``share`` times as many, or if 0 no more."""
        copies = self._room is not None or (
            self._can_be_copied and share > 0 and column.nbytes * share >= LARGE
        )
        for chunk in filter(len, column.chunks):
            copies = copies and not self._chunks
            if not copies or not self._copy(chunk, share * len(column) / len(chunk)):
                self._chunks.append(chunk)

    def _copy(self, chunk: Any, share: float) -> bool:
        """Copy a chunk; False, with nothing changed, if it cannot be."""
        if chunk.null_count:
            return False
        values, edges = arrays.apart(chunk) if self._is_ragged else (chunk, None)
        if isinstance(values, pa.Array):
            if values.null_count:
                return False
            values = arrays.to_numpy(values)
        if edges is not None:
            if self._count + len(values) > largest(edges.dtype):
                return False
            self._lengths.append(np.diff(edges))
        self._write(values, share)
        return True

    def _write(self, values: arrays.Array, share: float) -> None:
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
        return arrays.gathered(arrays.one_chunk(self._joined()), order)

    def _joined(self) -> Any:
        has_rows = self._count or self._lengths
        filled = [] if self._room is None or not has_rows else [self._filled(self._room)]
        column = pa.chunked_array(filled + self._chunks, self._kind)
        try:
            return arrays.one_chunk(column)
        except pa.ArrowInvalid:  # there is more than 32-bit offsets count
            return column

    def _filled(self, room: arrays.Array) -> Any:
        kind, content = self._kind, pa.py_buffer(room[: self._count])
        if not self._is_ragged:
            return pa.Array.from_buffers(kind, self._count, [None, content])
        lengths = np.concatenate(self._lengths)
        edges = np.zeros(len(lengths) + 1, dtype=arrays.offset_dtype(kind))
        np.cumsum(lengths, out=edges[1:])
        offsets = pa.py_buffer(edges)
        if kind in arrays.TEXTS:
            return pa.Array.from_buffers(kind, len(lengths), [None, offsets, content])
        child = pa.Array.from_buffers(kind.value_type, self._count, [None, content])
        return pa.Array.from_buffers(kind, len(lengths), [None, offsets], children=[child])


def largest(offsets: Any) -> int:
    return int(np.iinfo(offsets).max)


Payload: TypeAlias = "pa.Table | TensorRows | list[Any]"


def take_payload(data: Payload, index: IntArray) -> Payload:
    if isinstance(data, list):
        return [data[i] for i in index.tolist()]
    if isinstance(data, TensorRows):
        return data.take(index)
    return _take_rows(data, index)


def slice_payload(data: Payload, start: int, stop: int) -> Payload:
    if isinstance(data, list):
        return data[start:stop]
    if isinstance(data, TensorRows):
        return data.slice(start, stop)
    return data.slice(start, stop - start)


def payload_bytes(data: Payload) -> int:
    if isinstance(data, pa.Table):
        return _bytes_of_table(data)
    return 0 if isinstance(data, list) else int(data.nbytes)


@arrays.once_for_each
def _bytes_of_table(table: pa.Table) -> int:
    return int(table.nbytes)


def payload_row_bytes(data: Payload) -> float:
    """Bytes of a row, about: of Python objects, those of arrays, tensors and bytes in the first."""
    if not len(data):
        return 0.0
    return _object_bytes(data[0]) if isinstance(data, list) else payload_bytes(data) / len(data)


def _object_bytes(value: Any) -> float:
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_object_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_object_bytes, value[:1])) * len(value)
    try:
        return float(getattr(value, "nbytes", 0))
    except RuntimeError:  # a sparse tensor has none
        return 0.0


def payload_rows(data: Payload) -> list[Any]:
    if isinstance(data, list):
        return data
    return data.rows() if isinstance(data, TensorRows) else python_rows(data)


def join_payloads(parts: Iterable[Payload], rows: int | None = None) -> Payload:
    joined = _joined(parts, rows)
    return joined.table() if isinstance(joined, Joining) else joined


def join_in_order(
    parts: Iterable[Payload], rows: int, order: IntArray | None
) -> tuple[Payload, bool]:
    """The parts joined; and whether their rows, if there are as many as expected, lie in this order now. Rows
    of many columns are put in order at once: batch by batch, each row would be far from the last in memory.
    """
    joined = _joined(parts, rows)
    if not isinstance(joined, Joining):
        return joined, False
    if order is None or not joined.is_wide or joined.rows != rows:
        return joined.table(), False
    return joined.table(order), True


def _joined(parts: Iterable[Payload], rows: int | None) -> Payload | Joining:
    if rows is None:
        parts = list(parts)
        rows = sum(map(len, parts))
    coming = iter(parts)
    joining: Joining | None = None
    others: list[Payload] = []
    for part in coming:
        if not isinstance(part, pa.Table):
            others = [part, *coming]
            break
        joining = joining or Joining(rows)
        joining.add(part)
        del part
    if joining is not None:
        if not others:
            return joining
        others.insert(0, joining.table())
    tensors = [part for part in others if isinstance(part, TensorRows)]
    if len(tensors) == len(others):
        return tensors[0].joined(tensors[1:])
    return [row for part in others for row in payload_rows(part)]


def _take_rows(table: pa.Table, index: IntArray) -> pa.Table:
    try:
        return arrays.gathered(table, index)
    except pa.ArrowInvalid:  # chunks that together hold more than 32-bit offsets count
        columns = [_by_chunk(column, index) for column in table.columns]
        return pa.table(columns, schema=table.schema)


def _by_chunk(column: pa.ChunkedArray, index: IntArray) -> pa.Array:
    parts, back = arrays.parts_of(np.cumsum([0, *map(len, column.chunks)]), index)
    taken = pa.concat_arrays([arrays.gathered(column.chunk(n), places) for n, places in parts])
    return taken if back is None else arrays.gathered(taken, back)
