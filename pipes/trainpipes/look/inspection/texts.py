"""What is in a column of any type: texts and bytes within lists and structs, and how long a row of it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.arrays import to_arrow, to_numpy
from trainpipes.engine.layout import IntArray

__all__ = [
    "byte_lengths",
    "holds_bytes",
    "is_number_list",
    "item_counts",
    "plain_array",
    "texts_of",
]


def plain_array(array: pa.Array) -> pa.Array:
    """An array without dictionaries, views, or types of Python packages."""
    while True:
        kind = array.type
        if isinstance(kind, pa.BaseExtensionType):
            array = array.storage
        elif pa.types.is_dictionary(kind):
            array = array.dictionary_decode()
        elif pa.types.is_run_end_encoded(kind):
            array = pc.run_end_decode(array)
        elif kind in (pa.string_view(), pa.binary_view()):
            array = array.cast(pa.large_string() if kind == pa.string_view() else pa.large_binary())
        else:
            return array


def is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_list(kind: Any) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_number_list(kind: Any) -> bool:
    """Whether values are lists of numbers, such as token ids."""
    inner = kind.value_type if is_list(kind) else None
    return inner is not None and (pa.types.is_integer(inner) or pa.types.is_floating(inner))


def holds_bytes(kind: Any) -> bool:
    """Whether values are bytes."""
    types = pa.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def texts_of(array: pa.Array) -> Iterator[tuple[pa.Array, IntArray]]:
    """Texts in an array, whatever lists and structs they are in: arrays of texts, none of them null, and the
    row that each text is in."""
    yield from _texts(array, np.arange(len(array), dtype=np.int64))


def _texts(array: pa.Array, rows: IntArray) -> Iterator[tuple[pa.Array, IntArray]]:
    array = plain_array(array)
    kind = array.type
    if is_text(kind):
        if array.null_count:
            rows = rows[to_numpy(array.is_valid())]
            array = array.drop_null()
        yield array, rows
    elif pa.types.is_struct(kind):
        for child in array.flatten():
            yield from _texts(child, rows)
    elif pa.types.is_map(kind):
        lengths = np.diff(to_numpy(array.offsets))
        first, last = array.offsets[0].as_py(), array.offsets[len(array)].as_py()
        inner = np.repeat(rows, lengths)
        for child in (array.keys, array.items):
            yield from _texts(child.slice(first, last - first), inner)
    elif is_list(kind):
        parents = to_numpy(pc.list_parent_indices(array)).astype(np.int64)
        yield from _texts(pc.list_flatten(array), rows[parents])


def byte_lengths(array: pa.Array) -> IntArray:
    """Bytes of all texts in each row, or of the bytes that it is, int64 ``[rows]``."""
    found = np.zeros(len(array), dtype=np.int64)
    plain = plain_array(array)
    if holds_bytes(plain.type):
        return to_numpy(pc.coalesce(pc.binary_length(plain).cast(pa.int64()), _zeros(plain)))
    for texts, rows in texts_of(plain):
        lengths = to_numpy(pc.binary_length(texts)).astype(np.int64)
        found += np.bincount(rows, weights=lengths, minlength=len(array)).astype(np.int64)
    return found


def item_counts(array: pa.Array) -> IntArray:
    """Items of the list in each row, 0 for null, int64 ``[rows]``."""
    plain = plain_array(array)
    counts = pc.list_value_length(plain).cast(pa.int64())
    return to_numpy(pc.coalesce(counts, _zeros(plain)))


def _zeros(array: pa.Array) -> pa.Array:
    return to_arrow(np.zeros(len(array), dtype=np.int64))
