"""Text in Arrow columns that may not be UTF-8. Any thread may ask.

Arrow passes on the bytes of text as they are. To look at all of them would cost up to as much as to read
them, so that nobody does before something fails.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import python_to_arrow, to_arrow


def is_utf8(array: Any) -> bool:
    """Whether all text of an Arrow array is UTF-8; 1 to 30 µs a MB of ASCII, 1 to 2 ms of others."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def check_whole(table: pa.Table) -> None:
    """Raise ArrowInvalid unless a table can be read without harm. Text need not be UTF-8: it may come so from
    a file, and whoever decodes it says so."""
    for column in table.columns:
        for chunk in column.chunks:
            try:
                check_sound(chunk)
            except pa.ArrowInvalid as error:
                if "Invalid UTF8 sequence" not in str(error):
                    raise


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


def has_text(kind: Any) -> bool:
    """Whether values of an Arrow type are text, or hold some."""
    types = pa.types
    if types.is_dictionary(kind):
        return has_text(kind.value_type)
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or any(has_text(kind.field(n).type) for n in range(kind.num_fields))
    )


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
