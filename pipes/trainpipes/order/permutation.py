"""Random permutations and draws of any size, by position: O(1) memory, no state.

``Permutation`` is the generalized Feistel cipher of Black and Rogaway ("Ciphers with arbitrary
finite domains", CT-RSA 2002, eprint.iacr.org/2001/012, method 3), with "cycle walking" (method 2).
Keys are from Philox; the round function multiplies and takes the upper bits, as Philox does. Tests
find no pattern from four rounds on; there are eight. To shuffle by such bijections is an idea of
Mitchell et al. (arXiv 2106.06161).

A Feistel network of a small domain reaches few of all orders: up to 65,536 rows
``permutation`` sorts instead, which reaches all: a pure function of a seed and a path of names, by
a stable argsort of the raw 64-bit stream of Philox-4x64 (Salmon et al., SC'11), which NumPy keeps the
same over versions (NEP 19).
"""

from __future__ import annotations

import hashlib
import json
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from trainpipes._internal.checks import IntArray


def random_key(seed: int, *path: int | str) -> npt.NDArray[np.uint64]:
    """The 128-bit Philox key of a seed and a path of names, uint64 ``[2]``.

    >>> random_key(0, "rows", 3).tolist()
    [4477973818612085419, 15367812723592809961]
    """
    text = json.dumps([seed, *path], separators=(",", ":"))
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], dtype="<u8").astype(np.uint64)


def permutation(n: int, seed: int, *path: int | str) -> IntArray:
    """A permutation of ``range(n)``, int64 ``[n]``.

    >>> permutation(5, 0, "rows").tolist()
    [0, 1, 3, 4, 2]
    """
    raw = np.random.Philox(key=random_key(seed, *path)).random_raw(n)
    return sorted_order(raw)


def sorted_order(raw: npt.NDArray[np.uint64]) -> IntArray:
    """The stable order of random numbers, int64 ``[n]``."""
    if len(raw) >= LEAST_PACKED:
        bits = np.uint64((len(raw) - 1).bit_length())
        packed = raw >> bits << bits | np.arange(len(raw), dtype=np.uint64)
        packed.sort()
        upper = packed >> bits
        if (upper[1:] != upper[:-1]).all():  # else the lower bits count, too
            return (packed ^ upper << bits).astype(np.int64)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)


#: From so many numbers on it takes less time to sort numbers that hold their places in their lower bits.
LEAST_PACKED = 1024
#: Up to here a permutation is sorted, and kept: 512 KiB.
SORTED_ROWS = 1 << 16
ROUNDS = 8
#: Positions at a time, so that the arrays stay in the CPU's cache.
CHUNK = 1 << 14

_SHIFT = np.uint64(32)
_FIRST = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xBF58476D1CE4E5B9)

UIntArray = npt.NDArray[np.uint64]


class Permutation:
    """A permutation of ``range(n)``, n up to 2^62, asked by position.

    >>> order = Permutation(10**9, 0, "rows")
    >>> order(np.array([0, 1, 999_999_999])).tolist()
    [52128124, 689852950, 769326514]
    """

    def __init__(self, n: int, seed: int, *path: int | str) -> None:
        if not 0 <= n <= 1 << 62:
            raise ValueError(f"a permutation is of 0 to 2^62 numbers, got {n}")
        self.n = n
        self._sorted: IntArray | None = None
        if n <= SORTED_ROWS:
            self._sorted = permutation(n, seed, *path)
            return
        self._keys = np.random.Philox(key=random_key(seed, *path, "feistel")).random_raw(ROUNDS)
        low = isqrt(n - 1) + 1
        self._low, self._high = np.uint64(low), np.uint64(-(-n // low))

    def __call__(self, positions: IntArray) -> IntArray:
        if self._sorted is not None:
            return self._sorted[positions]
        numbers_at = np.empty(len(positions), dtype=np.int64)
        for start in range(0, len(positions), CHUNK):
            numbers = positions[start : start + CHUNK].astype(np.uint64)
            self._rounds(numbers)
            outside = np.flatnonzero(numbers >= self.n)
            while len(outside):
                again = numbers[outside]
                self._rounds(again)
                numbers[outside] = again
                outside = outside[again >= self.n]
            numbers_at[start : start + CHUNK] = numbers
        return numbers_at

    def _rounds(self, numbers: UIntArray) -> None:
        right = numbers // self._low
        left = numbers - right * self._low
        mixed, shifted = np.empty_like(numbers), np.empty_like(numbers)
        for number, key in enumerate(self._keys):
            if number % 2:
                half, other, size = right, left, self._high
            else:
                half, other, size = left, right, self._low
            np.add(other, key, out=mixed)
            np.multiply(mixed, _FIRST, out=mixed)
            np.right_shift(mixed, _SHIFT, out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            np.multiply(mixed, _SECOND, out=mixed)
            np.right_shift(mixed, _SHIFT, out=mixed)
            np.multiply(mixed, size, out=mixed)  # 32 bits to a number below size
            np.right_shift(mixed, _SHIFT, out=mixed)
            np.add(half, mixed, out=half)
            np.subtract(half, size, out=mixed)  # wraps around where half < size, and is then larger
            np.minimum(half, mixed, out=half)
        np.multiply(right, self._low, out=numbers)
        np.add(numbers, left, out=numbers)


def uniform(start: int, stop: int, seed: int, *path: int | str) -> npt.NDArray[np.float64]:
    """Draws ``start`` to ``stop`` of an endless sequence in [0, 1), float64.

    >>> bool((uniform(5, 9, 0, "draws") == uniform(0, 9, 0, "draws")[5:]).all())
    True
    """
    generator = np.random.Philox(key=random_key(seed, *path), counter=start // 4)
    raw = generator.random_raw(stop - start + start % 4)[start % 4 :]
    drawn: npt.NDArray[np.float64] = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn


#: Turns whose ranks are a permutation: a buffer of any batches has of each part of the costs about as many.
STRATA = 32


def turn_order(
    costs: npt.NDArray[Any], first: int, strata: int, seed: int, *path: int | str
) -> IntArray:
    """Which batch a shard gives at each turn, int64 ``[batches]``, so that those of a step cost about the
    same.

    A shard's t-th batch of a pass is given at *turn* t, and the ranks of a step are at the same turn. For
    each turn one rank among costs is drawn, alike for all shards, and each shard gives the batch that has
    that rank among its own: nothing is asked of other shards, and the order follows from the position.

    Args:
        costs: of a shard's batches, ``[batches]``.
        first: the turn of the first batch given.
        strata: turns among which each part of the costs comes once.
        path: names the draws; alike for all shards.

    >>> turn_order(np.array([5, 9, 1, 7]), 0, 4, 0).tolist()
    [0, 3, 2, 1]
    >>> turn_order(np.array([90, 10, 50]), 0, 4, 0).tolist()  # of another shard, which has one less
    [2, 0, 1]
    """
    turns = np.arange(first, first + len(costs), dtype=np.int64)
    keys = np.empty(len(costs), dtype=np.float64)
    for window in range(first // strata, -(-(first + len(costs)) // strata)):
        inside = turns // strata == window
        drawn = permutation(strata, seed, "turns", *path, window)[turns[inside] % strata]
        keys[inside] = drawn + uniform(window, window + 1, seed, "turns", *path)[0]
    order = np.empty(len(costs), dtype=np.int64)
    order[np.argsort(keys, kind="stable")] = np.argsort(costs, kind="stable")
    return order
