"""Blocks of columns out of whatever ``write_memmap`` is given: arrays, tables, or rows one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes.errors import DataError
from trainpipes.order import IntArray
from trainpipes.runtime.rows.block import TensorRows
from trainpipes.sources.memmap_format import Array, Layout
from trainpipes.stages.pad_columns import BadCell, Even, of_arrow
from trainpipes.stages.pad_columns import Ragged as RaggedColumn

__all__ = ["Part", "Ragged", "of_arrays", "of_rows", "of_table"]

#: Bytes and rows of a block, about.
BLOCK_BYTES = 4 << 20
BLOCK_ROWS = 1024


@dataclass(frozen=True)
class Ragged:
    """A list of numbers a row.

    Args:
        values: the rows, one after the other, ``[values, ...]``.
        lengths: of each row, int64 ``[rows]``.
        listed: whether rows were lists, so that equal lengths mean nothing.
    """

    values: Array
    lengths: IntArray
    listed: bool = True


@dataclass(frozen=True)
class Part:
    """Some rows, as columns.

    Args:
        layout: what a row is.
        names: of the columns.
        columns: arrays ``[rows, ...]``, or ragged ones.
    """

    layout: Layout
    names: tuple[str, ...]
    columns: tuple[Array | Ragged, ...]

    def __len__(self) -> int:
        first = self.columns[0]
        return len(first.lengths) if isinstance(first, Ragged) else len(first)


def of_arrays(arrays: Any) -> tuple[int, Iterator[Part]]:
    """Rows of arrays or tensors that share their first dimension, and how many there are.

    Args:
        arrays: one, a tuple of them, or a dict.

    Raises:
        DataError: first dimensions differ.
    """
    layout, names, given = _laid_out(arrays)
    columns = [_of_any(name, value) for name, value in zip(names, given, strict=True)]
    lengths = [len(column) for column in columns]
    if any(c.ndim == 0 for c in columns) or len(set(lengths)) > 1:
        shapes = {n: list(c.shape) for n, c in zip(names, columns, strict=True)}
        raise DataError(
            f"write_memmap(arrays) takes arrays of one and the same first dimension, got {shapes}"
        )
    row_bytes = sum(c.nbytes for c in columns) // max(1, lengths[0])
    step = max(1, BLOCK_BYTES // max(1, row_bytes))

    def parts() -> Iterator[Part]:
        for start in range(0, max(1, lengths[0]), step):
            yield Part(layout, names, tuple(np.asarray(c[start : start + step]) for c in columns))

    return lengths[0], parts()


def _laid_out(row: Any) -> tuple[Layout, tuple[str, ...], list[Any]]:
    if isinstance(row, Mapping):
        return "dict", tuple(map(str, row)), list(row.values())
    if isinstance(row, tuple):
        return "tuple", tuple(map(str, range(len(row)))), list(row)
    return "tuple", ("0",), [row]


def of_table(table: pa.Table, first_row: int = 0) -> Part:
    """Rows of an Arrow table.

    Raises:
        DataError: a column does not hold numbers, or holds a null.
    """
    columns: list[Array | Ragged] = []
    for name in table.column_names:
        try:
            found = of_arrow(table.column(name), name)
        except BadCell as bad:
            row = None if bad.row is None else first_row + bad.row
            where = "" if row is None else f"row {row}: "
            raise DataError(f"write_memmap(): {where}column {name!r} {bad}", row=row) from bad
        if isinstance(found, RaggedColumn):
            columns.append(Ragged(found.values, found.lengths))
        elif isinstance(found, Even):
            columns.append(found.values)
        else:
            raise _no_numbers(name, str(table.schema.field(name).type), first_row)
    return Part("dict", tuple(table.column_names), tuple(columns))


def of_tensors(rows: TensorRows) -> Part:
    names = rows.names or tuple(map(str, range(len(rows.tensors))))
    layout: Layout = "tuple" if rows.names is None else "dict"
    return Part(layout, names, tuple(t.numpy() for t in rows.tensors))


def of_rows(
    rows: Iterable[Any], ragged: Collection[str] = (), batched: bool = False
) -> Iterator[Part]:
    """Rows that come one by one. They are copied, so that a buffer may be filled again.

    Args:
        rows: dicts, tuples, arrays, lists or numbers; each of several rows if ``batched``.
        ragged: names of columns whose rows have each a length of their own; lists and bytes do anyway.

    Raises:
        DataError: a row that is not like those before it, or holds no numbers; says which.
    """
    number = 0
    if batched:
        for batch in rows:
            part = _of_batch(batch, number)
            number += len(part)
            yield part
        return
    model: tuple[Layout, tuple[str, ...]] | None = None
    block: _Rows | None = None
    for row in rows:
        if block is None:
            model = model or _laid_out(row)[:2]
            block = _Rows(*model, number)
        block.add(row)
        number += 1
        if block.bytes >= BLOCK_BYTES or number - block.first_row == BLOCK_ROWS:
            yield block.part(ragged)
            block = None
    if block is not None:
        yield block.part(ragged)


class _Rows:
    """Rows on their way into a block.

    Args:
        layout, names: what each must be.
        first_row: number of the first.
    """

    def __init__(self, layout: Layout, names: tuple[str, ...], first_row: int) -> None:
        self._layout = layout
        self._names = names
        self._cells: list[list[tuple[Array, bool]]] = [[] for _ in names]
        self.first_row = first_row
        self.bytes = 0

    def add(self, row: Any) -> None:
        number = self.first_row + len(self._cells[0])
        layout, names, values = _laid_out(row)
        if layout != self._layout or (names != self._names and set(names) != set(self._names)):
            raise DataError(
                f"write_memmap(): row {number} is {_kind(layout, names)}, and those before it are "
                f"{_kind(self._layout, self._names)}: all rows have the same columns",
                row=number,
            )
        if names != self._names:
            values = [row[name] for name in self._names]
        for name, cells, value in zip(self._names, self._cells, values, strict=True):
            cell = _cell(value, name, number)
            self.bytes += cell[0].nbytes
            cells.append(cell)

    def part(self, ragged: Collection[str]) -> Part:
        columns = (
            _joined(name, cells, self.first_row, name in ragged)
            for name, cells in zip(self._names, self._cells, strict=True)
        )
        return Part(self._layout, self._names, tuple(columns))


def _of_batch(batch: Any, first_row: int) -> Part:
    if isinstance(batch, pa.Table | pa.RecordBatch):
        return of_table(pa.table(batch), first_row)
    layout, names, given = _laid_out(batch)
    columns: list[Array | Ragged] = []
    for name, value in zip(names, given, strict=True):
        if isinstance(value, list):
            columns.append(
                _joined(name, [_cell(v, name, first_row) for v in value], first_row, False)
            )
        else:
            columns.append(_of_any(name, value))
    part = Part(layout, names, tuple(columns))
    lengths = [len(Part(layout, names, (column,))) for column in columns]
    if len(set(lengths)) > 1:
        raise DataError(
            f"write_memmap(batched=True): row {first_row} starts a batch whose columns have "
            f"{dict(zip(names, lengths, strict=True))} rows: they must have equally many",
            row=first_row,
        )
    return part


def _kind(layout: Layout, names: Sequence[str]) -> str:
    if layout == "dict":
        return f"a dict of {', '.join(names)}"
    return f"a tuple of {len(names)}" if len(names) > 1 else "a single value"


def _cell(value: Any, name: str, row: int) -> tuple[Array, bool]:
    """A value as an array, and whether it was a list or bytes."""
    listed = isinstance(value, list | bytes | bytearray)
    if isinstance(value, bytes | bytearray):
        return np.frombuffer(value, np.uint8), True
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    try:
        array = np.array(value)
    except ValueError as error:  # lists of lists of different lengths
        raise DataError(
            f"write_memmap(): row {row}: column {name!r} holds lists of lists that differ in length, "
            "and one ragged dimension is what can be written: flatten it",
            row=row,
        ) from error
    if array.dtype.kind not in "biuf":
        raise _no_numbers(name, type(value).__name__, row)
    return array, listed


def _no_numbers(name: str, kind: str, row: int) -> DataError:
    return DataError(
        f"write_memmap(): row {row}: column {name!r} holds {kind}, and a memory map holds numbers or "
        "bytes: encode text (.encode(), or tokenize it), and leave out what cannot be",
        row=row,
    )


def _joined(
    name: str, cells: list[tuple[Array, bool]], first_row: int, ragged: bool
) -> Array | Ragged:
    arrays = [array for array, _ in cells]
    listed = ragged or any(was_list for _, was_list in cells)
    shapes = {array.shape for array in arrays}
    if not listed and len(shapes) == 1:
        return np.stack(arrays)
    full = [a for a in arrays if a.size] or arrays[:1]
    tail = full[0].shape[1:]
    for number, array in enumerate(arrays, first_row):
        if array.ndim == 0:
            raise DataError(
                f"write_memmap(): row {number}: column {name!r} is a single number, and in a ragged column "
                "each row is a list or an array",
                row=number,
            )
        if array.size and array.shape[1:] != tail:
            raise DataError(
                f"write_memmap(): row {number}: column {name!r} has shape {list(array.shape)}, and the "
                f"rows before it {list(full[0].shape)}: rows may differ in their first length only",
                row=number,
            )
    lengths = np.fromiter((len(a) for a in arrays), dtype=np.int64, count=len(arrays))
    values = np.concatenate([a.reshape(-1, *tail) for a in full])
    return Ragged(values, lengths, listed)


def _of_any(name: str, value: Any) -> Array:
    """An array, tensor or memory map; nothing of it is read or copied."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise _no_numbers(name, str(array.dtype), 0)
    return array
