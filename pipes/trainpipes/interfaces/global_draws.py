from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch

from trainpipes._internal.messages import warn_once

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
    """Watches the global generators in a function's first calls; warns once if it draws."""

    fn: Any
    said: str
    cure: str

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
            again = [name for name in moved if name in self._moved]
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
