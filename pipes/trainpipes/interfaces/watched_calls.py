"""What is watched while a stage's function is called. In a worker process: which rows and stage are at
work, so that its parent knows where it died, and the rows at which workers died before. In any: whether
the function draws from global generators.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch

from trainpipes._internal.messages import warn_once

T = TypeVar("T")

#: In place of the number of a row, where none is at work.
NO_ROW = -1


class Place(NamedTuple):
    """What a worker is at: a row, or the first of some rows or batches that a stage gets together."""

    row: int = NO_ROW
    stage: int = 0
    rows: int = 1


class Known(Enum):
    #: Workers died as a stage had these rows: it gets each half of them by itself.
    HALVES = 1


@dataclass(eq=False)
class AtWork:
    """What this process does for its parent.

    Args:
        place: shared int64 ``[3]``: the ``Place`` at work.
        failed: stand-ins for the results of rows at which workers died.
        owner: the stage, or the call, whose rows are noted: not those of a pipeline that it iterates.
    """

    place: Any
    failed: Mapping[Place, Any] = field(default_factory=dict)
    owner: object = None

    def at(self, row: int) -> Any:
        """Note the row at work; returns the stand-in for its result, or None."""
        self.place[0], self.place[2] = row, 1
        return self.failed.get(Place(row, self.place[1])) if self.failed else None

    def begin(self, row: int, stage: int, count: int, owner: object) -> Any:
        """Note a stage, which owns what is noted from now on, and the rows that it gets together."""
        self.owner = owner
        self.place[:] = row, stage, count
        return self.failed.get(Place(row, stage, count)) if self.failed else None

    def noting(self, items: Iterable[T], rows: Sequence[int]) -> Iterator[T]:
        """Items, of which the row of each is noted when it is taken."""
        for item, row in zip(items, rows, strict=True):
            self.at(row)
            yield item


_current: AtWork | None = None


def current() -> AtWork | None:
    """What is at work here; None in a process that works for itself."""
    return _current


def at_work_of(owner: object) -> AtWork | None:
    """What is at work here, if it works for ``owner``."""
    return _current if _current is not None and _current.owner is owner else None


def set_current(at_work: AtWork | None) -> None:
    global _current
    _current = at_work


#: Calls of a function that are looked at, about 0.2 ms each. In other threads than the main thread only the
#: first two: the loop that trains waits for these, and may draw during later ones.
CALLS, CALLS_ASIDE = 16, 2
Call: TypeAlias = "Callable[..., Any]"

#: Calls of each function that have been looked at in this process.
_looked: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
#: By the stage, the warning about a function that was seen to draw.
_seen: dict[str, str] = {}


def seen_draws(stages: Sequence[object]) -> str:
    """What this process knows of stages that draw from global generators; "" if nothing."""
    return "; ".join(_seen[str(stage)] for stage in stages if str(stage) in _seen)


@dataclass(eq=False)
class DrawWatch:
    """Watches the global generators in a function's first calls; warns once if it draws, ``at_once`` or in
    two of them.
    """

    fn: Any
    said: str
    cure: str
    at_once: bool = False

    def __post_init__(self) -> None:
        self._calls = CALLS if self.fn is None else 0
        self._moved: set[str] = set()  # generators that moved during a call
        self.reports = True
        self.found = ""

    def around(self, fn: Call) -> Call:
        """The function, whose first calls are looked at."""
        with suppress(TypeError):  # it has no hash, or no weak references
            self._calls = max(self._calls, _looked.get(self.fn, 0))
        return fn if self._calls >= CALLS else self._watched(fn)

    def _watched(self, fn: Call) -> Call:
        def watched(*arguments: Any) -> Any:
            in_main = threading.current_thread() is threading.main_thread()
            if self._calls >= (CALLS if in_main else CALLS_ASIDE):
                return fn(*arguments)
            modules, before = len(sys.modules), _states()
            returned = fn(*arguments)
            after = _states()
            self._calls += 1
            with suppress(TypeError):
                _looked[self.fn] = self._calls
            moved = [name for name in before if _drew(before[name], after[name])]
            if modules != len(sys.modules):  # which may draw as they are imported
                return returned
            # A first call may set the seed that was set already: that looks like a draw.
            again = [name for name in moved if self.at_once or name in self._moved]
            self._moved.update(moved)
            if again:
                self.hear(f"{' and '.join(again)} global generator{'s' * (len(again) > 1)}")
            return returned

        return watched

    def hear(self, generator: str) -> None:
        """Note a generator that the function drew from, here or elsewhere."""
        if not generator or self.found:
            return
        self._calls, self.found = CALLS, generator
        if self.reports:
            _seen[self.said] = (
                f"{self.said} draws from {generator}, which no state holds: after a resume it draws other "
                f"numbers; {self.cure}"
            )
            warn_once(_seen[self.said])


def _states() -> dict[str, tuple[Any, Any]]:
    """The seeded part and the position of each generator. NumPy's and Python's set the first anew after
    624 numbers, too: a call that draws more looks like a call that sets a seed.
    """
    numpys = np.random.get_state(legacy=False)
    inner = numpys["state"]
    _, (*numbers, place), spare = random.getstate()
    return {
        "NumPy's": (bytes(inner.pop("key", b"")), repr(numpys)),
        "Python's": (numbers, (place, spare)),
        "torch's": (torch.initial_seed(), torch.get_rng_state().numpy().tobytes()),
    }


def _drew(before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
    """Whether numbers were drawn between two states without setting a seed."""
    return bool(before[0] == after[0] and before[1] != after[1])
