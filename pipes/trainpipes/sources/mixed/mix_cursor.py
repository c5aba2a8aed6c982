"""The positions within a run of mixed rows, each made when it is asked for.

Immutable, and asked by any thread. The cursor of a shard: rows drawn in this epoch of the mix, how far each
source is ahead, and each source's own cursor at its next row. So a resume reads no row that was used.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainpipes.engine.layout import IntArray
from trainpipes.sources.mixed.mix_source import CursorAfter


@dataclass(frozen=True)
class Stretch:
    """Draws between which no source was read on.

    Args:
        first: of its rows among those of the run.
        order: source of each row, int64.
        lengths: tokens of each row, int64; None where rows are counted.
        ahead: how far each source is ahead before it.
        weights: of the sources.
        tokens: drawn before it.
        cursors: give for each source the cursor after so many of its rows.
    """

    first: int
    order: IntArray
    lengths: IntArray | None
    ahead: tuple[int, ...]
    weights: tuple[int, ...]
    tokens: int
    cursors: tuple[CursorAfter, ...]


class MixCursors:
    """The states within a run.

    Args:
        names: of the sources.
        epoch: of the mix.
        row: rows drawn in that epoch before the run.
        stretches: of the run.
    """

    def __init__(
        self, names: tuple[str, ...], epoch: int, row: int, stretches: list[Stretch]
    ) -> None:
        self._names = names
        self._epoch = epoch
        self._row = row
        self._stretches = stretches
        self._firsts = [stretch.first for stretch in stretches]

    def at(self, row: int) -> dict[str, Any]:
        stretch = self._stretches[bisect_right(self._firsts, row) - 1]
        order = stretch.order[: row - stretch.first]
        counts = np.bincount(order, minlength=len(self._names)).tolist()
        state: dict[str, Any] = {"epoch": self._epoch, "window": 0, "row": self._row + row}
        units = counts
        if stretch.lengths is not None:
            sums = np.zeros(len(self._names), dtype=np.int64)
            np.add.at(sums, order, stretch.lengths[: len(order)])
            units = sums.tolist()
            state["tokens"] = stretch.tokens + sum(units)
        state["ahead"] = list(moved_on(stretch.ahead, stretch.weights, units))
        found = [after(count) for after, count in zip(stretch.cursors, counts, strict=True)]
        named = zip(self._names, found, strict=True)
        state["sources"] = {name: cursor for name, cursor in named if cursor is not None}
        return state


def moved_on(ahead: tuple[int, ...], weights: tuple[int, ...], units: list[int]) -> tuple[int, ...]:
    """How far each source is ahead after it has given so many units."""
    total, given = sum(weights), sum(units)
    return tuple(a + total * u - w * given for a, w, u in zip(ahead, weights, units, strict=True))
