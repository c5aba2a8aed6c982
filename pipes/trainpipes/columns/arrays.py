"""Arrow's arrays as NumPy's, and the other way, in the same memory where that can be.

pyarrow's own ways (``to_numpy``, ``pa.array``, ``take`` with an array of NumPy's, a number of Python's in a
compute function) import pandas where it is installed, which takes 0.1 to 0.3 s of the first batch. These read
and wrap Arrow's buffers instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes.engine.layout import IntArray

Array = npt.NDArray[Any]
#: Types of text and bytes that are offsets and content.
TEXTS = (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())


def to_numpy(array: pa.Array | pa.ChunkedArray) -> Array:
    """The values as an array ``[n]``, read-only. Integers, floats and bools without a null are copied only
    if they are bools or come in several chunks; all else is what pyarrow makes of it.
    """
    array = one_chunk(array)
    dtype = dtype_of(array.type)
    if array.null_count or dtype is None:
        found: Array = array.to_numpy(zero_copy_only=False)
        return found
    if dtype == np.bool_:
        return to_numpy(array.cast(pa.uint8())).view(np.bool_)
    return _values(array, dtype, len(array))


def dtype_of(kind: pa.DataType) -> np.dtype[Any] | None:
    """NumPy's type of integers, floats or bools; None for all else."""
    if pa.types.is_boolean(kind):
        return np.dtype(np.bool_)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    code = "f" if pa.types.is_floating(kind) else "i" if pa.types.is_signed_integer(kind) else "u"
    return np.dtype(f"{code}{kind.bit_width // 8}")


def is_number(kind: pa.DataType) -> bool:
    """Whether values are integers, floats or bools."""
    return dtype_of(kind) is not None


def _values(array: pa.Array, dtype: npt.DTypeLike, count: int) -> Array:
    """The first ``count`` values in an array's second buffer, from the array's offset on."""
    if not len(array):  # there may be no buffer
        found = np.zeros(count, dtype)
    else:
        start = array.offset * np.dtype(dtype).itemsize
        found = np.frombuffer(array.buffers()[1], dtype, count, start)
    found.flags.writeable = False
    return found


def to_arrow(values: Array, null: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """An array ``[n]`` as Arrow's.

    Args:
        values: integers, floats and bools, copied only if they are bools or do not lie one after the
            other; of all else, and of a masked array, pyarrow makes what it makes.
        null: which of them are null, bool ``[n]``.
    """
    if values.dtype.kind not in "iufb" or isinstance(values, np.ma.MaskedArray):
        return pa.array(values, mask=null)
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    valid = None if null is None else to_arrow(~null).buffers()[1]
    is_bool = values.dtype == np.bool_
    kind = pa.uint8() if is_bool else pa.from_numpy_dtype(values.dtype)
    found = pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(values)])
    return found.cast(pa.bool_()) if is_bool else found


def python_to_arrow(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Python values of a type as an Arrow array: numbers, texts, bytes, or lists of them; of all else, and
    where one is None, pyarrow makes what it makes.

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
    """Lists, maps, texts or bytes taken apart, in the same memory.

    Returns:
        What they hold, one row after the other: of lists and maps an Arrow array, of others uint8
        ``[bytes]``; and where each row starts in it, and the end: int32 or int64 ``[rows + 1]``.
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
    """The type of the offsets of lists, maps, texts or bytes."""
    is_ = pa.types
    large = is_.is_large_list(kind) or is_.is_large_string(kind) or is_.is_large_binary(kind)
    return np.int64 if large else np.int32


def list_array(values: Array, lengths: IntArray) -> pa.Array:
    """Rows of these lengths as an Arrow list array; ``values`` are theirs, one row after the other. They are
    large lists where there are more values than 32 bits count."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] > np.iinfo(np.int32).max:
        return pa.LargeListArray.from_arrays(to_arrow(offsets), to_arrow(values))
    return pa.ListArray.from_arrays(to_arrow(offsets.astype(np.int32)), to_arrow(values))


def one_chunk(column: pa.Array | pa.ChunkedArray) -> Any:
    """A column as one array; copied only if it has several chunks."""
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
    """The rows at ``index``. Views of text and bytes, as Polars writes them, are gathered as text and bytes:
    Arrow has no ``take`` for them.

    Args:
        rows: a table, a record batch or an array.
        index: numbers of rows, int64, in any order, with repeats.

    Raises:
        pa.ArrowInvalid: chunks of a column hold more together than its offsets can count.
    """
    places = to_arrow(index)
    try:
        return rows.take(places)
    except pa.ArrowNotImplementedError:
        if isinstance(rows, pa.Array):
            return rows.cast(_without_views(rows.type)).take(places).cast(rows.type)
        plain = [field.with_type(_without_views(field.type)) for field in rows.schema]
        return rows.cast(pa.schema(plain)).take(places).cast(rows.schema)


def take_rows(
    take: Callable[[int, IntArray], pa.RecordBatch], firsts: IntArray, index: IntArray
) -> pa.Table:
    """The rows at ``index``, of one row or more.

    ``ChunkedArray.take`` may copy the whole column; a chunk's own takes what is asked.

    Args:
        take: gives rows of a chunk by the chunk's number and theirs in it.
        firsts: the number of each chunk's first row, and the number of rows, int64 ``[chunks + 1]``.
        index: numbers of rows, int64, in any order, with repeats.
    """
    which = np.searchsorted(firsts, index, side="right") - 1
    order = np.argsort(which, kind="stable")
    found, edges = np.unique(which[order], return_index=True)
    parts = []
    for number, places in zip(found.tolist(), np.split(order, edges[1:]), strict=True):
        parts.append(pa.Table.from_batches([take(number, index[places] - firsts[number])]))
    if len(parts) == 1:  # the one sort was stable, so that rows stand as they were asked for
        return parts[0]
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return gathered(pa.concat_tables(parts).combine_chunks(), back)


def _without_views(kind: pa.DataType) -> pa.DataType:
    """A type for the same values whose rows Arrow can gather."""
    types = pa.types
    if types.is_list(kind):
        return pa.list_(_field(kind.value_field))
    if types.is_large_list(kind):
        return pa.large_list(_field(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(_field(kind.value_field), kind.list_size)
    if types.is_struct(kind):
        return pa.struct([_field(kind.field(n)) for n in range(kind.num_fields)])
    return {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(
        kind, kind
    )


def _field(field: pa.Field) -> pa.Field:
    return field.with_type(_without_views(field.type))


def is_utf8(array: Any) -> bool:
    """Whether all text of an Arrow array is UTF-8; 1 to 30 µs a MB of ASCII, 1 to 2 ms of others."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def check_sound(array: Any) -> None:
    """Raise ArrowInvalid unless an array can be read without harm: its offsets lie within its values, and so
    on. Text need not be UTF-8, but for text in dictionaries, of which there is little."""
    array.validate()
    kind = _as_bytes(array.type)
    (array if kind == array.type else array.view(kind)).validate(full=True)


def _as_bytes(kind: Any) -> Any:
    """A type with bytes in place of text."""
    types = pa.types
    for is_text, other in (
        (types.is_string, pa.binary()),
        (types.is_large_string, pa.large_binary()),
        (types.is_string_view, pa.binary_view()),
    ):
        if is_text(kind):
            return other
    if types.is_struct(kind):
        fields = [kind.field(n) for n in range(kind.num_fields)]
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in fields])
    if types.is_list(kind) or types.is_large_list(kind):
        inner = kind.value_field.with_type(_as_bytes(kind.value_type))
        return pa.list_(inner) if types.is_list(kind) else pa.large_list(inner)
    return kind


def is_text(kind: Any) -> bool:
    """Whether an Arrow type is one of text."""
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is one of lists of any length, which have offsets."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def holds(kind: Any, *tests: Callable[[Any], bool]) -> bool:
    """Whether an Arrow type, or one within it, passes a test."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    inner = (kind.field(n).type for n in range(kind.num_fields))
    return any(test(kind) for test in tests) or any(holds(one, *tests) for one in inner)


def has_text(kind: Any) -> bool:
    """Whether values of an Arrow type are text, or hold some."""
    return holds(kind, is_text)


def replaced(array: Any) -> Any:
    """An array with U+FFFD for what is not UTF-8, as Python's ``errors="replace"`` puts it."""
    kind = array.type
    if not has_text(kind) or is_utf8(array):
        return array
    types = pa.types
    if types.is_string_view(kind):
        return replaced(array.cast(pa.large_binary()).view(pa.large_string())).cast(kind)
    if types.is_string(kind) or types.is_large_string(kind):
        written = array.view(pa.binary() if types.is_string(kind) else pa.large_binary())
        texts = [None if b is None else b.decode("utf-8", "replace") for b in written.to_pylist()]
        return python_to_arrow(texts, kind)
    if array.offset:
        array = array.take(to_arrow(np.arange(len(array))))
    null = array.is_null() if array.null_count else None
    if types.is_struct(kind):
        fields = [replaced(array.field(n)) for n in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=null)
    if types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(replaced(array.values), type=kind, mask=null)
    if types.is_map(kind):
        keys, items = replaced(array.keys), replaced(array.items)
        return pa.MapArray.from_arrays(array.offsets, keys, items, type=kind, mask=null)
    lists = pa.LargeListArray if types.is_large_list(kind) else pa.ListArray
    return lists.from_arrays(array.offsets, replaced(array.values), type=kind, mask=null)
