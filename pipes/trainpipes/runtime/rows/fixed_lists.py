"""Arrow columns whose rows are arrays of one shape, as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import pyarrow as pa

__all__ = ["array_of", "fixed_shape", "is_number", "one_array", "python_rows"]


def is_number(kind: pa.DataType) -> bool:
    """Whether values are integers, floats or bools."""
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


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
    found = array.to_numpy(zero_copy_only=False)
    return found.reshape(rows, *shape)


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        return pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array


def python_rows(table: pa.Table) -> list[dict[str, Any]]:
    """One dict a row, of Python values; fixed-size lists of numbers are arrays of their dtype and shape, each
    with memory of its own."""
    shapes = {field.name: fixed_shape(field.type) for field in table.schema}
    if not any(shapes.values()):
        return list(table.to_pylist())
    columns = [
        _arrays(table.column(name)) if shape else table.column(name).to_pylist()
        for name, shape in shapes.items()
    ]
    return [dict(zip(shapes, row, strict=True)) for row in zip(*columns, strict=True)]


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
