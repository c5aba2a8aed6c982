"""How many bytes each row of an Arrow table takes, by its types and lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import apart, one_chunk
from trainpipes.engine.layout import IntArray

#: What a row takes besides its values while it is worked on: its place, its hashes, where it was.
ROW_COST = 48
#: What offsets take, and a value of a type that is not looked into.
OFFSET, UNKNOWN = 4, 16


def row_bytes(table: pa.Table) -> IntArray:
    """Bytes of each row, int64 ``[rows]``: those of its values, and four for each length. They follow from
    the rows alone, not from how they lie in memory.

    >>> row_bytes(pa.table({"x": pa.array([1, 2], pa.int32()), "y": ["a", "abc"]})).tolist()
    [9, 11]
    """
    found = np.zeros(len(table), dtype=np.int64)
    for column in table.columns:
        found += _bytes(one_chunk(column))
    return found


def _bytes(array: Any) -> IntArray | int:
    """Bytes of each value; one number where all have the same."""
    kind, types = array.type, pa.types
    if isinstance(array, pa.ExtensionArray):
        return _bytes(array.storage)
    if types.is_struct(kind):
        found: IntArray | int = 0
        for number in range(kind.num_fields):
            field: IntArray | int = _bytes(array.field(number))
            found = found + field
        return found
    if types.is_fixed_size_list(kind):
        size = kind.list_size
        inner = _bytes(array.values.slice(array.offset * size, len(array) * size))
        if isinstance(inner, int):
            return inner * int(size)
        sums: IntArray = inner.reshape(len(array), size).sum(axis=1)
        return sums
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return _bytes(array.cast(pa.large_binary()))
    if kind.num_fields == 1 or types.is_map(kind) or _is_text(kind):
        try:
            values, offsets = apart(array)
        except (AttributeError, TypeError, IndexError):
            return UNKNOWN
        lengths = np.diff(offsets).astype(np.int64)
        inner = _bytes(values) if isinstance(values, pa.Array) else 1
        if isinstance(inner, int):
            return lengths * inner + OFFSET
        before = np.zeros(len(inner) + 1, dtype=np.int64)
        np.cumsum(inner, out=before[1:])
        return np.diff(before[offsets]) + OFFSET
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:  # null, and what has no width
        return 0 if types.is_null(kind) else UNKNOWN


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_large_string(kind)
        or types.is_binary(kind) or types.is_large_binary(kind)
    )  # fmt: skip
