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
from trainpipes.errors import DataError
from trainpipes.sources.memmap.manifest import Array, Layout
from trainpipes.stages.read_columns import Opaque, Ragged, of_arrow

#: Bytes and rows of a block, about.
BLOCK_BYTES = 4 << 20
BLOCK_ROWS = 1024
#: NumPy's letters of the dtypes that columns can hold.
CHARS = "?bBhHiIlLqQefd"
#: Up to here a float64 holds every integer.
EXACT = 2.0**53


@dataclass(frozen=True)
class Arrays:
    """Some rows: what each is, names of columns, and the columns: arrays ``[rows, ...]``, or ragged ones."""

    layout: Layout
    names: tuple[str, ...]
    columns: tuple[Array | Ragged, ...]

    def __len__(self) -> int:
        return _count(self.columns[0])

    def slice(self, start: int, stop: int) -> Arrays:
        columns = tuple(_slice(column, start, stop) for column in self.columns)
        return Arrays(self.layout, self.names, columns)


def _count(column: Array | Ragged) -> int:
    return len(column.lengths) if isinstance(column, Ragged) else len(column) if column.ndim else -1


def _slice(column: Array | Ragged, start: int, stop: int) -> Array | Ragged:
    if not isinstance(column, Ragged):
        return column[start:stop]
    first, stop_at = (int(column.lengths[:end].sum()) for end in (start, stop))
    return Ragged(column.values[first:stop_at], column.lengths[start:stop])


def bad_row(row: int, name: str, what: str) -> DataError:
    return DataError(f"write_memmap(): row {row}: column {name!r} {what}", row=row)


def _laid_out(row: Any) -> tuple[Layout, tuple[str, ...], list[Any]]:
    if isinstance(row, Mapping):
        return "dict", tuple(map(str, row)), list(row.values())
    values = list(row) if isinstance(row, tuple) else [row]
    return "tuple", tuple(map(str, range(len(values)))), values


def of_arrays(arrays: Any) -> tuple[int, Iterator[Arrays]]:
    whole = of_batch(arrays, 0)
    size = sum(column.nbytes for column in whole.columns if isinstance(column, np.ndarray))
    row_bytes = size // max(1, len(whole))
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    starts = range(0, max(1, len(whole)), step)
    return len(whole), (whole.slice(start, start + step) for start in starts)


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
    layout, names, given = _laid_out(batch)
    columns = [_column(name, value, first_row) for name, value in zip(names, given, strict=True)]
    counts = dict(zip(names, map(_count, columns), strict=True))
    if len({*counts.values()}) > 1 or -1 in counts.values():
        got = ", ".join(f"{n}: {'a number' if k < 0 else k}" for n, k in counts.items())
        raise DataError(
            f"write_memmap(): columns have one and the same first dimension, got {got} from row "
            f"{first_row} on",
            row=first_row,
        )
    return Arrays(layout, names, tuple(columns))


def _unmasked(value: Any, name: str, row: int) -> Any:
    if np.ma.is_masked(value):
        raise bad_row(row, name, "is masked in part; fill it, array.filled(0)")
    return as_array(value)


def _column(name: str, value: Any, first_row: int) -> Array | Ragged:
    if isinstance(value, list):
        return _joined(name, [_cell(cell, name, first_row) for cell in value], first_row, False)
    if not isinstance(value, pa.Array | pa.ChunkedArray):
        array = np.asarray(_unmasked(value, name, first_row))
        return _numbers(array, name, array.dtype, first_row)
    try:
        found = of_arrow(
            value if isinstance(value, pa.ChunkedArray) else pa.chunked_array([value]), name
        )
    except BadCell as bad:
        raise bad_row(first_row + (bad.row or 0), name, str(bad)) from bad
    if isinstance(found, Opaque):
        raise bad_row(first_row, name, NO_NUMBERS.format(value.type))
    return found if isinstance(found, Ragged) else found.values


def of_rows(rows: Iterable[Any], ragged: Collection[str] = (), first: int = 0) -> Iterator[Arrays]:
    model: tuple[Layout, tuple[str, ...]] | None = None
    cells: list[list[tuple[Array, bool]]] = []
    size = 0

    def part() -> Arrays:
        assert model is not None
        columns = zip(model[1], zip(*cells, strict=True), strict=True)
        return Arrays(*model, tuple(_joined(n, c, first, n in ragged) for n, c in columns))

    for number, row in enumerate(rows, first):
        layout, names, values = _laid_out(row)
        model = model or (layout, names)
        if (layout, names) != model:
            if (layout, sorted(names)) != (model[0], sorted(model[1])):
                raise DataError(
                    f"write_memmap(): row {number} is {_kind(layout, names)}, and those before it are "
                    f"{_kind(*model)}: all rows have the same columns",
                    row=number,
                )
            values = [values[names.index(name)] for name in model[1]]
        cells.append([_cell(v, n, number) for n, v in zip(model[1], values, strict=True)])
        size += sum(cell.nbytes for cell, _ in cells[-1])
        if size >= BLOCK_BYTES or len(cells) == BLOCK_ROWS:
            yield part()
            cells, first, size = [], number + 1, 0
    if cells:
        yield part()


def _kind(layout: Layout, names: Sequence[str]) -> str:
    if layout == "dict":
        return f"a dict of {', '.join(names)}"
    return f"a tuple of {len(names)}" if len(names) > 1 else "a single value"


NO_NUMBERS = (
    "holds {}, and a memory map holds bool, integers and floats of up to 64 bits, or bytes: encode text "
    "(.encode(), or tokenize it), and leave out what cannot be"
)


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
        _exact(_rounded(np.array(value, object).flat), name, row)
    return _numbers(array, name, type(value).__name__, row), isinstance(value, list)


def _rounded(values: Iterable[Any]) -> int | None:
    """The first of some values that is an integer and that a float64 does not hold, or None."""
    whole = (int(v) for v in values if isinstance(v, int | np.integer))
    return next((v for v in whole if int(float(v)) != v), None)


def _exact(number: int | None, name: str, row: int) -> None:
    if number is not None:
        raise bad_row(
            row, name,
            f"holds the integer {number} beside floats, or beside integers of another dtype, where only "
            "float64 holds both, and would round it: convert the column's values to one dtype, such as "
            "numpy.uint64",
        )  # fmt: skip


def _joined(
    name: str, cells: Sequence[tuple[Array, bool]], first_row: int, ragged: bool
) -> Array | Ragged:
    arrays = [array for array, _ in cells]
    kinds = {a.dtype for a in arrays if a.size}
    if len(kinds) > 1 and np.result_type(*kinds).kind == "f":
        for row, array in enumerate(arrays, first_row):
            if array.dtype.kind in "iu":
                _exact(_rounded(array[(array >= EXACT) | (array <= -EXACT)]), name, row)
    if len({a.shape for a in arrays}) == 1 and not ragged and not any(many for _, many in cells):
        return np.stack(arrays)
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
    return Ragged(np.concatenate(full or [np.empty(0)]), lengths)
