"""Contestants that run in turn in one process, and how fast one is against another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Turn", "Turns", "against", "in_turn", "rate_of"]


class Turn(NamedTuple):
    """Items a second, and the seconds of this process's processor time that each took."""

    rate: float
    processor: float


#: Those of each contestant, one a repeat.
Turns = Mapping[str, Sequence[Turn]]


def in_turn(contestants: Mapping[str, Callable[[], int]], repeats: int) -> Turns:
    """Runs each so often, in turn; they return how many items they gave. A first run of each, which imports
    and starts workers that are kept, does not count.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    for repeat in range(repeats + 1):
        for name, run in contestants.items():
            start, worked = time.perf_counter(), time.process_time()
            items = run()
            processor = (time.process_time() - worked) / max(1, items)
            if repeat:
                turns[name].append(Turn(items / (time.perf_counter() - start), processor))
    return turns


def rate_of(turns: Turns, name: str) -> float:
    return statistics.median(turn.rate for turn in turns[name])


def against(turns: Turns, name: str, other: str, *, processor: bool = False) -> float:
    """How many times as fast as another; with ``processor`` by the processor time of an item. The median over
    repeats, in each of which both met the same noise.
    """
    pairs = list(zip(turns[name], turns[other], strict=True))
    if processor:
        return statistics.median(theirs.processor / own.processor for own, theirs in pairs)
    return statistics.median(own.rate / theirs.rate for own, theirs in pairs)
