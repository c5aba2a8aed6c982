from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from trainpipes.engine.layout import IntArray


class BlockTable:
    """A source's blocks as arrays, without rows before ``skip``, from ``stop`` on, and of
    ``unread`` blocks: number of each block's first row, first row used, and rows used."""

    def __init__(
        self,
        lengths: IntArray,
        skip: int = 0,
        stop: int | None = None,
        unread: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self.firsts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        total = int(self.firsts[-1])
        last = total if stop is None else min(stop, total)
        low = np.clip(self.firsts[:-1], skip, max(skip, last))
        high = np.clip(self.firsts[1:], skip, max(skip, last))
        self.begins = low - self.firsts[:-1]
        self.lengths = high - low
        if unread is not None:
            self.lengths[unread] = 0
        self.rows = int(self.lengths.sum())
        self._orders: OrderedDict[int, tuple[IntArray, IntArray | None]] = OrderedDict()

    def order(
        self, epoch: int, make: Callable[[int], IntArray | None]
    ) -> tuple[IntArray, IntArray | None]:
        """Rows before each place of an epoch's order of blocks, and that order."""
        found = self._orders.get(epoch)
        if found is None:
            order = make(epoch)
            lengths = self.lengths if order is None else self.lengths[order]
            starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            found = self._orders[epoch] = (starts, order)
            with suppress(KeyError):  # another thread has let it go
                while len(self._orders) > 3:
                    self._orders.popitem(last=False)
        return found

    def numbers(self, stretches: Sequence[tuple[int, int, int]]) -> IntArray:
        found = [
            np.arange(self.firsts[b] + low, self.firsts[b] + high) for b, low, high in stretches
        ]
        return np.concatenate(found or [np.empty(0, dtype=np.int64)])

    def where(self, row: int) -> tuple[int, int]:
        block = int(np.searchsorted(self.firsts, row, side="right")) - 1
        return block, row - int(self.firsts[block])
