"""Rows a second."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from benchmarks.contestants.contestant import Contestant
from benchmarks.processes import cpu
from benchmarks.settings import Spec

__all__ = ["Make", "epochs", "race", "rows_of"]

#: Makes the contestant anew.
Make = Callable[[], Contestant]


def rows_of(batch: Any) -> int:
    """Rows of a padded batch, of a table, of a list."""
    return len(batch["input_ids"]) if isinstance(batch, dict) else len(batch)


def epochs(contestant: Contestant) -> Iterator[Any]:
    """Its batches, epoch after epoch; held by nobody but who takes them."""
    while True:
        batches = iter(contestant.epoch())
        first = list(islice(batches, 1))
        if not first:
            return
        yield first.pop()
        yield from batches


def race(make: Make, spec: Spec, every: int, warm: int = 0) -> dict[str, Any]:
    """Rows a second from the first batch on, how long that took, and processor time a row.

    Lasts an epoch and ``settings.seconds`` at least; of a peer that is slower, ``settings.most`` seconds.
    A row buffer gives rows in bursts, so the clock stops only where a multiple of ``every`` rows has been
    delivered and the row after them has come: all that was read for them is counted, and no more.

    Args:
        make: makes the contestant, which counts as part of its first batch.
        spec: the sizes, and whether it is a peer.
        every: rows of a burst.
        warm: rows before the clock starts.
    """
    start = time.perf_counter()
    contestant = make()
    batches = epochs(contestant)
    rows = rows_of(next(batches))
    first = time.perf_counter() - start
    while warm > 0:
        warm -= rows
        rows = rows_of(next(batches))
    settings = spec.settings
    least = settings.seconds
    most = settings.most if spec.peer else math.inf
    epoch = contestant.data.made["rows"]
    delivered, until = 0, every
    now = begun = time.perf_counter()
    worked = cpu(os.getpid())
    for batch in batches:
        delivered += rows
        rows = rows_of(batch)
        if delivered >= until:
            now = time.perf_counter()
            if now - begun >= (least if delivered >= epoch else most):
                break
            until += every
    else:
        now = time.perf_counter()
    worked = cpu(os.getpid()) - worked
    return {"rate": delivered / (now - begun), "first": first, "cpu": worked / delivered * 1e6}
