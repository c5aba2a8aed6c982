"""Rows by their content, as numbers of 64 bits: equal rows have equal ones, and others nearly never."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.arrays import python_to_arrow, to_numpy
from trainpipes.errors import SchemaError
from trainpipes.inspection.texts import is_list, plain_array
from trainpipes.stages.row_hash import HashArray, hash_column, mix

__all__ = ["row_hashes"]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NULL = np.uint64(0xD6E8FEB86659FD93)


def row_hashes(table: pa.Table) -> HashArray:
    """The hash of each row, uint64 ``[rows]``; about 10 ns a value and 1 ns a byte of text."""
    found = np.zeros(len(table), dtype=np.uint64)
    for column in table.columns:
        parts = [_hashes(chunk) for chunk in column.chunks]
        if parts:
            found = mix(found * GOLDEN + np.concatenate(parts))
    return found


def _hashes(array: pa.Array) -> HashArray:
    array = plain_array(array)
    kind = array.type
    if pa.types.is_null(kind):
        return np.full(len(array), NULL)
    if pa.types.is_struct(kind):
        found = np.zeros(len(array), dtype=np.uint64)
        for child in array.flatten():
            found = mix(found * GOLDEN + _hashes(child))
    elif is_list(kind) or pa.types.is_map(kind):
        found = _list_hashes(array)
    else:
        return _flat_hashes(array)
    if array.null_count:
        found[to_numpy(array.is_null())] = NULL
    return found


def _list_hashes(array: pa.Array) -> HashArray:
    """Of the hashes of their items, each with its place."""
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        offsets = np.arange(len(array) + 1, dtype=np.int64) * size + array.offset * size
        values = array.values
    else:
        offsets = to_numpy(array.offsets).astype(np.int64)
        values = array.values
    first = int(offsets[0])
    own = _hashes(values.slice(first, int(offsets[-1]) - first))
    starts, lengths = offsets - first, np.diff(offsets)
    place = np.arange(len(own), dtype=np.int64) - np.repeat(starts[:-1], lengths)
    mixed = mix(own ^ mix((place.astype(np.uint64) + np.uint64(1)) * GOLDEN))
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    total = sums[starts[1:]] - sums[starts[:-1]]
    return mix(total ^ mix(lengths.astype(np.uint64) * GOLDEN))


def _flat_hashes(array: pa.Array) -> HashArray:
    found = np.full(len(array), NULL)
    there = to_numpy(array.is_valid())
    values = array.drop_null() if array.null_count else array
    if not len(values):
        return found
    try:
        hashes = hash_column(values, "", "inspect_files()")
    except (SchemaError, KeyError, pa.ArrowException):
        hashes = _of_python(values)
    if not array.null_count:
        return hashes
    found[there] = hashes
    return found


def _of_python(values: Any) -> HashArray:
    """Of types that have no hash of their own: by how Python writes their values."""
    texts = [repr(value) for value in values.to_pylist()]
    return hash_column(python_to_arrow(texts, pa.large_string()), "", "inspect_files()")
