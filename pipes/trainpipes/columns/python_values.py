"""Python values as Arrow columns of known types, and the values of columns as Python has them."""

from __future__ import annotations

import datetime
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from trainpipes.columns.arrays import (
    apart,
    is_list,
    is_number,
    offset_dtype,
    to_arrow,
    to_numpy,
)
from trainpipes.columns.types import (
    CELL,
    MARKS,
    TENSOR,
    NoColumn,
    UnfitRow,
    as_array,
    columns_in,
    fixed_shape,
    type_of,
    unite,
)
from trainpipes.errors import DataError, shown


def column_of(values: Sequence[Any], kind: pa.DataType, exact: bool = True) -> pa.Array:
    """Values as an Arrow array."""
    try:
        if is_list(kind):
            return _lists(values, kind, exact)
        if pa.types.is_fixed_size_list(kind):
            return _fixed_lists(values, kind, exact)
        if pa.types.is_struct(kind):
            return _structs(values, kind, exact)
        return _leaves(values, kind, exact)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError, ValueError, TypeError) as error:
        raise NoColumn(str(error)[:120]) from error


def first_unfit(values: Sequence[Any], kind: pa.DataType, exact: bool = True) -> int:
    """The first of these values that does not fit, by itself or beside those before it."""

    def fail(number: int) -> bool:
        try:
            column_of(values[: number + 1], kind, exact)
        except NoColumn:
            return True
        return False

    return bisect_left(range(len(values)), True, key=fail)


def _leaves(values: Sequence[Any], kind: pa.DataType, exact: bool) -> pa.Array:
    types = set(map(type, values))
    if any(issubclass(t, np.ndarray) or t.__module__ == "torch" for t in types):
        values = [_item(value) for value in values]
        types = set(map(type, values))
    types.discard(type(None))
    if len(types) == 1 and (code := _code_of_times(next(iter(types)), kind)):
        return _times(np.array(values, code), kind)
    fits = _rule(kind)
    if fits is not None and not all(map(fits, types)):
        raise NoColumn
    zoned = pa.types.is_timestamp(kind) and kind.tz is not None
    if pa.types.is_timestamp(kind) and any((v.tzinfo is not None) != zoned for v in values if v):
        raise NoColumn("with and without a time zone")
    array = pa.array(values, kind)
    narrow = pa.types.is_floating(kind) and kind.bit_width < 64
    if exact and (fits is None or narrow) and not _same(array.to_pylist(), values):
        raise NoColumn
    return array


def _code_of_times(of_values: type, kind: pa.DataType) -> str:
    """The type code of NumPy's times where they are values of a column; else ""."""
    if issubclass(of_values, np.timedelta64):
        return "m8" if pa.types.is_duration(kind) else ""
    good = pa.types.is_date(kind) or (pa.types.is_timestamp(kind) and kind.tz is None)
    return "M8" if good and issubclass(of_values, np.datetime64) else ""


def _times(times: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    array = pa.array(times)
    column = array.cast(kind)
    if not column.cast(array.type).equals(array):  # Arrow drops the hours of a day
        raise NoColumn
    return column


def _item(value: Any) -> Any:
    value = as_array(value)
    if isinstance(value, np.ndarray):
        if value.ndim:
            raise NoColumn
        value = value[()]
    return value


#: Of kinds of leaves the Python types that they take, and those of them that they do not.
_RULES: list[tuple[Callable[[pa.DataType], bool], tuple[type, ...], tuple[type, ...]]] = [
    (pa.types.is_boolean, (bool, np.bool_), ()),
    (pa.types.is_integer, (int, np.integer), (bool,)),
    (pa.types.is_floating, (int, float, np.integer, np.floating), (bool,)),
    (pa.types.is_string, (str,), ()),
    (pa.types.is_large_string, (str,), ()),
    (pa.types.is_binary, (bytes, bytearray, memoryview), ()),
    (pa.types.is_large_binary, (bytes, bytearray, memoryview), ()),
    (pa.types.is_timestamp, (datetime.datetime,), ()),
    (pa.types.is_date, (datetime.date,), (datetime.datetime,)),
    (pa.types.is_null, (type(None),), ()),
]


def _rule(kind: pa.DataType) -> Callable[[type], bool] | None:
    """Which Python types a leaf takes; None where the converted values decide."""
    for is_kind, taken, refused in _RULES:
        if is_kind(kind):
            return lambda t: issubclass(t, taken) and not issubclass(t, refused)
    return None


def _same(back: Sequence[Any], values: Sequence[Any]) -> bool:
    return all(a == b or (a != a and b != b) for a, b in zip(back, values, strict=True))


def _lists(values: Sequence[Any], kind: pa.DataType, exact: bool) -> pa.Array:
    values, mask, lengths = _each_list(values)
    child = _inner(values, kind.value_type, exact)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(offset_dtype(kind))
    of_kind = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    return of_kind.from_arrays(to_arrow(offsets), child, type=kind, mask=mask)


def _fixed_lists(values: Sequence[Any], kind: pa.DataType, exact: bool) -> pa.Array:
    values, mask, lengths = _each_list(values)
    if mask is not None:
        gaps = mask.to_numpy(zero_copy_only=False)
        lengths = np.where(gaps, kind.list_size, lengths)
        none = [None] * kind.list_size
        values = [none if gap else v for v, gap in zip(values, gaps, strict=True)]
    if (lengths != kind.list_size).any():
        raise NoColumn
    child = _inner(values, kind.value_type, exact)
    return pa.FixedSizeListArray.from_arrays(child, type=kind, mask=mask)


def _each_list(values: Sequence[Any]) -> tuple[list[Any], Any, Any]:
    """Values as sequences, empty for None; which are None, if any; and lengths."""
    lists = [() if value is None else as_array(value) for value in values]
    types = set(map(type, lists))
    if not all(issubclass(t, list | tuple | np.ndarray) for t in types):
        raise NoColumn
    if any(isinstance(value, np.ndarray) and not value.ndim for value in lists):
        raise NoColumn
    lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
    none = [value is None for value in values]
    return lists, pa.array(none) if any(none) else None, lengths


def _inner(lists: Sequence[Any], kind: pa.DataType, exact: bool) -> pa.Array:
    arrays = [array for array in lists if len(array)]
    if arrays and all(isinstance(array, np.ndarray) and array.dtype != object for array in arrays):
        shapes = {(array.dtype, array.shape[1:]) for array in arrays}
        if len(shapes) == 1:
            return _of_array(np.concatenate(arrays), kind, exact)
    return column_of(list(chain.from_iterable(map(_elements, lists))), kind, exact)


def _elements(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) and value.ndim == 1 else value


def _of_array(array: Any, kind: pa.DataType, exact: bool) -> pa.Array:
    """An array [elements, ...] whose first dimension are the elements of a column."""
    if array.ndim > 1:
        if not pa.types.is_fixed_size_list(kind):
            return column_of(list(array), kind, exact)
        if array.shape[1] != kind.list_size:
            raise NoColumn
        flat = np.ascontiguousarray(array).reshape(-1, *array.shape[2:])
        return pa.FixedSizeListArray.from_arrays(_of_array(flat, kind.value_type, exact), type=kind)
    if _code_of_times(array.dtype.type, kind):
        return _times(array, kind)
    fits = _rule(kind)
    if fits is None or array.dtype.kind not in "biuf" or not fits(array.dtype.type):
        return column_of(array.tolist(), kind, exact)
    column = pa.array(array)
    if column.type.equals(kind):
        return column
    cast = column.cast(kind, safe=not pa.types.is_floating(kind) or array.dtype.kind != "f")
    if exact and array.dtype.kind == "f" and not _equal(cast.to_numpy(), array):
        raise NoColumn
    return cast


def _equal(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a, b, equal_nan=True))


def _structs(values: Sequence[Any], kind: pa.DataType, exact: bool) -> pa.Array:
    names = {field.name for field in kind}
    none = [value is None for value in values]
    rows = [{} if value is None else value for value in values]
    for row in rows:
        if not isinstance(row, Mapping) or not row.keys() <= names:
            raise NoColumn
    mask = pa.array(none) if any(none) else None
    if not names:
        return pa.array([None if gap else {} for gap in none], kind)
    columns = [column_of([row.get(f.name) for row in rows], f.type, exact) for f in kind]
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=mask)


def table_of_rows(rows: Sequence[Any], schema: pa.Schema, exact: bool = True) -> pa.Table:
    names = set(schema.names)
    try:
        for row in rows:
            if not isinstance(row, Mapping) or not row.keys() <= names:
                raise NoColumn
        arrays = [column_of([row.get(f.name) for row in rows], f.type, exact) for f in schema]
        return pa.Table.from_arrays(arrays, schema=schema)
    except NoColumn:
        for number, row in enumerate(rows):
            _check(row, number, schema, exact)
        for field in schema:  # each value fits by itself
            values = [row.get(field.name) for row in rows]
            number = first_unfit(values, field.type, exact)
            if number < len(rows):
                said = f"has {field.name!r} = {shown(values[number], 60)}"
                said += ", which goes into no column with those before it"
                raise UnfitRow(number, said, field.name) from None
        raise


def _check(row: Any, number: int, schema: pa.Schema, exact: bool) -> None:
    for name, value in columns_in(row, number).items():
        if name not in schema.names:
            problem = f"has a column {name!r}, {shown(value, 60)}, which the schema has not"
            raise UnfitRow(number, problem, name, _found(pa.null(), value))
        kind = schema.field(name).type
        try:
            column_of([value], kind, exact)
        except NoColumn as error:
            said = f" ({error})" if str(error) else ""
            problem = f"has {name!r} = {shown(value, 60)}, and the column holds {kind}{said}"
            raise UnfitRow(number, problem, name, _found(kind, value)) from None


def _found(known: pa.DataType, value: Any) -> pa.DataType | None:
    try:
        return unite(known, type_of(value))
    except NoColumn:
        return None


# Columns as Python values


def array_of(array: pa.Array) -> npt.NDArray[Any] | None:
    """Fixed-size lists of numbers as an array ``[rows, ...]``, perhaps read-only; None if any is
    null.
    """
    rows, shape = len(array), fixed_shape(array.type)
    assert shape is not None
    if isinstance(array.type, pa.FixedShapeTensorType):
        if array.null_count or array.storage.flatten().null_count:
            return None
        tensors: npt.NDArray[Any] = array.to_numpy_ndarray()
        return tensors
    while pa.types.is_fixed_size_list(array.type):
        if array.null_count:
            return None
        array = array.flatten()
    if array.null_count:
        return None
    return to_numpy(array).reshape(rows, *shape)


def lists_of(array: npt.NDArray[Any]) -> pa.Array:
    """An array ``[rows, n, ...]`` as fixed-size lists; plain lists if n is 0, for Parquet."""
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
    """One dict of Python values a row, with arrays in memory of their own."""
    whole = {field.name: every and fixed_shape(field.type) is not None for field in table.schema}
    if not any(whole.values()) and not any(_decoder(kind) for kind in table.schema.types):
        return list(table.to_pylist())
    columns = [
        _arrays(table.column(name)) if as_arrays else python_values(table.column(name))
        for name, as_arrays in whole.items()
    ]
    return [dict(zip(whole, row, strict=True)) for row in zip(*columns, strict=True)]


def python_values(
    column: pa.Array | pa.ChunkedArray, maps: Literal["strict"] | None = None
) -> list[Any]:
    """Python values of a column; at any depth, decoded texts of Arrow's JSON type, and arrays and tensors of
    lists that were these. ``maps="strict"`` makes dicts of maps.

    >>> import pyarrow as pa
    >>> texts = pa.array(['{"role": "user", "content": ["a", 1]}', None], pa.json_())
    >>> python_values(texts)
    [{'role': 'user', 'content': ['a', 1]}, None]
    """
    if _was_array(column.type):
        return _arrays(column)
    values: list[Any] = column.to_pylist(maps_as_pydicts=maps)
    decode = _decoder(column.type)
    return values if decode is None else [decode(value) for value in values]


@lru_cache(maxsize=256)
def _decoder(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What decodes the JSON, and makes the arrays, within values of a type; None where there are none."""
    if isinstance(kind, pa.JsonType):
        return lambda text: None if text is None else _loaded(text)
    if _was_array(kind):
        return lambda value: None if value is None else python_values(pa.array([value], kind))[0]
    if pa.types.is_struct(kind):
        inner = {kind.field(n).name: _decoder(kind.field(n).type) for n in range(kind.num_fields)}
        fields = {name: decode for name, decode in inner.items() if decode is not None}
        if not fields:
            return None
        return lambda row: row and {**row, **{n: decode(row[n]) for n, decode in fields.items()}}
    if pa.types.is_map(kind):
        return _decoder_of_map(kind)
    if not pa.types.is_nested(kind) or pa.types.is_union(kind):
        return None
    each = _decoder(kind.value_type)
    return each and (lambda values: values and [each(value) for value in values])


def _decoder_of_map(kind: pa.DataType) -> Callable[[Any], Any] | None:
    decode = _decoder(kind.item_type)
    if decode is None:
        return None

    def decoded(pairs: Any) -> Any:
        if isinstance(pairs, dict):
            return {key: decode(item) for key, item in pairs.items()}
        return pairs and [(key, decode(item)) for key, item in pairs]

    return decoded


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        rule = "a value of Arrow's JSON type is JSON"
        raise DataError(f"{rule}, got {shown(text, 60)} ({error})") from None


def _was_array(kind: pa.DataType) -> bool:
    """Whether rows of a type were arrays or tensors of numbers."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return True
    if not (is_list(kind) or pa.types.is_fixed_size_list(kind)):
        return False
    inner = kind.value_type
    return kind.value_field.name in MARKS and (is_number(inner) or fixed_shape(inner) is not None)


def _arrays(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    kind, rows = column.type, list[Any]()
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    plain = isinstance(kind, pa.FixedShapeTensorType)
    of_array = torch.from_numpy if not plain and kind.value_field.name == TENSOR else np.asarray
    for chunk in chunks:
        arrays = _each_array(chunk)
        if arrays is not None:
            rows += [of_array(array.copy()) for array in arrays]
            continue
        for k in range(len(chunk)):
            single = _each_array(chunk.slice(k, 1))
            rows.append(chunk[k].as_py() if single is None else of_array(single[0].copy()))
    return rows


def _each_array(array: pa.Array) -> Sequence[npt.NDArray[Any]] | None:
    """The rows of lists of numbers, or of fixed-size lists of them; None with a null."""
    if fixed_shape(array.type) is not None:
        return array_of(array)  # type: ignore[return-value]
    if array.null_count:
        return None
    values, offsets = apart(array)
    numbers = numbers_in(values)
    if numbers is None:
        return None
    return [numbers[start:stop] for start, stop in pairwise(offsets.tolist())]


def numbers_in(array: pa.Array) -> npt.NDArray[Any] | None:
    """Numbers, or fixed-size lists of them, as an array ``[rows, ...]``; None with a null."""
    if fixed_shape(array.type) is not None:
        return array_of(array)
    return None if array.null_count else to_numpy(array)
