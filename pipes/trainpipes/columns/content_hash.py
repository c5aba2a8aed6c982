"""Hashes of rows' content, from Arrow columns.

A value of several words is hashed as the sum of its mixed words times the keys of their places,
modulo 2^64 (multilinear hashing: Lemire and Kaser, "Strongly universal string hashing is fast", The
Computer Journal 57, 2014; keys from Philox). Null equals only null, NaN equals NaN, 0.0 equals
-0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.types import IntArray
from trainpipes.columns.arrays import TEXTS, apart, dtype_of, is_list, one_chunk, plain, to_numpy
from trainpipes.order.layout import random_key

HashArray = npt.NDArray[np.uint64]

#: Bytes of rows that are worked on together: what is made of them stays in the processor's cache.
PIECE_BYTES = 1 << 17
#: Keys there are; of a longer value the place beyond them is mixed into the word.
KEYS = 1 << 16

_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_ONE = np.uint64(1)
#: The first n bytes of eight.
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], dtype=np.uint64)


class _Hashing:
    def __init__(self, number: int) -> None:
        raw = np.random.Philox(key=random_key(0, "content hash", number)).random_raw(KEYS)
        self.keys: HashArray = raw | _ONE

    def combined(self, words: HashArray, edges: IntArray) -> HashArray:
        """One hash for each row's words, from ``edges`` int64 ``[rows + 1]``."""
        lengths = np.diff(edges)
        place = np.arange(len(words)) - np.repeat(edges[:-1], lengths)
        mixed = words + _GOLDEN
        if len(words) > KEYS:
            mixed += (place >> 16).astype(np.uint64) * _SECOND
            place &= KEYS - 1
        _mix(mixed)
        mixed *= self.keys[place]
        sums = np.zeros(len(words) + 1, dtype=np.uint64)
        np.cumsum(mixed, out=sums[1:])
        found: HashArray = sums[edges[1:]] - sums[edges[:-1]]
        found += lengths.astype(np.uint64) * _GOLDEN
        return _mix(found)


def _mix(values: HashArray) -> HashArray:
    """A bijection of 64 bits, in place."""
    values ^= values >> _HALF
    values *= _FIRST
    values ^= values >> _HALF
    return values


_HASHINGS: dict[int, _Hashing] = {}


def row_hashes(table: pa.Table, number: int = 0) -> HashArray:
    """A hash of each row of a table, uint64 ``[rows]``.

    >>> rows = pa.table({"x": ["a", "a", None], "y": [[1], [1], []]})
    >>> one, same, other = row_hashes(rows).tolist()
    >>> one == same, one == other
    (True, False)
    """
    hashing = _HASHINGS.get(number)
    if hashing is None:
        hashing = _HASHINGS[number] = _Hashing(number)
    step = max(1, PIECE_BYTES * len(table) // max(1, table.nbytes))
    found = np.empty(len(table), dtype=np.uint64)
    for start in range(0, len(table), step):
        piece = table.slice(start, step)
        columns = [_values(one_chunk(column), hashing) for column in piece.columns]
        found[start : start + step] = _joined(columns, len(piece))
    return found


def _joined(parts: Sequence[HashArray], rows: int) -> HashArray:
    found = np.full(rows, len(parts), dtype=np.uint64)
    for part in parts:
        found = _mix(found * _GOLDEN + part)
        found *= _SECOND
    return found


def _values(array: Any, hashing: _Hashing) -> HashArray:
    """A word for each value of an array: the number, or a hash."""
    array = plain(array)
    kind, types = array.type, pa.types
    if types.is_null(kind):
        return np.full(len(array), _NULL, dtype=np.uint64)
    if types.is_struct(kind):
        fields = [_values(array.field(n), hashing) for n in range(kind.num_fields)]
        found = _joined(fields, len(array))
    elif types.is_fixed_size_list(kind):
        size = kind.list_size
        inner = array.values.slice(array.offset * size, len(array) * size)
        edges = np.arange(len(array) + 1, dtype=np.int64) * size
        found = hashing.combined(_values(inner, hashing), edges)
    elif types.is_list_view(kind) or types.is_large_list_view(kind):
        return _values(array.cast(pa.large_list(kind.value_type)), hashing)
    elif kind in TEXTS or is_list(kind) or types.is_map(kind):
        inner, offsets = apart(array)
        edges = offsets.astype(np.int64)
        if isinstance(inner, pa.Array):
            found = hashing.combined(_values(inner, hashing), edges)
        else:
            found = _texts(inner, edges, hashing)
    else:
        found = _fixed(array, hashing)
    if array.null_count:
        found[to_numpy(array.is_null())] = _NULL
    return found


def _texts(content: npt.NDArray[np.uint8], edges: IntArray, hashing: _Hashing) -> HashArray:
    """Of texts and bytes, eight bytes at a time, the last word filled with zeros."""
    lengths = np.diff(edges)
    padded = np.append(content, np.zeros(8, dtype=np.uint8))
    at = np.ndarray(len(content) + 1, "<u8", padded, strides=(1,))  # 8 bytes from each byte on
    counts = -(-lengths // 8)
    before = np.concatenate([[0], np.cumsum(counts)])
    words = at[np.arange(before[-1]) * 8 + np.repeat(edges[:-1] - before[:-1] * 8, counts)]
    some = np.flatnonzero(lengths)
    words[before[some + 1] - 1] &= _MASKS[(lengths[some] - 1) % 8 + 1]
    return hashing.combined(words, before) ^ (lengths.astype(np.uint64) * _SECOND)


def _fixed(array: Any, hashing: _Hashing) -> HashArray:
    kind, rows = array.type, len(array)
    dtype = dtype_of(kind)
    if dtype == np.bool_:
        return _plain(array.cast(pa.uint8()), 1).astype(np.uint64)
    if dtype is not None and dtype.kind == "f":
        floats = _plain(array, dtype.itemsize).view(dtype).astype(np.float64) + 0.0  # -0.0 is 0.0
        floats[np.isnan(floats)] = np.nan
        return floats.view(np.uint64)
    width = kind.byte_width if pa.types.is_fixed_size_binary(kind) else kind.bit_width // 8
    if width in (1, 2, 4, 8):
        return _plain(array, width).astype(np.uint64)
    words = -(-width // 8)
    room = np.zeros((rows, words * 8), dtype=np.uint8)
    if width and rows:
        held = array.buffers()[1]
        flat = np.frombuffer(held, np.uint8, rows * width, array.offset * width)
        room[:, :width] = flat.reshape(rows, width)
    edges = np.arange(rows + 1, dtype=np.int64) * words
    return hashing.combined(room.reshape(-1).view("<u8"), edges)


def _plain(array: Any, width: int) -> npt.NDArray[Any]:
    held = array.buffers()[1]
    if held is None or not len(array):
        return np.zeros(len(array), dtype=f"u{width}")
    return np.frombuffer(held, f"u{width}", len(array), array.offset * width)
