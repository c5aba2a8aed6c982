"""Blocks of columns out of rows: arrays, tables, batches, or rows one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.bad_text import BadCell
from trainpipes.columns.row_types import as_array
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, DataError
from trainpipes.sources.memmap.manifest import Array, Layout
from trainpipes.stages.pad_columns import Opaque, Ragged, of_arrow

#: Bytes and rows of a block, about.
BLOCK_BYTES = 4 << 20
BLOCK_ROWS = 1024
#: NumPy's letters of the dtypes that columns can hold.
CHARS = "?bBhHiIlLqQefd"
#: Up to here a float64 holds every integer.
EXACT = 2.0**53
NO_NUMBERS = (
    "holds {}, and a memory map holds bool, integers and floats of up to 64 bits, or bytes: encode text "
    "(.encode(), or tokenize it), and leave out what cannot be"
)


@dataclass(frozen=True)
class Cells:
    """Some rows of a column: ``[rows, ...]``; of a ragged one all rows' values, and how many each has."""

    values: Array
    lengths: IntArray | None = None

    def __len__(self) -> int:
        return len(self.values if self.lengths is None else self.lengths)

    def slice(self, start: int, stop: int) -> Cells:
        if self.lengths is None:
            return Cells(self.values[start:stop])
        first, end = (int(self.lengths[:row].sum()) for row in (start, stop))
        return Cells(self.values[first:end], self.lengths[start:stop])


@dataclass(frozen=True)
class Arrays:
    """Some rows: what each is, and their columns."""

    layout: Layout
    columns: dict[str, Cells]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __str__(self) -> str:
        if self.layout == "dict":
            return f"a dict of {', '.join(self.columns)}"
        return f"a tuple of {len(self.columns)}" if len(self.columns) > 1 else "a single value"

    def slice(self, start: int, stop: int) -> Arrays:
        return Arrays(self.layout, {n: c.slice(start, stop) for n, c in self.columns.items()})


def bad_row(row: int, name: str, what: str) -> DataError:
    return DataError(f"write_memmap(): row {row}: column {name!r} {what}", row=row)


def _laid_out(row: Any) -> tuple[Layout, dict[str, Any]]:
    if not isinstance(row, Mapping):
        values = row if isinstance(row, tuple) else (row,)
        return "tuple", {str(number): value for number, value in enumerate(values)}
    found = {str(name): value for name, value in row.items()}
    if len(found) < len(row):
        raise ConfigError(f"write_memmap(): two columns have one name: {', '.join(map(str, row))}")
    return "dict", found


def of_arrays(arrays: Any) -> tuple[int, Iterator[Arrays]]:
    whole = of_batch(arrays, 0)
    size, count = sum(column.values.nbytes for column in whole.columns.values()), len(whole)
    step = max(1, BLOCK_BYTES * count // max(1, size))
    return count, (whole.slice(at, at + step) for at in range(0, max(1, count), step))


def of_batches(batches: Iterable[Any]) -> Iterator[Arrays]:
    row = 0
    for batch in batches:
        part = of_batch(batch, row)
        row += len(part)
        yield part


def of_batch(batch: Any, first_row: int) -> Arrays:
    if isinstance(batch, TensorRows):
        names = batch.names and dict(zip(batch.names, batch.tensors, strict=True))
        batch = names or batch.tensors
    if isinstance(batch, pa.Table | pa.RecordBatch):
        batch = {name: batch.column(name) for name in batch.schema.names}
    layout, given = _laid_out(batch)
    columns = {name: _column(name, value, first_row) for name, value in given.items()}
    counts = {n: len(c) if c.values.ndim else "a number" for n, c in columns.items()}
    if len({*counts.values()}) > 1 or "a number" in counts.values():
        raise DataError(
            "write_memmap(): columns have one and the same first dimension, got "
            f"{', '.join(f'{n}: {k}' for n, k in counts.items())} from row {first_row} on",
            row=first_row,
        )
    return Arrays(layout, columns)


def _column(name: str, value: Any, first_row: int) -> Cells:
    if isinstance(value, list):
        return _joined(name, [_cell(cell, name, first_row) for cell in value], first_row, False)
    if not isinstance(value, pa.Array | pa.ChunkedArray):
        array = np.asarray(_unmasked(value, name, first_row))
        return Cells(_numbers(array, name, array.dtype, first_row))
    try:
        column = value if isinstance(value, pa.ChunkedArray) else pa.chunked_array([value])
        found = of_arrow(column, name)
    except BadCell as bad:
        raise bad_row(first_row + (bad.row or 0), name, str(bad)) from bad
    if isinstance(found, Opaque):
        raise bad_row(first_row, name, NO_NUMBERS.format(value.type))
    return Cells(found.values, found.lengths if isinstance(found, Ragged) else None)


def of_rows(rows: Iterable[Any], ragged: Collection[str] = (), first: int = 0) -> Iterator[Arrays]:
    layout: Layout | None = None
    cells: dict[str, list[tuple[Array, bool]]] = {}
    size = number = 0

    def part() -> Arrays:
        assert layout is not None
        return Arrays(
            layout, {n: _joined(n, some, first, n in ragged) for n, some in cells.items()}
        )

    for number, row in enumerate(rows, first):
        kind, values = _laid_out(row)
        is_full = size >= BLOCK_BYTES or number - first == BLOCK_ROWS
        if is_full or kind != layout or values.keys() != cells.keys():
            if number > first:
                yield part()
            layout, cells, first, size = kind, {name: [] for name in values}, number, 0
        for name, some in cells.items():
            some.append(_cell(values[name], name, number))
            size += some[-1][0].nbytes
    if layout is not None:
        yield part()


def _unmasked(value: Any, name: str, row: int) -> Any:
    if np.ma.is_masked(value):
        raise bad_row(row, name, "is masked in part; fill it, array.filled(0)")
    return as_array(value)


def _numbers(array: Array, name: str, kind: Any, row: int) -> Array:
    if array.dtype.char not in CHARS:
        raise bad_row(row, name, NO_NUMBERS.format(kind))
    return array


def _cell(value: Any, name: str, row: int) -> tuple[Array, bool]:
    """A value as an array of its own, and whether it was a list or bytes."""
    if isinstance(value, bytes | bytearray):
        return np.frombuffer(bytes(value), np.uint8), True
    value = _unmasked(value, name, row)
    try:
        array = np.array(value)
    except ValueError as error:  # lists of lists of different lengths
        raise bad_row(
            row, name,
            "holds lists of lists that differ in length, and one ragged dimension is what can be written: "
            "flatten it",
        ) from error  # fmt: skip
    if isinstance(value, list) and array.dtype.kind == "f" and (abs(array) >= EXACT).any():
        _check_exact(np.array(value, object).flat, name, row)
    return _numbers(array, name, type(value).__name__, row), isinstance(value, list)


def _check_exact(values: Iterable[Any], name: str, row: int) -> None:
    """Raise DataError unless a float64 holds every integer among some values."""
    for value in values:
        if isinstance(value, int | np.integer) and int(float(value)) != int(value):
            raise bad_row(
                row, name,
                f"holds the integer {value} beside floats, or beside integers of another dtype, where only "
                "float64 holds both, and would round it: convert the column's values to one dtype, such as "
                "numpy.uint64",
            )  # fmt: skip


def _joined(name: str, cells: Sequence[tuple[Array, bool]], first_row: int, ragged: bool) -> Cells:
    arrays = [array for array, _ in cells]
    kinds = {a.dtype for a in arrays if a.size}
    if len(kinds) > 1 and np.result_type(*kinds).kind == "f":
        for row, array in enumerate(arrays, first_row):
            if array.dtype.kind in "iu":
                _check_exact(array[(array >= EXACT) | (array <= -EXACT)], name, row)
    if len({a.shape for a in arrays}) == 1 and not ragged and not any(many for _, many in cells):
        return Cells(np.stack(arrays))
    full = [a for a in arrays if a.ndim and len(a)] or arrays[:1]
    for row, array in enumerate(arrays, first_row):
        if not array.ndim or (len(array) and array.shape[1:] != full[0].shape[1:]):
            what = f"has shape {list(array.shape)}" if array.ndim else "is a single number"
            raise bad_row(
                row, name,
                f"{what}, and the rows before it {list(full[0].shape)}: in a ragged column rows are lists or "
                "arrays, and may differ in their first length only",
            )  # fmt: skip
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    return Cells(np.concatenate(full or [np.empty(0)]), lengths)
