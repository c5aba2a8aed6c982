"""Arrow's texts that may be no UTF-8, as files hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import has_text, is_list, python_to_arrow, to_arrow, to_numpy

_AS_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def is_utf8(array: Any) -> bool:
    """Whether all text of an Arrow array is UTF-8."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def check_sound(array: Any) -> None:
    """Raise ArrowInvalid unless an array can be read without harm; its text may be no UTF-8."""
    array.validate()
    kind = array.type
    if kind in _AS_BYTES:
        array.view(_AS_BYTES[kind]).validate(full=True)
    elif pa.types.is_struct(kind) and has_text(kind):
        for number in range(kind.num_fields):
            check_sound(array.field(number))
    elif is_list(kind) and has_text(kind):
        edges = to_numpy(array.offsets)
        if len(array) and (
            edges[0] < 0 or edges[-1] > len(array.values) or (np.diff(edges) < 0).any()
        ):
            raise pa.ArrowInvalid("a list begins or ends beyond its values")
        check_sound(array.values)
    elif pa.types.is_fixed_size_list(kind) and has_text(kind):
        check_sound(array.values)
    else:
        array.validate(full=True)


def replaced(array: Any) -> Any:
    """An array with U+FFFD for bytes that are not UTF-8, as ``errors="replace"``."""
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
