"""Which types columns have: those of Python values, of files, and the type that holds the values of both."""

from __future__ import annotations

import datetime
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from trainpipes.columns.arrays import dtype_of, is_list, is_number
from trainpipes.columns.tensor_rows import FOREIGN
from trainpipes.errors import shown

#: What values of lists that were arrays, or tensors, are called in a type, so that rows are these again.
CELL = "cell"
TENSOR = "tensor cell"
MARKS = frozenset({CELL, TENSOR})
#: The same of arrays of two dimensions or more that were alike in the first rows.
ALIKE = "alike"


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
    if value.dtype in FOREIGN:  # float32 holds all of their values
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
    name = TENSOR if isinstance(value, torch.Tensor) else CELL
    value = as_array(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return _type_of_array(value, name)
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


def _type_of_array(array: Any, name: str) -> pa.DataType:
    kind = _of_dtype(array.dtype)
    if array.ndim == 1:
        return pa.list_(pa.field(name, kind) if is_number(kind) else kind)
    for axis, size in reversed([*enumerate(array.shape)]):
        # Arrow divides by the size of fixed lists, so that those of 0 are lists of any length.
        kind = pa.list_(pa.field(CELL if axis else name, kind), size or -1)
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


#: How two types go together. "values": types of Python values; ints beside floats become float64, of widths
#: the widest is taken, None and empty lists take any type, fields of dicts are united, dictionaries are their
#: values, and nothing else goes together. "shapes": the same, and arrays have the same shape. "files": as
#: Arrow promotes types. "texts": the same, and values that no type holds are text.
Rule = Literal["values", "shapes", "files", "texts"]


def unite(first: pa.DataType, second: pa.DataType, rule: Rule = "values") -> pa.DataType:
    """The type that holds the values of both types.

    Raises:
        NoColumn: no type does.

    >>> unite(pa.int8(), pa.float32()), unite(pa.int8(), pa.float32(), "files")
    (DataType(double), DataType(float))
    """
    if rule == "texts":
        return _unite_texts(first, second)
    if rule == "files":
        return _promoted(*map(_without_views, (first, second)))
    if rule == "shapes" and len({fixed_shape(first), fixed_shape(second)} - {None}) > 1:
        raise _several_shapes(first, second)
    return _unite_values(first, second)


def _several_shapes(first: pa.DataType, second: pa.DataType) -> NoColumn:
    one, other = (fixed_shape(kind) or kind for kind in (first, second))
    return NoColumn(f"arrays of several shapes, {one} and {other}")


def unite_fields(first: pa.Field, second: pa.Field, rule: Rule = "values") -> pa.Field:
    """A field with the type that holds the values of both; with nulls if either has them."""
    # Of Python's values, arrays differ from lists by the name of theirs.
    of_python = rule in ("values", "shapes")
    same = first.type.equals(second.type, check_metadata=of_python)
    kind = first.type if same else unite(first.type, second.type, rule)
    return pa.field(first.name, kind, first.nullable or second.nullable)


class UnlikeFields(NoColumn):
    """Fields of the same name whose values no type holds: each with the key of its schema."""

    def __init__(self, first: tuple[Any, pa.Field], second: tuple[Any, pa.Field]) -> None:
        super().__init__(f"both {first[1].type} and {second[1].type}")
        self.first, self.second = first, second


def unite_schemas(schemas: Iterable[tuple[Any, pa.Schema]], rule: Rule = "values") -> pa.Schema:
    """The columns of all schemas, in the order in which they come first, with types that hold all values.

    Args:
        schemas: each with a key, which an error has.

    Raises:
        UnlikeFields: no type holds the values of a column.
    """
    fields: dict[str, tuple[Any, pa.Field]] = {}
    for key, schema in schemas:
        for field in schema:
            if field.name not in fields:
                fields[field.name] = key, field
                continue
            first_key, known = fields[field.name]
            try:
                fields[field.name] = first_key, unite_fields(known, field, rule)
            except NoColumn as error:
                raise UnlikeFields((first_key, known), (key, field)) from error
    return pa.schema([field for _, field in fields.values()])


def difference(
    first: pa.Schema, second: pa.Schema, names_only: bool = False
) -> tuple[str, pa.DataType | None, pa.DataType | None] | None:
    """The first column that differs, and its type in each schema, None where it is missing.

    Metadata and the order of columns are no difference; with ``names_only``, nor are types.

    >>> difference(pa.schema([("x", pa.int8())]), pa.schema([("x", pa.int8()), ("y", pa.int8())]))
    ('y', None, DataType(int8))
    """
    for name in dict.fromkeys([*first.names, *second.names]):
        a, b = (s.field(name).type if name in s.names else None for s in (first, second))
        if a is None or b is None or not (names_only or a.equals(b)):
            return name, a, b
    return None


def _promoted(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    types = _decimals_beside(first, second), _decimals_beside(second, first)
    pair = [pa.schema([("", kind)]) for kind in types]
    try:
        return pa.unify_schemas(pair, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise NoColumn(f"both {first} and {second}") from error


def _decimals_beside(kind: pa.DataType, other: pa.DataType) -> pa.DataType:
    """A type with decimals of enough digits where the other has decimals beside its integers. Arrow gives too
    few, and takes decimals beside floats for floats, which would round them.
    """
    types = pa.types
    whole, decimal = (kind, other) if types.is_decimal(other) else (other, kind)
    if types.is_decimal(decimal) and _number(whole) is not None:
        bits = whole.bit_width - types.is_signed_integer(whole)
        left = max(len(str(2**bits)), decimal.precision - decimal.scale) + decimal.scale
        if types.is_floating(whole) or left > 76:
            raise NoColumn(f"both {kind} and {other}")
        make = pa.decimal128 if left <= 38 else pa.decimal256
        return make(left, decimal.scale)
    if types.is_struct(kind) and types.is_struct(other):
        theirs = {field.name: field.type for field in other}
        fields = [(f, _decimals_beside(f.type, theirs.get(f.name, f.type))) for f in kind]
        return pa.struct([field.with_type(inner) for field, inner in fields])
    if types.is_map(kind) and types.is_map(other):
        item = kind.item_field.with_type(_decimals_beside(kind.item_type, other.item_type))
        return pa.map_(kind.key_field, item, kind.keys_sorted)
    if _is_list(kind) and _is_list(other):
        value = kind.value_field.with_type(_decimals_beside(kind.value_type, other.value_type))
        if types.is_large_list(kind):
            return pa.large_list(value)
        return pa.list_(value, getattr(kind, "list_size", -1))
    return kind


def _unite_texts(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """The type that Arrow infers where the cells of both are in a block of CSV; otherwise text."""
    numbers = None not in (_number(first), _number(second))
    stamps = all(map(pa.types.is_timestamp, (first, second)))
    if first.equals(second) or numbers or pa.null() in (first, second):
        return _promoted(first, second)
    if stamps and first.tz == second.tz:
        return _promoted(first, second)
    day, time = sorted((first, second), key=pa.types.is_timestamp)
    if day == pa.date32() and pa.types.is_timestamp(time) and time.tz is None:
        return time
    return pa.string()


def _unite_values(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    if first.equals(second, check_metadata=True) or pa.types.is_null(second):
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
        names = [kind.value_field.name for kind in (first, second)]
        empty = pa.null() in (first.value_type, second.value_type)
        if not MARKS.isdisjoint(names) and not empty and shapes[0] != shapes[1]:
            raise _several_shapes(first, second)
        value = _unite_values(first.value_type, second.value_type)
        if (name := _united_mark(first, second)) is not None:
            value = pa.field(name, value)
        sizes = {getattr(kind, "list_size", None) for kind in (first, second)}
        if any(map(pa.types.is_large_list, (first, second))):
            return pa.large_list(value)
        return pa.list_(value) if len(sizes) > 1 else pa.list_(value, sizes.pop() or -1)
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        fields = {field.name: field.type for field in first}
        for field in second:
            fields[field.name] = _unite_values(fields.get(field.name, pa.null()), field.type)
        return pa.struct(list(fields.items()))
    if pa.types.is_decimal(first) and pa.types.is_decimal(second):
        scale = max(first.scale, second.scale)
        whole = max(kind.precision - kind.scale for kind in (first, second))
        if whole + scale <= 38:
            return pa.decimal128(whole + scale, scale)
    if first.equals(second):
        return first
    plain = [_stored(kind) for kind in (first, second)]
    if plain != [first, second]:
        return _unite_values(*plain)
    if _kind(first) is not None and _kind(first) == _kind(second):
        return _promoted(first, second)
    raise NoColumn(f"both {first} and {second}")


def _united_mark(first: pa.DataType, second: pa.DataType) -> str | None:
    """Whether the lists of both were arrays or tensors; empty lists go with these."""
    names = {
        kind.value_field.name
        for kind in (first, second)
        if kind.value_field.name in MARKS or not pa.types.is_null(kind.value_type)
    }
    if not names or not names <= MARKS:
        return None
    return names.pop() if len(names) == 1 else CELL


def _stored(kind: pa.DataType) -> pa.DataType:
    """A type that holds the same values: of dictionaries and views, the type of their values."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if isinstance(kind, pa.ExtensionType):
        return kind.storage_type
    return _without_views(kind)


def _without_views(kind: pa.DataType) -> pa.DataType:
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


def unmarked(kind: pa.DataType, fixed: str = CELL) -> pa.DataType:
    """A type whose lists that were arrays or tensors are lists; of fixed sizes, arrays by default."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(unmarked(field.type, fixed)) for field in kind])
    if not _is_list(kind):
        return kind
    value = kind.value_field.with_type(unmarked(kind.value_type, fixed))
    is_fixed = pa.types.is_fixed_size_list(kind)
    value = value.with_name(fixed if is_fixed else "item") if value.name in MARKS else value
    if is_fixed:
        return pa.list_(value, kind.list_size)
    return pa.large_list(value) if pa.types.is_large_list(kind) else pa.list_(value)


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


# Types of rows


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
            arrays all have the same length so far are lists of that length.
        pads: arrays of two dimensions or more may differ in the first one later.
        lossless: refuse tensors of dtypes that columns hold as float32.

    >>> finder = SchemaFinder()
    >>> finder.add([{"a": 1}, {"a": 2.5, "b": None}])
    >>> finder.open
    ['b']
    >>> finder.add([{"b": ["x"]}])
    >>> finder.schema.types
    [DataType(double), ListType(list<item: string>)]
    """

    def __init__(
        self,
        ragged: Collection[str] | None = None,
        pads: bool = False,
        lossless: bool = False,
    ) -> None:
        self._types: dict[str, pa.DataType] = {}
        self._empty: dict[str, pa.DataType] = {}  # of arrays without values: asked if all are
        self._ragged, self._pads, self._lossless = ragged, pads, lossless
        self._lengths: dict[str, set[int]] = {}  # of arrays [n]; 0 for other values
        self.rows = 0

    def add(self, rows: Sequence[Any]) -> None:
        for number, row in enumerate(rows):
            for name, value in columns_in(row, number).items():
                known = self._types.get(name, pa.null())
                try:
                    if self._lossless and getattr(value, "dtype", None) in FOREIGN:
                        raise NoColumn(
                            f"a tensor of {value.dtype}, which Arrow columns cannot hold"
                        )
                    kind = type_of(value)
                    if kind.num_fields and not isinstance(value, Mapping) and not len(value):
                        empty = self._empty.get(name, pa.null())
                        self._empty[name] = unite(empty, kind)
                        kind = pa.list_(pa.field(kind.value_field.name, pa.null()))
                    self._types[name] = unite(known, kind)
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
        types = self._types | {
            name: unite(self._types[name], kind)
            for name, kind in self._empty.items()
            if is_open(self._types[name])
        }
        return pa.schema([(name, self._sized(name, kind)) for name, kind in types.items()])

    def _sized(self, name: str, kind: pa.DataType) -> pa.DataType:
        if self._pads and fixed_shape(kind) is not None and kind.value_field.name in MARKS:
            return pa.list_(pa.field(ALIKE, kind.value_type))
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
