"""Arrow's arrays as NumPy's and back, without a copy where possible.

pyarrow's ``to_numpy``, ``pa.array`` and ``take`` of a NumPy array import pandas, which takes 0.1 to
0.3 s.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.checks import IntArray

Array = npt.NDArray[Any]
#: Types of text and bytes that are offsets and content.
TEXTS = (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())


def to_numpy(array: pa.Array | pa.ChunkedArray) -> Array:
    array = one_chunk(array)
    dtype = dtype_of(array.type)
    if array.null_count or dtype is None:
        values: Array = array.to_numpy(zero_copy_only=False)
        return values
    if dtype == np.bool_:
        return to_numpy(array.cast(pa.uint8())).view(np.bool_)
    return _values(array, dtype, len(array))


#: By number: a look at each of many columns for each run is to cost little.
_DTYPES = {
    getattr(pa, name)().id: np.dtype(name.rstrip("_"))
    for name in (
        "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64",
    )
}  # fmt: skip


def dtype_of(kind: pa.DataType) -> np.dtype[Any] | None:
    return _DTYPES.get(kind.id)


def is_number(kind: pa.DataType) -> bool:
    return dtype_of(kind) is not None


_AS_NUMBERS = frozenset(
    getattr(pa.lib, f"Type_{name}")
    for name in (
        "DECIMAL32", "DECIMAL64", "DECIMAL128", "DECIMAL256", "DATE32", "DATE64", "TIME32", "TIME64",
        "TIMESTAMP", "DURATION",
    )
    if hasattr(pa.lib, f"Type_{name}")
)  # fmt: skip


def stands_for_number(kind: pa.DataType) -> bool:
    """Whether ``as_numbers`` makes numbers of a type: decimals, dates, times, durations."""
    return kind.id in _AS_NUMBERS


def as_numbers(array: Any) -> Any:
    """Decimals as float64, dates as int64 days since 1970, and times, timestamps and durations as int64 of
    their unit. Nulls stay, and so do arrays of other types.

    >>> as_numbers(pa.array([86_400_000_000, None], pa.timestamp("us"))).to_pylist()
    [86400000000, None]
    """
    kind = array.type
    if not stands_for_number(kind):
        return array
    if pa.types.is_decimal(kind):
        return array.cast(pa.float64())
    if pa.types.is_date64(kind):
        array = array.cast(pa.date32(), safe=False)
    whole = pa.int32() if array.type.bit_width == 32 else pa.int64()
    return array.cast(whole).cast(pa.int64())


def numbers(array: pa.Array, dtype: np.dtype[Any]) -> Array:
    """Those of an array without nulls of this dtype, as they lie in memory."""
    return _values(array, dtype, len(array))


def _values(array: pa.Array, dtype: npt.DTypeLike, count: int) -> Array:
    if not len(array):  # there may be no buffer
        values = np.zeros(count, dtype)
    else:
        start = array.offset * np.dtype(dtype).itemsize
        values = np.frombuffer(array.buffers()[1], dtype, count, start)
    values.flags.writeable = False
    return values


def to_arrow(values: Array, null: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """An array ``[n]`` as Arrow's, with nulls (bool ``[n]``); bools and strided ones are copied."""
    if values.dtype.kind not in "iufb" or isinstance(values, np.ma.MaskedArray):
        return pa.array(values, mask=null)
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    valid = None if null is None else to_arrow(~null).buffers()[1]
    is_bool = values.dtype == np.bool_
    kind = pa.uint8() if is_bool else pa.from_numpy_dtype(values.dtype)
    column = pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(values)])
    return column.cast(pa.bool_()) if is_bool else column


def places_to_arrow(places: IntArray, rows: int) -> pa.Array:
    """Places among so many rows, as Arrow takes them fastest."""
    return to_arrow(places.astype(np.uint32) if rows <= 1 << 32 else places)


def python_to_arrow(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Python values of a type as an Arrow array; all but numbers, texts, bytes and lists of them by
    pyarrow.

    >>> python_to_arrow([["a"], [], ["b", "c"]], pa.list_(pa.string())).to_pylist()
    [['a'], [], ['b', 'c']]
    """
    dtype, plain = dtype_of(kind), all(value is not None for value in values)
    if dtype is not None and plain:
        return to_arrow(np.array(values, dtype))
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not plain or not (is_list or kind in TEXTS):
        return pa.array(values, kind)
    buffers, children = [None], []
    if is_list:
        children.append(python_to_arrow(list(chain.from_iterable(values)), kind.value_type))
    else:
        values = [value.encode() if isinstance(value, str) else value for value in values]
        buffers.append(pa.py_buffer(b"".join(values)))
    offsets = np.cumsum([0, *map(len, values)]).astype(offset_dtype(kind))
    buffers.insert(1, pa.py_buffer(offsets))
    return pa.Array.from_buffers(kind, len(values), buffers, children=children)


def apart(array: pa.Array) -> tuple[Any, IntArray]:
    """What lists, maps, texts or bytes hold (uint8 of the latter two), and where each row starts,
    and the end: ``[rows + 1]``. Nothing is copied.
    """
    offsets = _values(array, offset_dtype(array.type), len(array) + 1)
    start, stop = int(offsets[0]), int(offsets[-1])
    if start:
        offsets = offsets - start
    if array.type.num_fields:
        return array.values.slice(start, stop - start), offsets
    if start == stop:
        return np.empty(0, np.uint8), offsets
    return np.frombuffer(array.buffers()[2], np.uint8)[start:stop], offsets


def offset_dtype(kind: pa.DataType) -> type[np.int32 | np.int64]:
    large = kind in (pa.large_string(), pa.large_binary()) or pa.types.is_large_list(kind)
    return np.int64 if large else np.int32


def list_array(values: Array, lengths: IntArray) -> pa.Array:
    """Rows of these lengths as an Arrow list array, large where 32 bits are too few."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] > np.iinfo(np.int32).max:
        return pa.LargeListArray.from_arrays(to_arrow(offsets), to_arrow(values))
    return pa.ListArray.from_arrays(to_arrow(offsets.astype(np.int32)), to_arrow(values))


def stretches(starts: IntArray, lengths: IntArray) -> IntArray:
    """The places of consecutive stretches, int64.

    >>> stretches(np.array([7, 2]), np.array([1, 3])).tolist()
    [7, 2, 3, 4]
    """
    ends = np.cumsum(lengths)
    places: IntArray = np.repeat(starts - (ends - lengths), lengths)
    places += np.arange(len(places))
    return places


def plain(array: pa.Array) -> pa.Array:
    """The same values in a type with a single memory layout."""
    if isinstance(array, pa.ExtensionArray):
        return plain(array.storage)
    kind, is_ = array.type, pa.types
    if is_.is_dictionary(kind):
        return plain(decoded(array))
    if is_.is_run_end_encoded(kind):
        return plain(runs_decoded(array))
    if is_.is_string_view(kind) or is_.is_binary_view(kind):
        return array.cast(pa.large_binary())
    return array


def decoded(array: Any) -> Any:
    """The values of a dictionary-encoded array or column, also of views, of which Arrow does not take any.

    >>> texts = pa.array(["a", "b"], pa.string_view())
    >>> decoded(pa.DictionaryArray.from_arrays(pa.array([1, None, 0]), texts)).to_pylist()
    ['b', None, 'a']
    """
    kind = array.type.value_type
    other = _NO_VIEWS.get(kind)
    if isinstance(array, pa.ChunkedArray):
        return pa.chunked_array(map(decoded, array.chunks), other or kind)
    if other is not None:
        array = pa.DictionaryArray.from_arrays(array.indices, array.dictionary.cast(other))
    return array.dictionary_decode()


def without_views(rows: pa.Table) -> pa.Table:
    """The same rows, with texts and bytes in place of views of these."""
    return pa.Table.from_arrays(list(map(viewless, rows.columns)), names=rows.column_names)


def viewless(column: Any) -> Any:
    """The same values of an array or column, with texts and bytes in place of views of these."""
    if not holds(column.type, pa.types.is_string_view, pa.types.is_binary_view):
        return column
    if pa.types.is_dictionary(column.type):
        return decoded(column)
    return column.cast(type_without_views(column.type))


def type_without_views(kind: pa.DataType) -> pa.DataType:
    """A type with texts and bytes in place of views of these, at any depth."""
    return _retyped(kind, _NO_VIEWS)


def laid_out(array: pa.Array) -> pa.Array:
    """The same values without list views and run ends, at any depth; of list views Arrow's cast makes invalid
    arrays where one is null.

    >>> laid_out(pa.array([[1], None, []], pa.list_view(pa.int32()))).to_pylist()
    [[1], None, []]
    """
    kind, is_ = array.type, pa.types
    if not holds(kind, is_.is_list_view, is_.is_large_list_view, is_.is_run_end_encoded):
        return array
    if is_.is_run_end_encoded(kind):
        return laid_out(runs_decoded(array))
    if is_.is_struct(kind):
        inner = [laid_out(pc.struct_field(array, n)) for n in range(kind.num_fields)]
        return pa.StructArray.from_arrays(inner, kind.names, mask=array.is_null())
    if is_.is_map(kind):
        pairs, starts = apart(array)
        each = [laid_out(pairs.field(n)) for n in (0, 1)]
        return pa.MapArray.from_arrays(to_arrow(starts), *each, mask=array.is_null())
    if not hasattr(kind, "value_field"):
        return array
    lengths = to_numpy(pc.fill_null(pc.list_value_length(array), 0))
    ends = to_arrow(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    values = laid_out(array.flatten())
    return pa.LargeListArray.from_arrays(ends, values, mask=array.is_null())


def runs_decoded(array: pa.Array) -> pa.Array:
    """The values of a run-end encoded array, also those that Arrow does not decode, as views."""
    ends = np.clip(to_numpy(array.run_ends) - array.offset, 0, len(array))
    return gathered(array.values, np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0)))


Made = TypeVar("Made")


def once_for_each(make: Callable[[pa.Table], Made]) -> Callable[[pa.Table], Made]:
    """A function of tables that keeps its result for a table as long as the table lives."""
    known: dict[int, tuple[weakref.ref[pa.Table], Made]] = {}

    def get(table: pa.Table) -> Made:
        key = id(table)
        entry = known.get(key)
        if entry is None or entry[0]() is not table:
            entry = weakref.ref(table, lambda _: known.pop(key, None)), make(table)
            known[key] = entry
        return entry[1]

    return get


def one_chunk(column: pa.Array | pa.ChunkedArray) -> Any:
    """A column as a single array; copied only if it has several chunks."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)


def first_null(array: pa.Array | pa.ChunkedArray) -> int:
    """The row of the first null; -1 if there is none."""
    nulls = np.flatnonzero(to_numpy(array.is_null()))
    return int(nulls[0]) if len(nulls) else -1


T = TypeVar("T", pa.Table, pa.RecordBatch, pa.Array)


def gathered(rows: T, index: IntArray) -> T:
    """The rows at ``index``, also of views and run ends, for which Arrow has no ``take``."""
    if not isinstance(rows, pa.Array) and any(map(_is_gathered_alone, rows.schema.types)):
        columns = [gathered(one_chunk(column), index) for column in rows.columns]
        return type(rows).from_arrays(columns, schema=rows.schema)
    if isinstance(rows, pa.Array) and pa.types.is_run_end_encoded(rows.type):
        try:
            taken = gathered(pc.run_end_decode(rows), index)
            return pc.run_end_encode(taken, run_end_type=rows.type.run_end_type)
        except pa.ArrowNotImplementedError:  # of views, and of anything that is nested
            return _gathered_runs(rows, index)
    if isinstance(rows, pa.Array) and nests_fixed_lists(rows.type):
        return _gathered_fixed(rows, index)
    places = to_arrow(index)
    if isinstance(rows, pa.Array) and _has_numbers(rows.type) and len(rows) <= 4 * len(index):
        lists = _gathered_numbers(rows, places)
        if lists is not None:
            return lists
    try:
        return rows.take(places)
    except pa.ArrowNotImplementedError:
        if isinstance(rows, pa.Array):
            return _gathered_parts(rows, index)
        columns = [gathered(one_chunk(column), index) for column in rows.columns]
        return type(rows).from_arrays(columns, schema=rows.schema)


def _gathered_runs(rows: pa.Array, index: IntArray) -> pa.Array:
    places = np.searchsorted(to_numpy(rows.run_ends), index + rows.offset, side="right")
    ends = np.append(np.flatnonzero(np.diff(places)) + 1, len(places))[: len(places)]
    values = gathered(rows.values, places[ends - 1])
    runs = to_arrow(ends).cast(rows.type.run_end_type)
    return pa.RunEndEncodedArray.from_arrays(runs, values, rows.type)


def _gathered_parts(rows: pa.Array, index: IntArray) -> pa.Array:
    """Rows of views, or of a type that has them or run ends within."""
    kind, is_, places = rows.type, pa.types, to_arrow(index)
    if isinstance(rows, pa.ExtensionArray):
        return pa.ExtensionArray.from_storage(kind, gathered(rows.storage, index))
    if (other := type_without_views(kind)) != kind:
        with suppress(pa.ArrowNotImplementedError):  # beside run ends
            return rows.cast(other).take(places).cast(kind)
    valid = rows.is_valid().take(places)
    buffers = [valid.buffers()[1] if rows.null_count else None]
    if is_.is_struct(kind):
        parts = [gathered(rows.field(n), index) for n in range(kind.num_fields)]
    elif is_.is_fixed_size_list(kind):
        first, size = (index + rows.offset) * kind.list_size, kind.list_size
        parts = [gathered(rows.values, stretches(first, np.full(len(index), size)))]
    elif is_list(kind) or is_.is_map(kind):
        values, starts = apart(rows)
        lengths = np.diff(starts)[index].astype(np.int64) * to_numpy(valid)
        parts = [gathered(values, stretches(starts[index], lengths))]
        offsets = to_arrow(np.append(0, np.cumsum(lengths)))
        buffers.append(offsets.cast(pa.from_numpy_dtype(offset_dtype(kind))).buffers()[1])
    else:
        return rows.take(places)
    return pa.Array.from_buffers(kind, len(index), buffers, children=parts)


def parts_of(
    firsts: IntArray, index: IntArray
) -> tuple[list[tuple[int, IntArray]], IntArray | None]:
    """The parts that some rows are in, each with its rows' places; and where each row then stands,
    part after part (None if in the order asked for).
    """
    which = np.searchsorted(firsts, index, side="right") - 1
    if len(which) and which.min() == which.max():
        number = int(which[0])
        return [(number, index - firsts[number])], None
    order = np.argsort(which, kind="stable")
    numbers, edges = np.unique(which[order], return_index=True)
    each = zip(numbers.tolist(), np.split(order, edges[1:]), strict=len(numbers) > 0)
    parts = [(number, index[places] - firsts[number]) for number, places in each]
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return parts, back


def _is_gathered_alone(kind: pa.DataType) -> bool:
    alone = kind.num_fields > 0 and (_has_numbers(kind) or nests_fixed_lists(kind))
    return alone or pa.types.is_run_end_encoded(kind)


def nests_fixed_lists(kind: pa.DataType) -> bool:
    """Whether a type has lists of fixed sizes in such lists, as of arrays ``[n, m]``. Where these are sliced,
    ``take`` and ``filter`` of Arrow (26.0) give other values, or read where no memory is.
    """
    is_fixed = pa.types.is_fixed_size_list
    return kind.num_fields > 0 and holds(kind, lambda k: is_fixed(k) and is_fixed(k.value_type))


def _gathered_fixed(rows: pa.Array, index: IntArray) -> pa.Array:
    """Rows that nest lists of fixed sizes; of numbers without nulls as bytes."""
    kinds, values = list[pa.DataType](), rows
    while pa.types.is_fixed_size_list(values.type) and not values.null_count:
        kinds.append(values.type)
        values = values.flatten()
    size = math.prod(kind.list_size for kind in kinds)
    if not size or not is_number(values.type) or values.null_count:
        return _gathered_parts(rows, index)
    taken = to_arrow(to_numpy(values).reshape(len(rows), size)[index].reshape(-1))
    for kind in reversed(kinds):
        taken = pa.FixedSizeListArray.from_arrays(taken, type=kind)
    return taken


def _has_numbers(kind: pa.DataType) -> bool:
    return is_list(kind) and dtype_of(kind.value_type) not in (None, np.bool_)


def _gathered_numbers(rows: pa.Array, places: pa.Array) -> pa.Array | None:
    """Lists of numbers without nulls, gathered as bytes, 5 times as fast as Arrow; else None."""
    if rows.null_count:
        return None
    values, offsets = apart(rows)
    if values.null_count or not len(values):
        return None
    width = values.type.bit_width // 8
    start = values.offset * width
    content = values.buffers()[1].slice(start, len(values) * width)
    edges = pa.py_buffer(offsets.astype(np.int64) * width)
    texts = pa.Array.from_buffers(pa.large_binary(), len(rows), [None, edges, content])
    taken = texts.take(places)
    ends = _values(taken, np.int64, len(taken) + 1) // width
    kind = offset_dtype(rows.type)
    if ends[-1] > np.iinfo(kind).max:
        return None
    numbers = pa.Array.from_buffers(values.type, int(ends[-1]), [None, taken.buffers()[2]])
    buffers = [None, pa.py_buffer(ends.astype(kind))]
    return pa.Array.from_buffers(rows.type, len(taken), buffers, children=[numbers])


def take_rows(
    take: Callable[[int, IntArray], pa.RecordBatch], firsts: IntArray, index: IntArray
) -> pa.Table:
    """The rows at ``index``; ``ChunkedArray.take`` may copy the whole column."""
    parts, back = parts_of(firsts, index)
    tables = [pa.Table.from_batches([take(number, places)]) for number, places in parts]
    return tables[0] if back is None else gathered(pa.concat_tables(tables).combine_chunks(), back)


_NO_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def _retyped(kind: pa.DataType, others: Mapping[pa.DataType, pa.DataType]) -> pa.DataType:

    def inner(field: pa.Field) -> pa.Field:
        return field.with_type(_retyped(field.type, others))

    if pa.types.is_struct(kind):
        return pa.struct([inner(kind.field(n)) for n in range(kind.num_fields)])
    if pa.types.is_list(kind):
        return pa.list_(inner(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(inner(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_field), kind.list_size)
    if pa.types.is_map(kind):
        return pa.map_(inner(kind.key_field), inner(kind.item_field), kind.keys_sorted)
    return others.get(kind, kind)


def is_text(kind: Any) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is a list with offsets."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def list_lengths(column: pa.ChunkedArray, index: IntArray | None) -> IntArray | None:
    """How long the lists of some rows are, int64 ``[rows]``, by their offsets: no value is read or copied.
    None where a row may be null, or holds no list.
    """
    if not is_list(column.type) or column.null_count:
        return None
    if index is None or column.num_chunks != 1:
        lengths = to_numpy(pc.list_value_length(column)).astype(np.int64)
        return lengths if index is None else lengths[index]
    chunk = column.chunk(0)
    offsets = _values(chunk, offset_dtype(chunk.type), len(chunk) + 1)
    lengths = offsets[index + 1] - offsets[index]
    return lengths.astype(np.int64, copy=False)


def holds(kind: Any, *tests: Callable[[Any], bool]) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    inner = (kind.field(n).type for n in range(kind.num_fields))
    return any(test(kind) for test in tests) or any(holds(part, *tests) for part in inner)


def has_text(kind: Any) -> bool:
    return holds(kind, is_text)
