"""What each thread is doing, for ``trainpipes.profile``: a slot for each thread, set where work is called.

While nothing is profiled, no slot is set. A slot adds up its own times, since a thread that samples
wakes only when another thread gives the GIL away: it would not see work that holds it for less than 5 ms.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import perf_counter, thread_time
from typing import Any, TypeVar

from trainpipes._internal.locks import ForkLock

T = TypeVar("T")

#: What a thread is doing where it waits: for bytes of a server, or for other threads and processes. And work
#: of no stage: Python objects made of rows.
BYTES, TURN = "waiting for bytes", "waiting for its turn"
UNROLL = "rows to Python"
WAITING = (BYTES, TURN)
#: Seconds of work from which on its CPU time is read, which costs 1 us.
LONG = 200e-6
#: Of batches that are made when they are taken, every so many is timed.
TIMED = 8

#: Whether slots are set; the function that looks at batches.
is_on = False
observer: Callable[[Any, int], None] | None = None
#: Of this process since it began: requests to servers, bytes of their answers, hits of caches.
totals: Counter[str] = Counter()
_counting = ForkLock()
#: What workers of a ``Loader`` counted, until it is taken.
from_workers: list[Any] = []


class Slot:
    """What a thread is doing: a stage, or a text; None between. ``times``: of each, seconds that it took,
    and seconds of CPU.
    """

    __slots__ = ("cpu", "since", "thread", "tid", "times", "what")

    def __init__(self) -> None:
        self.thread, self.tid = threading.current_thread(), threading.get_native_id()
        self.what: Any = None
        self.times: dict[Any, list[float]] = {}
        self.since, self.cpu = perf_counter(), thread_time()

    def to(self, label: Any) -> Any:
        now, before = perf_counter(), self.what
        lasted = now - self.since
        self.what, self.since = label, now
        if before is None:
            if lasted > LONG:
                self.cpu = thread_time()
            return before
        sums = self.times.get(before) or self.times.setdefault(before, [0.0, 0.0])
        sums[0] += lasted
        if lasted > LONG:
            cpu = thread_time()
            sums[1] += cpu - self.cpu
            self.cpu = cpu
        return before


class _Own(threading.local):
    def __init__(self) -> None:
        self.slot = Slot()
        slots.append(self.slot)


#: Of all threads that did something while it was on.
slots: list[Slot] = []
_own = _Own()


class doing:
    """While the block runs, this thread is at ``what``."""

    __slots__ = ("_before", "_slot", "_what")

    def __init__(self, label: Any) -> None:
        self._what = label

    def __enter__(self) -> None:
        self._slot: Slot | None = None
        if is_on:
            self._slot = slot = _own.slot
            self._before = slot.to(self._what)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._slot is not None:
            self._slot.to(self._before)


class each(Iterator[T]):
    """Runs, each made at ``what``. No run that was given is held: its memory is free for the next."""

    __slots__ = ("_runs", "_what")

    def __init__(self, label: Any, runs: Iterator[T]) -> None:
        self._what, self._runs = label, runs

    def __next__(self) -> T:
        if not is_on:
            return next(self._runs)
        with doing(self._what):
            return next(self._runs)


def within(make: Callable[[int], T]) -> Callable[[int], T]:
    """A function that is called later, for the work of this moment."""
    if not is_on or (label := _own.slot.what) is None:
        return make

    def timed(k: int) -> T:
        if next(_turns) % TIMED or not is_on or (slot := _own.slot).what is label:
            return make(k)
        began = perf_counter()
        result = make(k)
        sums = slot.times.setdefault(label, [0.0, 0.0])
        lasted = TIMED * (perf_counter() - began)
        slot.times[label] = [sums[0] + lasted, sums[1] + lasted]
        return result

    return timed


_turns = itertools.count()


def look_at(items: Any, k: int) -> None:
    """Show an item of a run to the function that looks at batches."""
    if observer is not None:
        with suppress(Exception):  # raised again where the item is taken
            observer(items, k)


def count(name: str, amount: int = 1) -> None:
    with _counting:
        totals[name] += amount


def _forget() -> None:
    """In a fork: the threads stayed behind."""
    global is_on, observer, _own
    is_on, observer = False, None
    slots.clear()
    from_workers.clear()
    _own = _Own()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
