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
from ctypes import Structure, addressof, c_int64, memmove, sizeof
from multiprocessing import context, sharedctypes
from typing import Any, ClassVar, TypeAlias

from torch.utils.data._utils.worker import WorkerInfo

from trainpipes.errors import ConfigError

__all__ = ["PassCounter", "Shared", "shared_by_workers"]

#: What all workers of one pass have in common, and no others: the base seed, the loader's mark, and how
#: often each was iterated.
Shared: TypeAlias = tuple[int, int, int]

#: Passes that may be at hand at a time.
_REMEMBERED = 64


class _Claim(Structure):
    """A pass that workers claimed."""

    _fields_: ClassVar = [
        ("shared", c_int64 * 3),  # what they have in common
        ("number", c_int64),
        ("load", c_int64),  # that it starts from
    ]


class _Numbers(Structure):
    """What all copies of a pipeline share."""

    _fields_: ClassVar = [
        ("upcoming", c_int64),  # the next pass's number
        ("loaded", c_int64),  # the load that the next pass starts from, 0 if from none
        ("loads", c_int64),  # how many there were
        ("offset", c_int64),  # to be added to the number that ``set_epoch`` is given
        ("named", c_int64),  # what ``set_epoch`` was given for the next pass, -1 if nothing
        (
            "elsewhere",
            c_int64,
        ),  # 1 if the last pass to begin was that of workers or of a ``Loader``
        ("claims", c_int64),  # how many passes workers claimed
        ("claimed", _Claim * _REMEMBERED),  # the last ones of them
    ]


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


class PassCounter:
    """The number of the next pass, what it starts from, and the passes that workers claimed last.

    Forked processes share it, and processes that ``multiprocessing`` spawns with it; a copy by
    plain pickling starts where it stands.
    """

    def __init__(self, upcoming: int = 0) -> None:
        self._numbers: Any = sharedctypes.RawValue(_Numbers)
        self._numbers.upcoming, self._numbers.named = upcoming, -1
        self._lock = _lock
        self._spawned = False

    @property
    def upcoming(self) -> int:
        """The number of the next pass."""
        return int(self._numbers.upcoming)

    @property
    def loaded(self) -> int:
        """The load that the next pass starts from, 0 if from none. Odd if from within an epoch."""
        return int(self._numbers.loaded)

    @property
    def elsewhere(self) -> bool:
        """Whether the last pass to begin was that of workers or of a ``Loader``."""
        return bool(self._numbers.elsewhere)

    def here(self) -> None:
        """The next pass to begin is one of this process."""
        self._numbers.elsewhere = 0

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
            numbers.loads += 1
            numbers.upcoming = epoch
            numbers.loaded = 2 * numbers.loads + within
            numbers.offset = 0
            numbers.elsewhere = 0
            return int(numbers.loaded)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be number ``epoch`` in the caller's counting. A loaded position stays, and is
        what the caller calls so."""
        numbers = self._numbers
        with self._lock:
            if not numbers.loaded:
                number = epoch + numbers.offset
                if number < 0:
                    raise ConfigError(
                        f"set_epoch(epoch): the state that was loaded made epoch {-numbers.offset} the "
                        f"first one, got {epoch}; load a state of an earlier epoch"
                    )
                numbers.upcoming = number
            numbers.named = epoch

    def claim(self) -> tuple[int, int]:
        """The next pass's number and what load it starts from, for a process that reads by itself."""
        with self._lock:
            self._numbers.elsewhere = 0
            return self._claim()

    def begin(self, number: int, load: int) -> None:
        """A pass begins at a position of an iterator's own, which it was given by ``load``."""
        with self._lock:
            self._numbers.elsewhere = 0
            if self._numbers.loaded in (0, load):
                self._numbers.upcoming = number
                self._claim()

    def outrun(self, number: int, load: int) -> None:
        """A ``Loader`` over this pipeline begins a pass, from ``load`` if that is one of the pipeline's."""
        numbers = self._numbers
        with self._lock:
            if numbers.loaded in (0, load):
                numbers.loaded = 0
                numbers.upcoming = max(numbers.upcoming, number + 1)
                numbers.elsewhere = 1

    def join(self, shared: Shared) -> tuple[int, int]:
        """The number of a worker's pass, and the load that it starts from."""
        with self._lock:
            found = self._find(shared) or self._enter(shared, *self._claim())
            return int(found.number), int(found.load)

    def settle(self, shared: Shared, number: int) -> None:
        """Say that the pass of these workers is ``number``: a state told one of them."""
        numbers = self._numbers
        with self._lock:
            found = self._find(shared) or self._enter(shared, -1, 0)
            if found.number != number:
                found.number = number
                numbers.upcoming, numbers.offset = number, 0
                named = numbers.named
                self._claim()
                numbers.named = named  # torchdata may drop this pass and begin the one after it

    def go_on(self, number: int, shared: Shared | None) -> None:
        """A pass had nothing left where it started, and is ``number`` now, in all its workers."""
        numbers = self._numbers
        with self._lock:
            found = None if shared is None else self._find(shared)
            if found is not None:
                if found.number == number:
                    return
                found.number = number
            if not numbers.loaded:
                numbers.offset += 1
                numbers.upcoming = max(numbers.upcoming, number + 1)

    def _claim(self) -> tuple[int, int]:
        numbers = self._numbers
        number, load = int(numbers.upcoming), int(numbers.loaded)
        if numbers.named >= 0:
            numbers.offset = number - numbers.named
        numbers.upcoming, numbers.loaded, numbers.named = number + 1, 0, -1
        return number, load

    def _enter(self, shared: Shared, number: int, load: int) -> Any:
        numbers = self._numbers
        found = numbers.claimed[numbers.claims % _REMEMBERED]
        found.shared[:], found.number, found.load = shared, number, load
        numbers.claims += 1
        numbers.elsewhere = 1
        return found

    def _find(self, shared: Shared) -> Any:
        known = self._numbers.claimed[: self._numbers.claims]
        return next((found for found in known if tuple(found.shared) == shared), None)

    def __getstate__(self) -> dict[str, Any]:
        if context.get_spawning_popen() is None:
            return {"stands": bytes(self._numbers)}
        if not self._spawned:
            self._spawned = True
            self._lock = multiprocessing.get_context("spawn").Lock()
        return {"numbers": self._numbers, "lock": self._lock}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "stands" in state:
            self.__init__()  # type: ignore[misc]
            memmove(addressof(self._numbers), state["stands"], sizeof(_Numbers))
        else:
            self._numbers, self._lock = state["numbers"], state["lock"]
            self._spawned = True
