"""Columns of token ids of different lengths, as pack and token budgets read them."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.messages import need_columns, no_columns
from trainpipes._internal.text import shown
from trainpipes.columns.arrays import is_list as has_offsets
from trainpipes.columns.arrays import to_numpy
from trainpipes.columns.bad_text import BadCell
from trainpipes.columns.block import Block
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.layout import IntArray
from trainpipes.errors import DataError, SchemaError
from trainpipes.kinds.blame import at_row, blame, in_column
from trainpipes.kinds.stage import Stage
from trainpipes.stages.pad_columns import Column, Even, Ragged, first_unfit, of_arrow, of_list


def names_of(block: Block, asker: Stage) -> list[str]:
    """The columns of rows.

    Raises:
        SchemaError: the rows have none.
    """
    data = block.data
    if isinstance(data, pa.Table):
        return list(data.column_names)
    if isinstance(data, TensorRows):
        if data.names is not None:
            return list(data.names)
    elif not data:
        return []
    elif isinstance(data[0], Mapping):
        return list(data[0])
    kind = "tuple of tensors" if isinstance(data, TensorRows) else type(data[0]).__name__
    raise no_columns(kind, asker)


def lengths_of(block: Block, name: str, asker: Stage) -> IntArray:
    """How long each row is by a column: of lists, or of integers that say so. int64 ``[rows]``.

    Raises:
        SchemaError: the column is not there, or holds something else.
        DataError: a null, or a negative length; names the row.
    """
    data = block.data
    if isinstance(data, list):
        return _lengths_of_rows(block, name, asker)
    need_columns(names_of(block, asker), [name], asker)
    if isinstance(data, pa.Table):
        column = data.column(name)
        if has_offsets(column.type) and not column.null_count:
            counts: IntArray = to_numpy(pc.list_value_length(column)).astype(np.int64)
            return counts
    read = _read(block, name, asker)
    if isinstance(read, Ragged):
        return read.lengths
    if isinstance(read, Even):
        if read.values.ndim > 1:
            return np.full(len(block), read.values.shape[1], dtype=np.int64)
        if read.values.dtype.kind in "iu":
            lengths = read.values.astype(np.int64)
            if (lengths < 0).any():
                place = int(np.argmax(lengths < 0))
                bad = BadCell(
                    place, f"must tell how long a row is, 0 or more, got {lengths[place]}"
                )
                raise in_column(bad, name, asker, block.ids)
            return lengths
    raise SchemaError(
        f"{asker}: column {name!r} must tell how long a row is, as a list of numbers or as an integer, "
        f"got {_kind(block, name)}; name another by column=...",
        stage=str(asker),
    )


def _lengths_of_rows(block: Block, name: str, asker: Stage) -> IntArray:
    """The same of rows that are Python objects, each by itself."""
    lengths = np.zeros(len(block), dtype=np.int64)
    assert isinstance(block.data, list)
    for number, row in enumerate(block.data):
        try:
            lengths[number] = _length_of_row(row, name, asker)
        except DataError as error:
            blame(error, asker, int(block.ids[number]))
            raise
    return lengths


def _length_of_row(row: Any, name: str, asker: Stage) -> int:
    if not isinstance(row, Mapping):
        raise no_columns(type(row).__name__, asker)
    need_columns(list(row), [name], asker)
    value = row[name]
    if isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0:
        return len(value)
    try:
        length = -1 if isinstance(value, bool | np.bool_) else index(value)
    except TypeError:
        length = -1
    if not 0 <= length < 1 << 63:
        raise SchemaError(
            f"{asker}: column {name!r} must tell how long a row is, as a list of numbers or as an integer "
            f"of 0 or more, got {shown(value, 60)}; name another by column=...",
            stage=str(asker),
        )
    return length


def numbers_of(block: Block, name: str, asker: Stage) -> tuple[npt.NDArray[Any], IntArray]:
    """A column of lists of numbers: all values one after the other, and each row's length.

    Raises:
        SchemaError: the column is not there, or holds something else.
        DataError: a null; names the row.
    """
    need_columns(names_of(block, asker), [name], asker)
    read = _read(block, name, asker)
    if isinstance(read, Ragged) and read.values.ndim == 1:
        return read.values, read.lengths
    if isinstance(read, Even) and read.values.ndim == 2:
        rows, length = read.values.shape
        return read.values.reshape(-1), np.full(rows, length, dtype=np.int64)
    raise SchemaError(
        f"{asker}: column {name!r} must hold a list of numbers a row, got {_kind(block, name)}; "
        "tokenize() makes such columns",
        stage=str(asker),
    )


def ids_of(block: Block, name: str, asker: Stage) -> tuple[npt.NDArray[Any], IntArray]:
    """A column of lists of token ids, as ``numbers_of`` gives it.

    Raises:
        SchemaError: the column is not there, or holds something else, floats and bools too.
        DataError: a null, or an id beyond int64; names the row.
    """
    values, lengths = numbers_of(block, name, asker)
    if values.dtype.kind not in "iu":
        raise SchemaError(
            f"{asker}: column {name!r} must hold lists of token ids, which are integers, got "
            f"{_kind(block, name)}",
            stage=str(asker),
        )
    place = first_unfit(values, np.int64)
    if place is not None:
        row = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
        bad = BadCell(row, f"holds {values[place]}, and token ids are of 63 bits")
        raise in_column(bad, name, asker, block.ids)
    return values, lengths


def beside(
    block: Block, name: str, column: str, lengths: IntArray, asker: Stage
) -> npt.NDArray[Any]:
    """The values of a column that has as many numbers in each row as another one.

    Args:
        block: the rows.
        name: the column.
        column: the other one.
        lengths: numbers in each of its rows, int64 ``[rows]``.
        asker: the stage, for messages.

    Raises:
        DataError: a row has more or fewer; names it.
    """
    values, own = numbers_of(block, name, asker)
    if not np.array_equal(own, lengths):
        place = int(np.argmax(own != lengths))
        message = (
            f"{asker}: column {name!r} goes with {column!r} and must have as many numbers in each row, got "
            f"{own[place]} where {column!r} has {lengths[place]}"
        )
        raise at_row(message, asker, block.ids[place])
    return values


def is_list(block: Block, name: str) -> bool:
    """Whether a column of rows holds lists, told by their type, or by the first row."""
    data: Any = block.data
    if isinstance(data, pa.Table):
        kind = data.column(name).type
        return has_offsets(kind) or bool(pa.types.is_fixed_size_list(kind))
    if isinstance(data, TensorRows):
        return data.tensors[data.names.index(name)].ndim > 1  # type: ignore[union-attr]
    value = data[0][name]
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0


def label_dtype(ids: npt.NDArray[Any]) -> type[np.int32 | np.int64]:
    """What holds these ids and -100."""
    return np.int32 if np.can_cast(ids.dtype, np.int32, "safe") else np.int64


def _read(block: Block, name: str, asker: Stage) -> Column:
    data: Any = block.data
    try:
        if isinstance(data, pa.Table):
            return of_arrow(data.column(name), name)
        if isinstance(data, TensorRows):
            assert data.names is not None
            return Even(data.tensors[data.names.index(name)].numpy())
        for number, row in enumerate(data):
            if not isinstance(row, Mapping) or name not in row:
                raise BadCell(number, "is not there, and each row is a dict that has it")
        return of_list([row[name] for row in data], name)
    except BadCell as bad:
        raise in_column(bad, name, asker, block.ids) from None


def _kind(block: Block, name: str) -> str:
    data: Any = block.data
    if isinstance(data, pa.Table):
        return str(data.column(name).type)
    if isinstance(data, TensorRows):
        return f"a tensor {list(data.tensors[data.names.index(name)].shape)}"  # type: ignore[union-attr]
    return type(data[0][name]).__name__ if data else "nothing"
