"""Micro-batches that a run leaves out: those of ``Loader(skip_batches=[...])``.

With S shards, a batch that is named is left out with the S - 1 after it: one of each shard. So each rank
has as many fewer, on any number of ranks, all stay in step, and every micro-batch after them goes to the
rank that would have had it. Fewer than S cannot be left out of one sequence for all numbers of ranks: those
after them would belong to other ranks.

What is delivered is numbered without them: a state's m, and what the engine asks for. ``number`` leads from
there to the number in the whole sequence, in which a batch is named. A state keeps the list beside the
pipeline's identity, under "skip_batches": pairs of epoch and number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from trainpipes._internal.shown import shown
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, StateError
from trainpipes.state.cursor import is_count

if TYPE_CHECKING:
    from trainpipes.state.format import Position

__all__ = [
    "KEY",
    "Batches",
    "LeftOutBatches",
    "checked_batches",
    "kept_batches",
    "merged_batches",
    "reached",
]

#: Where the list stands among a state's notes.
KEY = "skip_batches"

#: Epoch and number of batches, sorted.
Batches: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LeftOutBatches:
    """What one pass leaves out.

    Args:
        starts: the batches from which on, ascending; none is among those left out with the one before.
        length: S, how many from each.

    >>> left_out = LeftOutBatches((5,), 4)
    >>> [left_out.number(m) for m in range(7)]
    [0, 1, 2, 3, 4, 9, 10]
    """

    starts: tuple[int, ...] = ()
    length: int = 0

    @staticmethod
    def of(position: Position) -> LeftOutBatches:
        """Those of a position's pass."""
        starts: list[int] = []
        for epoch, m in kept_batches(position.notes):
            within = starts and m < starts[-1] + position.num_shards
            if epoch == position.epoch and not within:
                starts.append(m)
        return LeftOutBatches(tuple(starts), position.num_shards)

    def times(self, m: int) -> int:
        """How many of each shard are left out before the delivered micro-batch ``m``."""
        return sum(1 for n, start in enumerate(self.starts) if start - n * self.length <= m)

    def number(self, m: int) -> int:
        """The number in the whole sequence of the delivered micro-batch ``m``."""
        return m + self.times(m) * self.length

    def numbers(self, ms: IntArray) -> IntArray:
        """``number`` of several, ascending, int64."""
        edges = np.array(self.starts, dtype=np.int64)
        edges -= np.arange(len(edges)) * self.length
        return ms + np.searchsorted(edges, ms, side="right") * self.length

    def below(self, count: int) -> int:
        """How many of the first ``count`` of the whole sequence are left out."""
        return sum(max(0, min(self.length, count - start)) for start in self.starts)

    def of_shard(self, shard: int, delivered: int) -> int:
        """How many of a shard are left out before the last one that it delivered."""
        return self.times(shard + (delivered - 1) * self.length) if delivered else 0


def checked_batches(given: Iterable[Any]) -> Batches:
    """``skip_batches`` as a user gives it.

    Raises:
        ConfigError: it is no list of numbers, or of pairs of epoch and number.
    """
    rule = (
        "Loader(skip_batches) is a list of numbers m of batches, or of pairs (epoch, m), both from 0; a "
        "number alone is of epoch 0"
    )
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ConfigError(f"{rule}; got {shown(given)}")
    found = set()
    for one in given:
        pair = tuple(one) if isinstance(one, Sequence) and not isinstance(one, str) else (0, one)
        if len(pair) != 2 or not all(map(is_count, pair)):
            raise ConfigError(f"{rule}; got {shown(one)}")
        found.add(pair)
    return tuple(sorted(found))


def kept_batches(notes: dict[str, Any]) -> Batches:
    """Those of a state's notes.

    Raises:
        StateError: they are damaged.
    """
    found = notes.get(KEY, [])
    good = isinstance(found, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(is_count, pair)) for pair in found
    )
    if not good or found != sorted(found):
        raise StateError(f"{KEY}: damaged, got {shown(found)}; load the state as it was saved")
    return tuple((epoch, m) for epoch, m in found)


def reached(position: Position) -> tuple[int, int]:
    """Epoch and number of the first batch of the whole sequence that is not behind a position."""
    left_out, m = LeftOutBatches.of(position), position.m
    return position.epoch, left_out.number(m - 1) + 1 if m else 0


def merged_batches(position: Position, own: Batches) -> dict[str, Any]:
    """A position's notes, with batches of one's own that are yet to come there."""
    if not own:
        return position.notes
    coming = {pair for pair in own if pair >= reached(position)}
    found = sorted(coming.union(kept_batches(position.notes)))
    return {**position.notes, KEY: [list(pair) for pair in found]} if found else position.notes
