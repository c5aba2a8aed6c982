"""Which pass is next, agreed by all processes that iterate a pipeline.

A plain ``DataLoader`` starts workers and calls nothing in the parent, so the parent cannot count
passes. It and its workers share these numbers, in shared memory from the first fork or spawn on, and
the first worker of a pass claims it for all. Ranks that are forked or spawned count for themselves:

    upcoming    the number of the next pass
    loads       how many states were loaded
    loaded      the load that the next pass starts from: 0 for none, else ``2 * loads + within``
                (``within``: 1 for a state from within an epoch)
    named       -1, or the epoch that ``set_epoch`` named for the next pass
    offset      a number given to ``set_epoch`` plus this is the pass's number
    elsewhere   1 if workers or a ``Loader`` began the last pass, else 0
    claims      how many passes workers claimed; the last 64 of them are kept
    profile     the number of the profile that is taken, or 0

A claim takes ``upcoming`` and ``loaded``, and leaves ``upcoming + 1`` (or the fixed number), 0 and -1.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from ctypes import Structure, addressof, c_int64, memmove, sizeof
from multiprocessing import context, sharedctypes
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, TypeAlias

from trainpipes._internal.callers import reading_worker
from trainpipes._internal.locks import ForkLock, Living, ProcessLock
from trainpipes.errors import ConfigError

#: What all workers of a pass have in common, and no others: the base seed, the number of the first process,
#: and how often each was iterated.
Shared: TypeAlias = tuple[int, int, int]

#: Passes that may be at hand at a time.
_REMEMBERED = 64


class _Claim(Structure):
    """A pass that a worker has taken, in shared memory."""

    _fields_: ClassVar = [("shared", c_int64 * 3), ("number", c_int64), ("load", c_int64)]


class _Numbers(Structure):
    """The numbers that processes share, and the last passes claimed."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("upcoming", "loaded", "loads", "offset", "named")),
        *((name, c_int64) for name in ("elsewhere", "claims", "profile")),
        ("claimed", _Claim * _REMEMBERED),
    ]


# Where the first memory is shared while a process is spawned, its pickler exists already, and would copy it.
ForkingPickler.register(_Numbers, sharedctypes.reduce_ctype)  # type: ignore[attr-defined]


#: One for all pipelines: held for microseconds.
_lock = ProcessLock()
_parting = ForkLock()
_counters: Living[EpochCounter] = Living()


def _before_fork() -> None:
    try:
        _lock.share()
        for counter in list(_counters):
            counter.share()
    except OSError:  # without shared memory there are no workers
        pass


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def shared_by_workers(info: Any, iterated: int) -> Shared:
    """What all workers of this pass have in common, and no others.

    The base seed may repeat, so the number of the first process is added, by its name: "SpawnProcess-1:3".
    """
    number = re.search(r"\d+$", multiprocessing.current_process().name)
    first = 0 if number is None else int(number[0]) - info.id
    return info.seed - info.id, first, iterated


class EpochCounter:
    """The next pass's number and start, and the last passes that workers claimed. Forked and spawned
    workers share it; other processes, such as ranks, go on from where it stood when they were started; a
    plain pickle is a copy.

    Args:
        upcoming: the next pass's number.
        fixed: the number of every pass that starts from no load; None where passes follow each other.
    """

    def __init__(self, upcoming: int = 0, fixed: int | None = None) -> None:
        self.fixed = fixed
        self._now: Any = _Numbers()
        self._now.upcoming, self._now.named = upcoming, -1
        self._is_shared = False
        self._process = os.getpid()  # for which it counts
        self._stood = b""  # the numbers as a process was last started
        self._lock: Any = _lock
        _counters.add(self)

    @property
    def now(self) -> Any:
        """The numbers; this process's own, if another one started it for other work than a worker's."""
        if self._process != os.getpid():
            with _parting:
                if self._process != os.getpid() and reading_worker() is None:
                    numbers = _Numbers()
                    memmove(addressof(numbers), self._stood or bytes(self._now), sizeof(_Numbers))
                    numbers.profile = 0
                    self._now, self._is_shared, self._lock = numbers, False, _lock
                self._process = os.getpid()
        return self._now

    def share(self) -> None:
        """With a process that is started next."""
        now = self.now
        with self._lock:
            self._stood = bytes(now)
            if not self._is_shared:
                self._now, self._is_shared = sharedctypes.RawValue(_Numbers), True
                memmove(addressof(self._now), self._stood, sizeof(_Numbers))

    def after(self, number: int) -> int:
        return number + 1 if self.fixed is None else self.fixed

    def profile(self) -> int:
        return int(self.now.profile)

    def begin_here(self) -> None:
        self.now.elsewhere = 0

    def load(self, epoch: int, within: bool) -> int:
        """Let the next pass start from a loaded position, ``within`` an epoch or not. Returns this
        load's number.
        """
        with self._lock:
            now = self.now
            now.loads += 1
            now.upcoming = epoch
            now.loaded = 2 * now.loads + within
            now.offset = now.elsewhere = 0
            return int(now.loaded)

    def next_pass(self) -> tuple[int, int]:
        """Number and load that ``claim`` would give."""
        with self._lock:
            return int(self.now.upcoming), int(self.now.loaded)

    def set_epoch(self, epoch: int) -> None:
        """Name the next pass ``epoch``. A loaded position stays."""
        with self._lock:
            now = self.now
            if not now.loaded:
                if epoch + now.offset < 0:
                    raise ConfigError(
                        f"set_epoch(epoch): in the state that was loaded, epoch {-now.offset} is "
                        f"the first one, got {epoch}; load a state of an earlier epoch"
                    )
                now.upcoming = epoch + now.offset
            now.named = epoch

    def claim(self, loaded: tuple[int, int] | None = None) -> tuple[int, int]:
        """The next pass's number and load; ``loaded`` where an iterator has its own."""
        with self._lock:
            self.now.elsewhere = 0
            if loaded is not None:
                if self.now.loaded not in (0, loaded[1]):
                    return loaded
                self.now.upcoming = loaded[0]
            return self._claim()

    def begin_in_loader(self, number: int, load: int) -> None:
        """A ``Loader`` begins a pass, from ``load`` if that is of this pipeline."""
        with self._lock:
            now = self.now
            if now.loaded in (0, load):
                now.loaded, now.elsewhere = 0, 1
                now.upcoming = max(now.upcoming, number + 1)

    def join(self, shared: Shared) -> tuple[int, int]:
        with self._lock:
            claim = self._find(shared) or self._enter(shared, *self._claim())
            return int(claim.number), int(claim.load)

    def set_number(self, shared: Shared, number: int) -> None:
        with self._lock:
            now = self.now
            claim = self._find(shared) or self._enter(shared, -1, 0)
            if claim.number != number:
                claim.number = number
                now.upcoming, now.offset = number, 0
                named = now.named
                self._claim()
                now.named = named  # torchdata may drop this pass and begin the next

    def go_on(self, number: int, shared: Shared | None) -> None:
        """A pass had nothing left: in all its workers it is ``number`` now."""
        with self._lock:
            now = self.now
            claim = None if shared is None else self._find(shared)
            if claim is not None:
                if claim.number == number:
                    return
                claim.number = number
            if not now.loaded and self.fixed is None:
                now.offset += 1
                now.upcoming = max(now.upcoming, number + 1)

    def _claim(self) -> tuple[int, int]:
        now = self.now
        number, load = int(now.upcoming), int(now.loaded)
        if now.named >= 0:
            now.offset = number - now.named
        now.upcoming, now.loaded, now.named = self.after(number), 0, -1
        return number, load

    def _enter(self, shared: Shared, number: int, load: int) -> Any:
        now = self.now
        claim = now.claimed[now.claims % _REMEMBERED]
        claim.shared[:], claim.number, claim.load = shared, number, load
        now.claims += 1
        now.elsewhere = 1
        return claim

    def _find(self, shared: Shared) -> Any:
        known = self.now.claimed[: self.now.claims]
        return next((claim for claim in known if tuple(claim.shared) == shared), None)

    def __getstate__(self) -> dict[str, Any]:
        if context.get_spawning_popen() is None:
            return {"fixed": self.fixed, "stands": bytes(self.now)}
        self.share()
        # Windows has no other lock that processes share.
        if sys.platform == "win32" and self._lock is _lock:
            self._lock = multiprocessing.get_context("spawn").Lock()
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "stands" in state:
            self.__init__(fixed=state["fixed"])  # type: ignore[misc]
            memmove(addressof(self._now), state["stands"], sizeof(_Numbers))
            self._now.profile = 0  # a copy's workers report to nobody
        else:
            vars(self).update(state)
            _counters.add(self)
