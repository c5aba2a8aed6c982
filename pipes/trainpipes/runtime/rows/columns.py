"""Columns of rows in the forms that users' functions take: Arrow, NumPy, torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from trainpipes.errors import SchemaError
from trainpipes.runtime.rows.bad_cell import BadCell
from trainpipes.runtime.rows.block import Payload, TensorRows
from trainpipes.runtime.rows.row_schema import column_of, short
from trainpipes.runtime.rows.row_types import NoColumn

__all__ = ["from_columns", "table_of", "to_columns", "untyped_columns"]


def table_of(data: Payload, asker: object) -> pa.Table:
    """Rows as an Arrow table.

    Raises:
        SchemaError: a row is not a dict of values that Arrow can hold.
    """
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, TensorRows) and data.names is not None:
        arrays = [_array(t.numpy()) for t in data.tensors]
        return pa.table(dict(zip(data.names, arrays, strict=True)))
    rows = data.rows() if isinstance(data, TensorRows) else data
    if not rows or not isinstance(rows[0], Mapping):
        kind = type(rows[0]).__name__ if rows else "nothing"
        raise SchemaError(
            f"{asker} works on columns, so that each row must be a dict, got {kind}; make dicts "
            "with map() first",
            stage=str(asker),
        )
    try:
        return pa.Table.from_pylist([{k: _plain(v) for k, v in row.items()} for row in rows])
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise SchemaError(
            f"{asker} works on columns, and these rows do not make any: {error}", stage=str(asker)
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    return value.tolist() if isinstance(value, np.ndarray) else value


def to_columns(table: pa.Table, format: str) -> Any:
    """A table in the form ``format`` names; ``[rows, ...]`` arrays where columns are even."""
    if format == "arrow":
        return table
    columns = {name: _numpy(table.column(name)) for name in table.column_names}
    if format == "numpy":
        return columns
    return {name: _tensor(column) for name, column in columns.items()}


def _numpy(column: pa.ChunkedArray) -> Any:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_fixed_size_list(array.type) and not array.null_count:
        flat = array.flatten().to_numpy(zero_copy_only=False)
        return flat.reshape(len(array), array.type.list_size)
    return array.to_numpy(zero_copy_only=False)


def _tensor(column: Any) -> Any:
    if column.dtype != object:
        return torch.from_numpy(np.array(column))
    if len(column) and isinstance(column[0], np.ndarray):
        return [torch.from_numpy(np.array(row)) for row in column]
    return column.tolist()


#: The type of a column that holds Python values, by its name; None where none is known.
TypeOf: TypeAlias = Callable[[str], "pa.DataType | None"]


def from_columns(columns: Any, asker: object, type_of: TypeOf | None = None) -> pa.Table:
    """What a function returned as an Arrow table: a table, or a dict of arrays or tensors.

    Args:
        columns: what it returned.
        asker: the stage, for messages.
        type_of: the types of columns of Python values, which say nothing of them but by what they happen
            to hold; None to take that.
    """
    if isinstance(columns, pa.RecordBatch):
        return pa.Table.from_batches([columns])
    if isinstance(columns, pa.Table):
        return columns
    if not isinstance(columns, Mapping):
        raise SchemaError(
            f"{asker}: the function returns a dict of columns or a pyarrow.Table, got "
            f"{type(columns).__name__}",
            stage=str(asker),
        )
    return pa.table(
        {name: _returned(column, name, asker, type_of) for name, column in columns.items()}
    )


def _returned(column: Any, name: str, asker: object, type_of: TypeOf | None) -> Any:
    """One column that a function returned."""
    if type_of is None or not _is_untyped(column):
        return _array(column)
    kind = type_of(name)
    values = list(column)
    if kind is None:
        raise SchemaError(
            f"{asker}: the function returned a column {name!r} that it did not for the first rows: have it "
            "return the same columns each time",
            stage=str(asker),
        )
    try:
        return column_of(values, kind)
    except NoColumn:
        number = next(k for k, value in enumerate(values) if not _fits(value, kind))
        raise BadCell(
            number,
            f"column {name!r} has {short(values[number])}, and for the first rows it held {kind}: have the "
            "function return values of one type, or Arrow arrays of a type",
        ) from None


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        column_of([value], kind)
    except NoColumn:
        return False
    return True


def untyped_columns(columns: Any) -> dict[str, list[Any]]:
    """Of what a function returned, the columns of Python values, whose type is to be found."""
    if not isinstance(columns, Mapping):
        return {}
    return {name: list(column) for name, column in columns.items() if _is_untyped(column)}


def _is_untyped(column: Any) -> bool:
    if isinstance(column, np.ndarray):
        return bool(column.dtype == object)
    return isinstance(column, list | tuple)


def _array(column: Any) -> Any:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return column
    if isinstance(column, torch.Tensor):
        column = column.detach().cpu().numpy()
    if isinstance(column, np.ndarray) and column.ndim > 1:
        flat = np.ascontiguousarray(column).reshape(-1)
        inner = pa.array(flat)
        for size in column.shape[:0:-1]:
            inner = pa.FixedSizeListArray.from_arrays(inner, size)
        return inner
    if isinstance(column, list | tuple):
        return pa.array([_plain(v) for v in column])
    return pa.array(column)
