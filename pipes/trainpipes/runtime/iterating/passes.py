"""Which pass over the data is at hand, agreed by all processes that iterate one pipeline.

A plain ``DataLoader`` forks or spawns its workers at ``iter()`` and calls nothing in the parent,
so the parent cannot count passes; and after a ``break`` workers of two passes may start side by
side. All copies of a pipeline therefore share a few numbers in memory: the workers of one pass
know it by what they alone were given and by how often each has been iterated, and the first one to
start claims the next pass for them all.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing import context, sharedctypes
from typing import Any, TypeAlias

from torch.utils.data._utils.worker import WorkerInfo

from trainpipes.errors import ConfigError

__all__ = ["Passes", "Shared", "shared_by_workers"]

#: What all workers of one pass have in common, and no others: the base seed, the loader's mark, and how
#: often each was iterated.
Shared: TypeAlias = tuple[int, int, int]

#: Passes that may be at hand at a time.
_REMEMBERED = 64
#: What is kept of each: what its workers share, its number, and the load that it starts from.
_FIELDS = 5
#: The next pass's number.
_UPCOMING = 0
#: The load that the next pass starts from, 0 if from none.
_LOADED = 1
#: How many loads there were.
_LOADS = 2
#: What is to be added to the number that ``set_epoch`` is given.
_OFFSET = 3
#: What ``set_epoch`` was given for the next pass, -1 if nothing.
_NAMED = 4
#: 1 if the last pass to begin was that of workers or of a ``Loader``.
_ELSEWHERE = 5
#: How many passes workers claimed.
_CLAIMS = 6
_HEAD = 7

_first = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
#: One for all pipelines: held for microseconds. A lock reaches forked processes or spawned ones.
_lock: Any = multiprocessing.get_context(_first).Lock()


def shared_by_workers(info: WorkerInfo, iterated: int) -> Shared:
    """What the workers of a pass have in common, said in one of them.

    Their base seed is not enough: it is the same in two passes if the global seed is set anew before
    each, and a worker of the first that starts late must not be taken for one of the second. The event by
    which a loader tells its workers to stop has a name of its own; where nothing is known of that,
    workers of one loader are processes that were started one after the other.
    """
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "_worker_loop":
        frame = frame.f_back
    try:
        name = frame.f_locals["done_event"]._flag._semlock.name
        mark = int.from_bytes(name.encode()[-8:], "big")
    except (KeyError, AttributeError):
        started: tuple[int, ...] = getattr(multiprocessing.current_process(), "_identity", ())
        mark = started[-1] - info.id if started else 0
    return info.seed - info.id, mark, iterated


class Passes:
    """The number of the next pass, what it starts from, and the passes that workers claimed last.

    Forked processes share it, and processes that ``multiprocessing`` spawns with it; a copy by
    plain pickling starts where it stands.
    """

    def __init__(self, upcoming: int = 0) -> None:
        self._numbers: Any = sharedctypes.RawArray("q", _HEAD + _REMEMBERED * _FIELDS)
        self._numbers[_UPCOMING] = upcoming
        self._numbers[_NAMED] = -1
        self._lock = _lock
        self._spawned = False

    @property
    def upcoming(self) -> int:
        """The number of the next pass."""
        return int(self._numbers[_UPCOMING])

    @property
    def loaded(self) -> int:
        """The load that the next pass starts from, 0 if from none. Odd if from within an epoch."""
        return int(self._numbers[_LOADED])

    @property
    def elsewhere(self) -> bool:
        """Whether the last pass to begin was that of workers or of a ``Loader``."""
        return bool(self._numbers[_ELSEWHERE])

    def here(self) -> None:
        """The next pass to begin is one of this process."""
        self._numbers[_ELSEWHERE] = 0

    def load(self, epoch: int, within: bool) -> int:
        """Let the next pass start from a position in ``epoch`` that was loaded.

        Args:
            epoch: its number.
            within: whether the position is not the epoch's start.

        Returns:
            the number of this load.
        """
        numbers = self._numbers
        with self._lock:
            numbers[_LOADS] += 1
            numbers[_UPCOMING] = epoch
            numbers[_LOADED] = 2 * numbers[_LOADS] + within
            numbers[_OFFSET] = 0
            numbers[_ELSEWHERE] = 0
            return int(numbers[_LOADED])

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be number ``epoch`` in the caller's counting. A loaded position stays, and is
        what the caller calls so."""
        numbers = self._numbers
        with self._lock:
            if not numbers[_LOADED]:
                number = epoch + numbers[_OFFSET]
                if number < 0:
                    raise ConfigError(
                        f"set_epoch(epoch): the state that was loaded made epoch {-numbers[_OFFSET]} the "
                        f"first one, got {epoch}; load a state of an earlier epoch"
                    )
                numbers[_UPCOMING] = number
            numbers[_NAMED] = epoch

    def claim(self) -> tuple[int, int]:
        """The next pass's number and what load it starts from, for a process that reads by itself."""
        with self._lock:
            self._numbers[_ELSEWHERE] = 0
            return self._claim()

    def begin(self, number: int, load: int) -> None:
        """A pass begins at a position of an iterator's own, which it was given by ``load``."""
        with self._lock:
            self._numbers[_ELSEWHERE] = 0
            if self._numbers[_LOADED] in (0, load):
                self._numbers[_UPCOMING] = number
                self._claim()

    def outrun(self, number: int, load: int) -> None:
        """A ``Loader`` over this pipeline begins a pass, from ``load`` if that is one of the pipeline's."""
        numbers = self._numbers
        with self._lock:
            if numbers[_LOADED] in (0, load):
                numbers[_LOADED] = 0
                numbers[_UPCOMING] = max(numbers[_UPCOMING], number + 1)
                numbers[_ELSEWHERE] = 1

    def join(self, shared: Shared) -> tuple[int, int]:
        """The number of a worker's pass, and the load that it starts from."""
        with self._lock:
            entry = self._find(shared)
            if entry is None:
                entry = self._enter(shared, *self._claim())
            return int(self._numbers[entry + 3]), int(self._numbers[entry + 4])

    def settle(self, shared: Shared, number: int) -> None:
        """Say that the pass of these workers is ``number``: a state told one of them."""
        numbers = self._numbers
        with self._lock:
            entry = self._find(shared)
            if entry is None:
                entry = self._enter(shared, -1, 0)
            if numbers[entry + 3] != number:
                numbers[entry + 3] = number
                numbers[_UPCOMING], numbers[_OFFSET] = number, 0
                named = numbers[_NAMED]
                self._claim()
                numbers[_NAMED] = named  # torchdata may drop this pass and begin the one after it

    def go_on(self, number: int, shared: Shared | None) -> None:
        """A pass had nothing left where it started, and is ``number`` now, in all its workers."""
        numbers = self._numbers
        with self._lock:
            entry = None if shared is None else self._find(shared)
            if entry is not None:
                if numbers[entry + 3] == number:
                    return
                numbers[entry + 3] = number
            if not numbers[_LOADED]:
                numbers[_OFFSET] += 1
                numbers[_UPCOMING] = max(numbers[_UPCOMING], number + 1)

    def _claim(self) -> tuple[int, int]:
        numbers = self._numbers
        number, load = int(numbers[_UPCOMING]), int(numbers[_LOADED])
        if numbers[_NAMED] >= 0:
            numbers[_OFFSET] = number - numbers[_NAMED]
        numbers[_UPCOMING], numbers[_LOADED], numbers[_NAMED] = number + 1, 0, -1
        return number, load

    def _enter(self, shared: Shared, number: int, load: int) -> int:
        numbers = self._numbers
        entry: int = _HEAD + numbers[_CLAIMS] % _REMEMBERED * _FIELDS
        numbers[_CLAIMS] += 1
        numbers[_ELSEWHERE] = 1
        numbers[entry : entry + _FIELDS] = [*shared, number, load]
        return entry

    def _find(self, shared: Shared) -> int | None:
        numbers, claims = self._numbers, int(self._numbers[_CLAIMS])
        for claim in reversed(range(max(claims - _REMEMBERED, 0), claims)):
            entry = _HEAD + claim % _REMEMBERED * _FIELDS
            if tuple(numbers[entry : entry + 3]) == shared:
                return entry
        return None

    def __getstate__(self) -> dict[str, Any]:
        if context.get_spawning_popen() is None:
            return {"stands": self._numbers[:]}
        if not self._spawned:
            self._spawned = True
            self._lock = multiprocessing.get_context("spawn").Lock()
        return {"numbers": self._numbers, "lock": self._lock}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "stands" in state:
            self.__init__()  # type: ignore[misc]
            self._numbers[:] = state["stands"]
        else:
            self._numbers, self._lock = state["numbers"], state["lock"]
            self._spawned = True
