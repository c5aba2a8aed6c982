"""Arrow columns as JSON text, a column at a time: no Python object is made for a row.

Text is escaped as JSON wants it and stays UTF-8; numbers are written so that they are read as the same
number, floats always with a point or an exponent; dates, times and decimals are text as Arrow writes it. Any
thread may call it.
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.arrays import to_arrow, to_numpy

is_ = pa.types
OTHER_LISTS = is_.is_fixed_size_list, is_.is_list_view, is_.is_large_list_view
#: What text must not hold as it is, backslash first: what it is replaced by has one.
ESCAPES = {"\\": "\\\\", '"': '\\"'} | {
    chr(code): json.dumps(chr(code))[1:-1] for code in range(0x20)
}


class NoJson(Exception):
    """A value that JSON has no form for.

    Attributes:
        row: in which; None if the whole column is of such a type.
    """

    def __init__(self, row: int | None, why: str) -> None:
        super().__init__(why)
        self.row = row


def lines_of(table: pa.Table) -> pa.Buffer:
    """Rows as JSON objects, a line each.

    Args:
        table: of one chunk.

    Raises:
        NoJson: a value that JSON has no form for.
    """
    columns = [column.chunk(0) for column in table.columns]
    lines = _object(table.column_names, columns, "}\n")
    _, offsets, data = lines.buffers()
    ends = np.frombuffer(offsets, np.int64)
    start, stop = int(ends[lines.offset]), int(ends[lines.offset + len(lines)])
    return data.slice(start, stop - start)


def _text(value: str) -> pa.Scalar:
    """A text as Arrow's, for compute functions."""
    data = value.encode()
    offsets = pa.py_buffer(np.array([0, len(data)], np.int64))
    return pa.Array.from_buffers(pa.large_utf8(), 1, [None, offsets, pa.py_buffer(data)])[0]


def _joined(*parts: pa.Array | pa.Scalar) -> pa.Array:
    """Texts put together, row by row; null where one is."""
    return pc.binary_join_element_wise(*parts, _text(""))


def _object(names: list[str], columns: list[pa.Array], end: str = "}") -> pa.Array:
    """A JSON object of each row of some columns."""
    parts: list[pa.Array | pa.Scalar] = []
    for number, (name, column) in enumerate(zip(names, columns, strict=True)):
        key = json.dumps(name, ensure_ascii=False)
        try:
            values = _values(column)
        except NoJson as error:
            raise NoJson(error.row, f"{name!r}: {error}") from None
        parts += [_text(f"{',' if number else '{'}{key}:"), values]
    return _joined(*parts, _text(end))


def _values(array: pa.Array) -> pa.Array:
    """The JSON text of each value, as large_string without nulls."""
    return pc.coalesce(_nullable(array), _text("null"))


def _nullable(array: pa.Array) -> pa.Array:
    """The JSON text of each value; null where that is null."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _nullable(array.storage)
    if is_.is_null(kind):
        return pa.nulls(len(array), pa.large_utf8())
    if is_.is_dictionary(kind):
        return _nullable(array.cast(kind.value_type))
    if is_.is_floating(kind):
        return _floats(array)
    if is_.is_boolean(kind) or is_.is_integer(kind):
        return array.cast(pa.large_utf8())
    if is_.is_duration(kind):
        return array.cast(pa.int64()).cast(pa.large_utf8())
    if is_.is_string(kind) or is_.is_large_string(kind) or is_.is_string_view(kind):
        return _quoted(array.cast(pa.large_utf8()))
    if is_.is_struct(kind):
        fields = [array.field(number) for number in range(kind.num_fields)]
        names = [kind.field(number).name for number in range(kind.num_fields)]
        found = _object(names, fields) if fields else _joined(_text("{}"), _empty(array))
        return pc.if_else(array.is_valid(), found, _no_text(len(array)))
    if is_.is_map(kind) and (is_.is_string(kind.key_type) or is_.is_large_string(kind.key_type)):
        keys, items = _within(array, array.keys), _within(array, array.items)
        texts = _joined(_quoted(keys.cast(pa.large_utf8())), _text(":"), _of_lists(array, items))
        return _lists(array, texts, "{", "}")
    if is_.is_list(kind) or is_.is_large_list(kind):
        return _lists(array, _of_lists(array, _within(array, array.values)), "[", "]")
    if any(is_list(kind) for is_list in OTHER_LISTS):
        return _nullable(array.cast(pa.large_list(kind.value_type)))
    try:
        if is_.is_temporal(kind) or is_.is_decimal(kind):
            return _joined(_text('"'), array.cast(pa.large_utf8()), _text('"'))
    except pa.ArrowNotImplementedError:
        pass
    raise NoJson(
        None,
        f"JSON has no form for {kind}: leave it out with drop_columns(), make text of it with "
        "with_columns(), or write Parquet",
    )


def _no_text(rows: int) -> pa.Array:
    return pa.nulls(rows, pa.large_utf8())


def _empty(array: pa.Array) -> pa.Array:
    """An empty text for each row."""
    return pc.coalesce(_no_text(len(array)), _text(""))


def _quoted(array: pa.Array) -> pa.Array:
    """Texts in quotes, and escaped."""
    data = array.buffers()[2]
    held = np.zeros(256, bool)
    if data is not None:
        held = np.bincount(np.frombuffer(data, np.uint8), minlength=256) > 0
    for character, escape in ESCAPES.items():
        if held[ord(character)]:
            array = pc.replace_substring(array, pattern=character, replacement=escape)
    return _joined(_text('"'), array, _text('"'))


def _floats(array: pa.Array) -> pa.Array:
    if is_.is_float16(array.type):
        array = array.cast(pa.float32())
    odd = pc.invert(pc.is_finite(array))
    if pc.any(odd).as_py():
        found = to_numpy(pc.coalesce(odd, _no()))
        raise NoJson(
            int(np.flatnonzero(found)[0]),
            "JSON has no NaN and no infinity: fill them, or make them null, in a with_columns(), or write "
            "Parquet",
        )
    text = array.cast(pa.large_utf8())
    whole = pc.invert(pc.match_substring_regex(text, pattern="[.e]"))
    return pc.if_else(whole, _joined(text, _text(".0")), text)


def _no() -> pa.Scalar:
    return to_arrow(np.zeros(1, bool))[0]


def _within(array: pa.Array, values: pa.Array) -> pa.Array:
    """Of the values that lists or maps lie in, those of these rows."""
    offsets = _offsets(array)
    return values.slice(offsets[0], offsets[-1] - offsets[0])


def _offsets(array: pa.Array) -> np.ndarray:
    dtype = np.int64 if is_.is_large_list(array.type) else np.int32
    item = np.dtype(dtype).itemsize
    if not len(array):
        return np.zeros(1, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array) + 1, array.offset * item)


def _of_lists(array: pa.Array, values: pa.Array) -> pa.Array:
    """The JSON text of each of the values that lists or maps have."""
    try:
        return _values(values)
    except NoJson as error:
        offsets = _offsets(array)
        if error.row is not None:
            error.row = int(np.searchsorted(offsets - offsets[0], error.row, side="right")) - 1
        raise


def _lists(array: pa.Array, texts: pa.Array, begin: str, end: str) -> pa.Array:
    """Texts of values put together to lists of as many as there are in each row."""
    offsets = to_arrow((_offsets(array) - _offsets(array)[0]).astype(np.int64))
    lists = pa.LargeListArray.from_arrays(offsets, texts)
    found = _joined(_text(begin), pc.binary_join(lists, _text(",")), _text(end))
    return pc.if_else(array.is_valid(), found, _no_text(len(array)))
