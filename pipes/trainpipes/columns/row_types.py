"""The Arrow types of Python values, and the type that holds all values of a column.

Ints beside floats become float64; None and empty lists take the type of other values; keys of dicts
are united; of widths the widest is taken; dictionaries are their values. Nothing else goes
together.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from trainpipes.columns.arrays import dtype_of, is_list, is_number, to_arrow, to_numpy
from trainpipes.errors import DataError, shown

#: What the values of lists that were arrays are called in a column's type, so that rows are arrays again.
CELL = "cell"


def fixed_shape(kind: pa.DataType) -> tuple[int, ...] | None:
    """The shape of each row of fixed-size lists of numbers; else None.

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
    arrays = {
        field.name: fixed_shape(field.type) is not None and (every or _was_array(field.type))
        for field in table.schema
    }
    if not any(arrays.values()) and not any(_decoder(kind) for kind in table.schema.types):
        return list(table.to_pylist())
    columns = [
        _arrays(table.column(name)) if as_array else python_values(table.column(name))
        for name, as_array in arrays.items()
    ]
    return [dict(zip(arrays, row, strict=True)) for row in zip(*columns, strict=True)]


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Python values of a column; of Arrow's JSON type, at any depth, what the texts say.

    >>> import pyarrow as pa
    >>> texts = pa.array(['{"role": "user", "content": ["a", 1]}', None], pa.json_())
    >>> python_values(texts)
    [{'role': 'user', 'content': ['a', 1]}, None]
    """
    values: list[Any] = column.to_pylist()
    decode = _decoder(column.type)
    return values if decode is None else [decode(value) for value in values]


@lru_cache(maxsize=256)
def _decoder(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What decodes the JSON within values of a type; None where there is none."""
    if isinstance(kind, pa.JsonType):
        return lambda text: None if text is None else _loaded(text)
    if pa.types.is_struct(kind):
        inner = {kind.field(n).name: _decoder(kind.field(n).type) for n in range(kind.num_fields)}
        fields = {name: decode for name, decode in inner.items() if decode is not None}
        if not fields:
            return None
        return lambda row: row and {**row, **{n: decode(row[n]) for n, decode in fields.items()}}
    if not pa.types.is_nested(kind) or pa.types.is_map(kind) or pa.types.is_union(kind):
        return None
    each = _decoder(kind.value_type)
    return each and (lambda values: values and [each(value) for value in values])


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        rule = "a value of Arrow's JSON type is JSON"
        raise DataError(f"{rule}, got {shown(text, 60)} ({error})") from None


def _was_array(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.FixedShapeTensorType) or kind.value_field.name == CELL


def _arrays(column: pa.ChunkedArray) -> list[Any]:
    rows: list[Any] = []
    for chunk in column.chunks:
        arrays = array_of(chunk)
        if arrays is not None:
            rows += [row.copy() for row in arrays]
            continue
        for k in range(len(chunk)):
            single = array_of(chunk.slice(k, 1))
            rows.append(chunk[k].as_py() if single is None else single[0].copy())
    return rows


#: Types of values whose Arrow type depends on nothing else.
_PLAIN: dict[type, pa.DataType] = {
    type(None): pa.null(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    bytearray: pa.binary(),
    datetime.date: pa.date32(),
}


class NoColumn(Exception):
    """Values that make no column; the text follows "the row" or a column's name."""


def as_array(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bfloat16:  # unknown to NumPy; float32 holds all of its values
        value = value.float()
    return value.numpy(force=True)


def type_of(value: Any) -> pa.DataType:
    """The Arrow type of a value; arrays are lists of fixed sizes.

    >>> type_of({"a": 1, "b": [0.5, None]})
    StructType(struct<a: int64, b: list<item: double>>)
    """
    plain = _PLAIN.get(type(value))
    if plain is not None:
        return plain
    value = as_array(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return _type_of_array(value)
    if isinstance(value, list | tuple | np.ndarray):
        return pa.list_(_type_of_all(value))
    if isinstance(value, Mapping):
        return pa.struct([(_named(key), type_of(inner)) for key, inner in value.items()])
    if isinstance(value, np.generic):
        return _of_dtype(value.dtype)
    for python, kind in _PLAIN.items():
        if isinstance(value, python) and not isinstance(value, datetime.datetime):
            return kind
    try:
        kind = pa.scalar(value).type
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        kind = None
    if kind is None or kind.num_fields:  # sets and the like would come back as lists
        raise NoColumn(f"a {type(value).__name__}, which Arrow columns cannot hold")
    return kind


def _type_of_all(values: Iterable[Any]) -> pa.DataType:
    kinds = set(map(type, values))
    plain = kinds <= _PLAIN.keys()
    types = [_PLAIN[kind] for kind in kinds] if plain else list(map(type_of, values))
    united = pa.null()
    for kind in types:
        united = unite(united, kind)
    return united


def _type_of_array(array: Any) -> pa.DataType:
    kind = _of_dtype(array.dtype)
    if array.ndim == 1:
        return pa.list_(kind)
    for size in array.shape[::-1]:
        kind = pa.list_(pa.field(CELL, kind), size)
    return kind


def _of_dtype(dtype: np.dtype[Any]) -> pa.DataType:
    try:
        return pa.string() if dtype.kind == "U" else pa.from_numpy_dtype(dtype)
    except pa.ArrowException:
        raise NoColumn(f"an array of {dtype}, which Arrow columns cannot hold") from None


def _named(key: Any) -> str:
    if not isinstance(key, str):
        raise NoColumn(f"a dict with the key {key!r:.40}, and keys are strings")
    return key


def unite(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    if first.equals(second) or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    numbers = [_number(kind) for kind in (first, second)]
    if None not in numbers:
        if numbers[0] != numbers[1]:
            return pa.float64()
        both = np.result_type(*map(dtype_of, (first, second)))
        if both.kind in "iu" or numbers[0] == "float":
            return pa.from_numpy_dtype(both)
    if _is_list(first) and _is_list(second):
        shapes = [fixed_shape(kind.value_type) for kind in (first, second)]
        if CELL in (first.value_field.name, second.value_field.name) and shapes[0] != shapes[1]:
            raise NoColumn(f"arrays of several shapes, {first} and {second}")
        value = unite(first.value_type, second.value_type)
        sizes = {getattr(kind, "list_size", None) for kind in (first, second)}
        if any(map(pa.types.is_large_list, (first, second))):
            return pa.large_list(value)
        return pa.list_(value) if len(sizes) > 1 else pa.list_(value, sizes.pop() or -1)
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        fields = {field.name: field.type for field in first}
        for field in second:
            fields[field.name] = unite(fields.get(field.name, pa.null()), field.type)
        return pa.struct(list(fields.items()))
    if pa.types.is_decimal(first) and pa.types.is_decimal(second):
        scale = max(first.scale, second.scale)
        whole = max(kind.precision - kind.scale for kind in (first, second))
        if whole + scale <= 38:
            return pa.decimal128(whole + scale, scale)
    plain = [_stored(kind) for kind in (first, second)]
    if plain != [first, second]:
        return unite(*plain)
    if _kind(first) is not None and _kind(first) == _kind(second):
        pair = [pa.schema([("", kind)]) for kind in (first, second)]
        with suppress(pa.ArrowInvalid, pa.ArrowTypeError):
            return pa.unify_schemas(pair, promote_options="permissive").field(0).type
    raise NoColumn(f"both {first} and {second}")


def _stored(kind: pa.DataType) -> pa.DataType:
    """A type that holds the same values: of dictionaries and views, what they stand for."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if isinstance(kind, pa.ExtensionType):
        return kind.storage_type
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


def _kind(kind: pa.DataType) -> str | None:
    if kind in (pa.string(), pa.large_string()):
        return "text"
    if kind in (pa.binary(), pa.large_binary()) or pa.types.is_fixed_size_binary(kind):
        return "bytes"
    if pa.types.is_decimal(kind):
        return "decimal"
    return "time" if pa.types.is_temporal(kind) else None


def _number(kind: pa.DataType) -> str | None:
    if pa.types.is_integer(kind):
        return "int"
    return "float" if pa.types.is_floating(kind) else None


def _is_list(kind: pa.DataType) -> bool:
    return is_list(kind) or bool(pa.types.is_fixed_size_list(kind))


def is_open(kind: pa.DataType) -> bool:
    """Whether part of a type is unknown yet: only None or empty lists were seen."""
    if pa.types.is_null(kind):
        return True
    return any(is_open(kind.field(n).type) for n in range(kind.num_fields))


def written(schema: pa.Schema) -> str:
    """A schema as Python makes it.

    >>> written(pa.schema([("x", pa.int64()), ("ids", pa.list_(pa.int32()))]))
    'pa.schema([("x", pa.int64()), ("ids", pa.list_(pa.int32()))])'
    """
    return f"pa.schema({_fields(schema)})"


def _fields(fields: Iterable[pa.Field]) -> str:
    texts = [f"({json.dumps(field.name)}, {_type(field.type)})" for field in fields]
    return f"[{', '.join(texts)}]"


def _type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"pa.list_({_type(kind.value_type)})"
    if pa.types.is_large_list(kind):
        return f"pa.large_list({_type(kind.value_type)})"
    if pa.types.is_fixed_size_list(kind):
        return f"pa.list_({_type(kind.value_type)}, {kind.list_size})"
    if pa.types.is_struct(kind):
        return f"pa.struct({_fields(kind)})"
    if pa.types.is_timestamp(kind):
        return f"pa.timestamp({kind.unit!r}" + (f", {kind.tz!r})" if kind.tz else ")")
    if pa.types.is_duration(kind) or pa.types.is_time(kind):
        return f"pa.{str(kind).split('[')[0]}({kind.unit!r})"
    if pa.types.is_decimal(kind):
        return f"pa.decimal128({kind.precision}, {kind.scale})"
    names = {"double": "float64", "float": "float32", "halffloat": "float16", "bool": "bool_"}
    name = str(kind).split("[")[0]
    return f"pa.{names.get(name, name)}()"
