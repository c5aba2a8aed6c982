"""Arrow columns whose rows are arrays of one shape, as NumPy arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes.columns.arrays import is_number, to_arrow, to_numpy

#: What the values of lists that were arrays are called in a column's type, so that rows are arrays again.
CELL = "cell"


def fixed_shape(kind: pa.DataType) -> tuple[int, ...] | None:
    """The shape of each row, if rows are fixed-size lists of numbers; else None.

    >>> fixed_shape(pa.list_(pa.list_(pa.int8(), 3), 2)), fixed_shape(pa.int8())
    ((2, 3), None)
    """
    if isinstance(kind, pa.FixedShapeTensorType):
        return tuple(kind.shape)
    shape: tuple[int, ...] = ()
    while pa.types.is_fixed_size_list(kind):
        kind, shape = kind.value_type, (*shape, kind.list_size)
    return shape if shape and is_number(kind) else None


def array_of(array: pa.Array) -> npt.NDArray[Any] | None:
    """Fixed-size lists of numbers as one array ``[rows, ...]``, which may be read-only; None if there is a
    null among them."""
    rows, shape = len(array), fixed_shape(array.type)
    assert shape is not None
    if isinstance(array.type, pa.FixedShapeTensorType):
        if array.null_count or array.storage.flatten().null_count:
            return None
        found: npt.NDArray[Any] = array.to_numpy_ndarray()
        return found
    while pa.types.is_fixed_size_list(array.type):
        if array.null_count:
            return None
        array = array.flatten()
    if array.null_count:
        return None
    return to_numpy(array).reshape(rows, *shape)


def lists_of(array: npt.NDArray[Any]) -> pa.Array:
    """An array ``[rows, n, ...]`` as fixed-size lists, of which rows come as arrays again; as lists where n
    is 0, since Parquet has no fixed-size ones without values."""
    inner = to_arrow(array.reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        size = array.shape[axis]
        if size:
            kind = pa.list_(pa.field(CELL, inner.type), size)
            inner = pa.FixedSizeListArray.from_arrays(inner, type=kind)
        else:
            starts = np.zeros(math.prod(array.shape[:axis]) + 1, np.int32)
            inner = pa.ListArray.from_arrays(to_arrow(starts), inner)
    return inner


def python_rows(table: pa.Table, every: bool = False) -> list[dict[str, Any]]:
    """One dict a row, of Python values; what were arrays once are arrays again, each with memory of its own.

    Args:
        table: the rows.
        every: whether all fixed-size lists of numbers are given as arrays.
    """
    arrays = {
        field.name: fixed_shape(field.type) is not None and (every or _was_array(field.type))
        for field in table.schema
    }
    if not any(arrays.values()):
        return list(table.to_pylist())
    columns = [
        _arrays(table.column(name)) if as_array else table.column(name).to_pylist()
        for name, as_array in arrays.items()
    ]
    return [dict(zip(arrays, row, strict=True)) for row in zip(*columns, strict=True)]


def _was_array(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.FixedShapeTensorType) or kind.value_field.name == CELL


def _arrays(column: pa.ChunkedArray) -> list[Any]:
    """The rows of a column of fixed-size lists; those with a null in them are Python lists."""
    rows: list[Any] = []
    for chunk in column.chunks:
        found = array_of(chunk)
        if found is not None:
            rows += [row.copy() for row in found]
            continue
        for k in range(len(chunk)):
            one = array_of(chunk.slice(k, 1))
            rows.append(chunk[k].as_py() if one is None else one[0].copy())
    return rows
