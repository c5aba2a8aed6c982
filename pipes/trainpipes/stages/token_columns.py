"""Reads a column of rows of any kind; errors name the column and the row."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from trainpipes._internal.messages import need_columns, no_columns
from trainpipes._internal.text import shown
from trainpipes.columns.arrays import is_list as has_offsets
from trainpipes.columns.arrays import to_numpy
from trainpipes.columns.bad_text import BadCell
from trainpipes.columns.block import Block
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.layout import IntArray
from trainpipes.errors import DataError
from trainpipes.kinds.blame import blame, in_column
from trainpipes.kinds.stage import Stage
from trainpipes.stages.pad_columns import Column, Even, Ragged, first_unfit, of_arrow, of_list


def cell(row: Any, name: str, caller: object) -> Any:
    if not isinstance(row, Mapping):
        raise no_columns(type(row).__name__, caller)
    if name not in row:
        need_columns(list(row), [name], caller)
    return row[name]


def cells(block: Block, name: str, caller: Stage) -> Any:
    """A column as it is: of Arrow, a tensor, or a list."""
    data = block.data
    if isinstance(data, list):
        found: list[Any] = []
        try:
            for row in data:
                found.append(cell(row, name, caller))
        except DataError as error:
            blame(error, caller, int(block.ids[len(found)]))
            raise
        return found
    need_columns(names := names_of(block, caller), [name], caller)
    return data.tensors[names.index(name)] if isinstance(data, TensorRows) else data.column(name)


def names_of(block: Block, caller: Stage) -> list[str]:
    data = block.data
    if isinstance(data, pa.Table):
        return list(data.column_names)
    if isinstance(data, TensorRows):
        if data.names is None:
            raise no_columns("tuple of tensors", caller)
        return list(data.names)
    if data and not isinstance(data[0], Mapping):
        raise no_columns(type(data[0]).__name__, caller)
    return list(data[0]) if data else []


def read(block: Block, name: str, caller: Stage) -> Column:
    """A column as numbers: lists, numbers or arrays; or something else."""
    column = cells(block, name, caller)
    try:
        if isinstance(column, torch.Tensor):
            return Even(column.numpy())
        return of_list(column, name) if isinstance(column, list) else of_arrow(column, name)
    except BadCell as bad:
        raise in_column(bad, name, caller, block.ids) from None


def lengths_of(block: Block, name: str, caller: Stage) -> IntArray:
    """Each row's length, int64 ``[rows]``, by a column of lists or of lengths."""
    column, found = cells(block, name, caller), None
    if isinstance(column, list):  # each row by itself
        found = np.array([_length(value) for value in column], dtype=np.int64)
    elif isinstance(column, pa.ChunkedArray) and has_offsets(column.type) and not column.null_count:
        found = to_numpy(pc.list_value_length(column)).astype(np.int64)
    elif isinstance(numbers := read(block, name, caller), Ragged):
        found = numbers.lengths
    elif isinstance(numbers, Even) and numbers.values.ndim > 1:
        found = np.full(len(block), numbers.values.shape[1], dtype=np.int64)
    elif isinstance(numbers, Even) and numbers.values.dtype.kind in "iu":
        found = numbers.values.astype(np.int64)
    if found is not None and not (found < 0).any():
        return found
    row, got = None, _kind(column)
    if found is not None:
        row = int(np.argmax(found < 0))
        got = shown(column[row].as_py() if isinstance(column, pa.ChunkedArray) else column[row], 60)
    problem = (
        "must tell how long a row is, as a list of numbers or as an integer of 0 or more, got "
        f"{got}; name another by column=..."
    )
    raise in_column(BadCell(row, problem), name, caller, block.ids)


def _length(value: Any) -> int:
    if isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0:
        return len(value)
    try:
        found = -1 if isinstance(value, bool | np.bool_) else index(value)
    except TypeError:
        return -1
    return found if found < 1 << 63 else -1


def numbers_of(block: Block, name: str, caller: Stage) -> tuple[npt.NDArray[Any], IntArray]:
    """A column of lists of numbers: all values, and each row's length."""
    found = read(block, name, caller)
    if isinstance(found, Ragged) and found.values.ndim == 1:
        return found.values, found.lengths
    if isinstance(found, Even) and found.values.ndim == 2:
        rows, length = found.values.shape
        return found.values.reshape(-1), np.full(rows, length, dtype=np.int64)
    got = _kind(cells(block, name, caller))
    problem = f"must hold a list of numbers a row, got {got}; tokenize() makes such columns"
    raise in_column(BadCell(None, problem), name, caller, block.ids)


def ids_of(
    block: Block, name: str, caller: Stage, dtype: npt.DTypeLike = np.int64
) -> tuple[npt.NDArray[Any], IntArray]:
    values, lengths = numbers_of(block, name, caller)
    bad: BadCell | None = None
    if values.size and values.dtype.kind not in "iu":
        got = _kind(cells(block, name, caller))
        bad = BadCell(None, f"must hold lists of token ids, which are integers, got {got}")
    elif (place := first_unfit(values, dtype)) is not None:
        row = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
        bad = BadCell(row, f"holds {values[place]}, which {np.dtype(dtype)} cannot hold")
    if bad is not None:
        raise in_column(bad, name, caller, block.ids)
    return values, lengths


def check_beside(
    block: Block, name: str, own: IntArray, column: str, lengths: IntArray, caller: Stage
) -> None:
    if not np.array_equal(own, lengths):
        row = int(np.argmax(own != lengths))
        problem = (
            f"goes with {column!r} and must have as many numbers in each row, got {own[row]} where "
            f"{column!r} has {lengths[row]}"
        )
        raise in_column(BadCell(row, problem), name, caller, block.ids)


def is_list(block: Block, name: str, caller: Any = None) -> bool:
    column = cells(block, name, caller)
    if isinstance(column, pa.ChunkedArray):
        return has_offsets(column.type) or bool(pa.types.is_fixed_size_list(column.type))
    if isinstance(column, torch.Tensor):
        return column.ndim > 1
    return isinstance(column[0], list | tuple) or getattr(column[0], "ndim", 0) > 0


def label_dtype(ids: npt.NDArray[Any]) -> type[np.int32 | np.int64]:
    return np.int32 if np.can_cast(ids.dtype, np.int32, "safe") else np.int64


def _kind(column: Any) -> str:
    if isinstance(column, pa.ChunkedArray):
        return str(column.type)
    if isinstance(column, torch.Tensor):
        return f"a tensor {list(column.shape)}"
    return type(column[0]).__name__ if column else "nothing"
