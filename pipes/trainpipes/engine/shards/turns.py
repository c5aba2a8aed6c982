"""Which batches one consumer gives: its part of the one global sequence. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trainpipes.engine.layout import IntArray


@dataclass(frozen=True)
class Turns:
    """The batches of one consumer, in order.

    Args:
        stride: from one to the next.
        end: the number before which they end; inf for none.
        num_shards: S.
        shards: those whose batches are given, where others come at the same stride; None for all.

    >>> Turns(2, 9).after(1, 10).tolist()
    [1, 3, 5, 7]
    >>> Turns(1, 9, num_shards=4, shards=frozenset({0, 3})).after(0, 3).tolist()
    [0, 3, 4]
    """

    stride: int
    end: float
    num_shards: int = 1
    shards: frozenset[int] | None = None

    def after(self, m: int, count: int) -> IntArray:
        """The next ones from ``m`` on, ``count`` of them at most, int64."""
        if self.shards is None:
            return self._all(m, count)
        found = np.empty(0, dtype=np.int64)
        own = np.array(sorted(self.shards))
        while len(found) < count and m < self.end:
            some = self._all(m, count + self.num_shards)
            found = np.concatenate([found, some[np.isin(some % self.num_shards, own)]])
            m = int(some[-1]) + self.stride
        return found[:count]

    def _all(self, m: int, count: int) -> IntArray:
        stop = m + self.stride * count
        if not math.isinf(self.end):
            stop = min(stop, int(self.end))
        return np.arange(m, stop, self.stride, dtype=np.int64)
