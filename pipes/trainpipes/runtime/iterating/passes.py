"""Which pass over the data is at hand, agreed by all processes that iterate one pipeline.

A plain ``DataLoader`` forks or spawns its workers at ``iter()`` and calls nothing in the parent,
so the parent cannot count passes; and after a ``break`` workers of two passes may start side by
side. All copies of a pipeline therefore share a few numbers in memory: the workers of one pass
know it by their common base seed and by how often each has been iterated, and the first one to
start claims the next pass for them all.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import context, sharedctypes
from typing import Any

__all__ = ["Passes"]

_REMEMBERED = 8
_FIELDS = 4  # seed, how often iterated, number of the pass, workers that came so far (a bit each)

_first = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
#: One for all pipelines: held for microseconds. A lock reaches forked processes or spawned ones.
_lock: Any = multiprocessing.get_context(_first).Lock()


class Passes:
    """The number of the next pass, and the passes that were claimed last.

    Forked processes share it, and processes that ``multiprocessing`` spawns with it; a copy by
    plain pickling starts at the number that stood here.
    """

    def __init__(self, upcoming: int = 0) -> None:
        self._numbers: Any = sharedctypes.RawArray("q", 1 + _REMEMBERED * _FIELDS)
        self._numbers[0] = upcoming
        self._lock = _lock
        self._spawned = False
        self._forget()

    def _forget(self) -> None:
        for entry in range(_REMEMBERED):
            self._numbers[1 + entry * _FIELDS + 2] = -1

    @property
    def upcoming(self) -> int:
        """The number of the pass that is claimed next."""
        return int(self._numbers[0])

    def rewind(self, upcoming: int) -> None:
        """Set the pass that is claimed next; nobody is iterating now."""
        with self._lock:
            self._numbers[0] = upcoming
            self._forget()

    def claim(self) -> int:
        """The next pass, for a process that reads by itself."""
        with self._lock:
            number = int(self._numbers[0])
            self._numbers[0] = number + 1
            return number

    def join(self, seed: int, iterated: int, worker: int) -> int:
        """The pass of the workers that share ``seed`` and were iterated as often.

        A worker that comes a second time is of a new pass, whose base seed is the same because
        the global seed was set anew.
        """
        bit = 1 << (worker % 62)
        with self._lock:
            entry = self._find(seed, iterated)
            if entry is None or self._numbers[entry + 3] & bit:
                number = int(self._numbers[0])
                self._numbers[0] = number + 1
                entry = 1 + number % _REMEMBERED * _FIELDS
                self._numbers[entry : entry + _FIELDS] = [seed, iterated, number, 0]
            self._numbers[entry + 3] |= bit
            return int(self._numbers[entry + 2])

    def settle(self, seed: int, iterated: int, number: int, worker: int) -> None:
        """Say that the pass of these workers is ``number``: a state told one of them."""
        bit = 1 << (worker % 62)
        with self._lock:
            entry = self._find(seed, iterated)
            if entry is None or self._numbers[entry + 2] != number:
                self._forget()
                entry = 1 + number % _REMEMBERED * _FIELDS
                self._numbers[entry : entry + _FIELDS] = [seed, iterated, number, 0]
            self._numbers[entry + 3] |= bit
            self._numbers[0] = number + 1

    def _find(self, seed: int, iterated: int) -> int | None:
        found = None
        for entry in range(1, 1 + _REMEMBERED * _FIELDS, _FIELDS):
            same = self._numbers[entry] == seed and self._numbers[entry + 1] == iterated
            number = self._numbers[entry + 2]
            if same and number >= 0 and (found is None or number > self._numbers[found + 2]):
                found = entry
        return found

    def __getstate__(self) -> dict[str, Any]:
        if context.get_spawning_popen() is None:
            return {"upcoming": self.upcoming}
        if not self._spawned:
            self._spawned = True
            self._lock = multiprocessing.get_context("spawn").Lock()
        return {"numbers": self._numbers, "lock": self._lock}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "upcoming" in state:
            self.__init__(state["upcoming"])  # type: ignore[misc]
        else:
            self._numbers, self._lock = state["numbers"], state["lock"]
            self._spawned = True
