"""The next items made by other threads while the one that trains is at its own work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TypeAlias

from trainpipes.runtime.pool import Pool
from trainpipes.runtime.shards.lane import Lane

__all__ = ["Beforehand"]

#: Seconds between two items, and how many times in a row, from which somebody is at work in between. Who
#: only collects items makes them as fast alone.
AT_WORK, TIMES = 200e-6, 4
#: Items made beforehand.
MOST = 48

#: The next slot, and what gives it and those after it.
InTurn: TypeAlias = Callable[[], tuple[int, Sequence[Lane]]]


class Beforehand:
    """Makes the items that come next, where they would else be made when they are taken.

    Args:
        pool: makes them.
        stride: from one slot of this consumer to its next.
    """

    def __init__(self, pool: Pool, stride: int) -> None:
        self._pool = pool
        self._stride = stride
        self._least = stride * MOST // 2
        self._given = float("inf")
        self._times = 0
        self._until = 0

    def given(self) -> None:
        """An item is given away now."""
        self._given = perf_counter()

    def asked(self, upcoming: int, in_turn: InTurn) -> None:
        """An item was asked for, and its slot is ``upcoming``; what gives it and those after it, lane by
        lane, is told if need be."""
        if perf_counter() - self._given < AT_WORK:
            self._times = 0
            return
        self._times += 1
        first = max(self._until, upcoming)
        if self._times < TIMES or first - upcoming > self._least:
            return
        self._until = upcoming + self._stride * MOST
        self._pool.first(partial(make_all, range(first, self._until, self._stride), in_turn))


def make_all(slots: range, in_turn: InTurn) -> None:
    """Make the items of some slots, where they wait for that, but for those that have been taken in the
    meantime. Items are looked for while others are taken: one too many may be made early."""
    upcoming, lanes = in_turn()
    for slot in slots:
        turn, place = divmod((slot - upcoming) // slots.step, len(lanes))
        found = lanes[place].upcoming(turn) if turn >= 0 else None
        if found is not None:
            items, k = found
            items[k]
