"""Python values as an Arrow array of a given type, and rows of objects as columns."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import is_list, offset_dtype, to_arrow
from trainpipes.columns.row_types import CELL, NoColumn, as_array, is_open, type_of, unite
from trainpipes.errors import shown


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


def _leaves(values: Sequence[Any], kind: pa.DataType, exact: bool) -> pa.Array:
    types = set(map(type, values))
    if any(issubclass(t, np.ndarray) or t.__module__ == "torch" for t in types):
        values = [_item(value) for value in values]
        types = set(map(type, values))
    types.discard(type(None))
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
    """Which Python types a leaf takes; None where what comes back decides."""
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


class UnfitRow(Exception):
    """A row that does not fit: its number, and the column with the type found."""

    def __init__(
        self, number: int, problem: str, column: str | None = None, found: pa.DataType | None = None
    ) -> None:
        super().__init__(problem)
        self.number, self.column, self.found = number, column, found


class SchemaFinder:
    """Finds the schema that some rows share.

    Args:
        ragged: None, or the columns whose arrays ``[n]`` may differ in length later; all others whose
            arrays all have one length so far are lists of that length.

    >>> finder = SchemaFinder()
    >>> finder.add([{"a": 1}, {"a": 2.5, "b": None}])
    >>> finder.open
    ['b']
    >>> finder.add([{"b": ["x"]}])
    >>> finder.schema.types
    [DataType(double), ListType(list<item: string>)]
    """

    def __init__(self, ragged: Collection[str] | None = None) -> None:
        self._types: dict[str, pa.DataType] = {}
        self._ragged = ragged
        self._lengths: dict[str, set[int]] = {}  # of arrays [n]; 0 for other values
        self.rows = 0

    def add(self, rows: Sequence[Any]) -> None:
        for number, row in enumerate(rows):
            for name, value in columns_in(row, number).items():
                known = self._types.get(name, pa.null())
                try:
                    self._types[name] = unite(known, type_of(value))
                except NoColumn as error:
                    problem = f"has in {name!r} {error}: {shown(value, 60)}"
                    raise UnfitRow(number, problem, name) from None
                if self._ragged is not None:
                    array = as_array(value)
                    length = len(array) if isinstance(array, np.ndarray) and array.ndim == 1 else 0
                    self._lengths.setdefault(name, set()).add(length)
            self.rows += 1

    @property
    def open(self) -> list[str]:
        """Columns whose type is not known yet."""
        return [name for name, kind in self._types.items() if is_open(kind)]

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([(name, self._sized(name, kind)) for name, kind in self._types.items()])

    def _sized(self, name: str, kind: pa.DataType) -> pa.DataType:
        if self._ragged is None:
            return kind
        if name in self._ragged:
            fixed = pa.types.is_fixed_size_list(kind)
            return pa.list_(kind.value_field) if fixed else kind
        lengths = self._lengths[name]
        if is_list(kind) and len(lengths) == 1 and (length := min(lengths)):
            return pa.list_(pa.field(CELL, kind.value_type), length)
        return kind


def columns_in(row: Any, number: int) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise UnfitRow(number, f"is no dict, got {type(row).__name__}")
    for name in row:
        if not isinstance(name, str):
            problem = f"has the key {shown(name, 60)}, and columns have strings for names"
            raise UnfitRow(number, problem)
    return row


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
