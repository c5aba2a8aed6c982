"""Which rows the windows of listed blocks have, and in which order: arithmetic alone. Any thread may ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trainpipes.order import IntArray, Layout, StreamLayout, permutation, segments
from trainpipes.runtime.reading.block_table import BlockTable
from trainpipes.runtime.reading.windows import WindowKey

__all__ = ["WindowCuts"]


@dataclass(frozen=True)
class WindowCuts:
    """How the rows of each epoch are cut into windows.

    Args:
        blocks: the source's blocks.
        layout_of: how an epoch is cut.
        block_order: order of the blocks in an epoch, or None for file order.
        seed: of the shuffle; None where nothing is shuffled.
    """

    blocks: BlockTable
    layout_of: Callable[[int], Layout | StreamLayout]
    block_order: Callable[[int], IntArray | None]
    seed: int | None

    def places(self, key: WindowKey) -> range:
        """Places of a window's rows in its epoch's order; none past the last window of a span."""
        layout = self.layout_of(key.epoch)
        assert isinstance(layout, Layout)
        if key.window >= layout.num_windows(key.span):
            return range(0)
        first, (start, stop) = layout.span(key.span)[0], layout.window(key.span, key.window)
        return range(first + start, first + stop)

    def stretches(self, key: WindowKey, first: int = 0) -> list[tuple[int, int, int]]:
        """The blocks that a window's rows from ``first`` on are in, and for each of them the first row and
        the row after the last."""
        starts, order = self.blocks.order(key.epoch, self.block_order)
        places, begins = self.places(key), self.blocks.begins
        parts = segments(starts, order, places.start + first, places.stop)
        return [(b, int(begins[b]) + low, int(begins[b]) + high) for b, low, high in parts]

    def ids(self, stretches: list[tuple[int, int, int]]) -> IntArray:
        """The numbers of such rows in file order, int64."""
        firsts = self.blocks.firsts
        found = [np.arange(firsts[b] + low, firsts[b] + high) for b, low, high in stretches]
        return np.concatenate(found or [np.empty(0, dtype=np.int64)])

    def order(self, key: WindowKey, rows: int) -> IntArray | None:
        """The order in which the rows that a window came to come out; None for as they are."""
        return None if self.seed is None else permutation(rows, self.seed, "window", *key)
