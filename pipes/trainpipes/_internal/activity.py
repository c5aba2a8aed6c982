"""What each thread is doing, for ``trainpipes.profile``: a slot for each thread, set where work is called;
and the thread that looks at the slots 20 times a second, at times that the system counts of threads, and
at files that the workers of a plain ``DataLoader`` write for the process that trains.

While nothing is profiled, no slot is set. A slot adds up its own times, since a thread that samples
wakes only when another thread gives the GIL away: it would not see work that holds it for less than 5 ms.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import gettempdir
from time import perf_counter, thread_time
from typing import Any, TypeVar

from trainpipes._internal.locks import Flag, ForkLock, start

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


def label_here() -> Any:
    """What this thread is doing; None while nothing is profiled."""
    return _own.slot.what if is_on else None


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


#: Seconds between two samples, and between two looks at the system's times.
TICK, SYSTEM = 0.05, 1.0
#: Seconds after its time that a sample is late: another thread holds the GIL, or the cores are taken.
LATE = 1.5e-3
#: Threads by the starts of their names: those that feed the functions of ``map``, those that wait for
#: servers, and those of the pipeline. Others iterate.
GROUPS = {"trainpipes-map": "map", "trainpipes-requests": "requests", "trainpipes-": "threads"}
ITERATES = "iterates"


@dataclass
class Counts:
    """What the threads of a process did in some seconds. Adds up.

    Attributes:
        times: seconds, and seconds of CPU, by group of threads and by activity.
        threads: most threads of a group at the same time.
        samples, late: samples, and those that came late.
        cpu: seconds of CPU of the whole process.
        queued: seconds that its threads had work and no core.
        totals: requests, bytes and hits of caches.
    """

    seconds: float = 0.0
    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)
    samples: int = 0
    late: int = 0
    cpu: float = 0.0
    queued: float = 0.0
    totals: dict[str, int] = field(default_factory=dict)

    def add(self, more: Counts) -> None:
        for group, whats in more.times.items():
            times = self.times.setdefault(group, {})
            for label, (seconds, cpu) in whats.items():
                sums = times.setdefault(label, [0.0, 0.0])
                sums[0] += seconds
                sums[1] += cpu
        for group, number in more.threads.items():
            self.threads[group] = max(number, self.threads.get(group, 0))
        for name in ("seconds", "samples", "late", "cpu", "queued"):
            setattr(self, name, getattr(self, name) + getattr(more, name))
        for name, number in more.totals.items():
            self.totals[name] = self.totals.get(name, 0) + number

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def group_of(thread: str) -> str:
    return next((group for start, group in GROUPS.items() if thread.startswith(start)), ITERATES)


class ActivitySampler(threading.Thread):
    """Sets ``activity`` to work, and samples until ``stop``. ``every``: called after each sample."""

    def __init__(self, every: Callable[[float], None] | None = None) -> None:
        super().__init__(name="profile", daemon=True)
        self._every = every
        self._over = Flag()
        self._lock = threading.Lock()
        self._labels: dict[Any, str] = {}
        #: Of each slot, the times taken so far; of each thread, the time that it had waited for a core.
        self._taken: dict[Slot, dict[Any, tuple[float, float]]] = {}
        self._waits: dict[int, float] = {}
        self._samples = self._late = 0
        self._queued = 0.0
        self._totals: Counter[str] = Counter()

    def begin(self) -> None:
        self._since, self._cpu = perf_counter(), time.process_time()
        self._totals = totals.copy()
        for slot in slots:
            slot.what, slot.times = None, {}
        self._look_at_system()
        self._queued = 0.0
        global is_on
        is_on = True
        start(self)

    def stop(self) -> None:
        global is_on
        is_on = False
        self._over.set()
        if threading.current_thread() is not self and self.ident is not None:
            self.join(1.0)

    def run(self) -> None:
        due, looked = perf_counter() + TICK, 0.0
        while not self._over.wait(max(0.0, due - perf_counter())):
            now = perf_counter()
            self._samples += 1
            self._late += now - due > LATE
            due = max(due + TICK, now + TICK / 4)
            if now - looked > SYSTEM:
                self._look_at_system()
                looked = now
            if self._every is not None:
                self._every(now)

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def take(self) -> Counts:
        """The counts since the last call."""
        with self._lock:
            now, cpu = perf_counter(), time.process_time()
            counts = Counts(now - self._since, samples=self._samples, late=self._late)
            counts.cpu, counts.queued = cpu - self._cpu, self._queued
            total = totals.copy()
            counts.totals = {n: v - self._totals[n] for n, v in total.items()}
            self._since, self._cpu, self._totals = now, cpu, total
            self._samples = self._late = 0
            self._queued = 0.0
            for slot in list(slots):
                group = group_of(slot.thread.name)
                did = self._take(slot, now, counts.times.setdefault(group, {}))
                counts.threads[group] = counts.threads.get(group, 0) + (
                    did and slot.thread.is_alive()
                )
                if not slot.thread.is_alive():
                    self._taken.pop(slot, None)
                    slots.remove(slot)
            counts.times = {group: times for group, times in counts.times.items() if times}
            return counts

    def _take(self, slot: Slot, now: float, into: dict[str, list[float]]) -> bool:
        """Add a thread's work since the last time; whether it did anything."""
        did = False
        taken = self._taken.setdefault(slot, {})
        label, since = slot.what, slot.since
        times = {key: (sums[0], sums[1]) for key, sums in list(slot.times.items())}
        if label is not None:  # so far
            seconds, cpu = times.get(label, (0.0, 0.0))
            times[label] = seconds + max(0.0, now - since), cpu
        for key, (seconds, cpu) in times.items():
            before = taken.get(key, (0.0, 0.0))
            sums = into.setdefault(self._label(key), [0.0, 0.0])
            sums[0] += seconds - before[0]
            sums[1] += cpu - before[1]
            did = did or seconds > before[0]
            taken[key] = seconds, cpu
        return did

    def _label(self, label: Any) -> str:
        if label not in self._labels:
            self._labels[label] = str(label)
        return self._labels[label]

    def _look_at_system(self) -> None:
        """Seconds that threads waited for a core, on Linux."""
        if sys.platform != "linux":
            return
        for slot in list(slots):
            if group_of(slot.thread.name) == "requests":  # which need no core
                continue
            with suppress(OSError, ValueError, IndexError):  # the thread is gone
                text = _read(f"/proc/self/task/{slot.tid}/schedstat")
                waited = int(text.split()[1]) / 1e9
                self._queued += max(0.0, waited - self._waits.get(slot.tid, waited))
                self._waits[slot.tid] = waited


def switched(sampler: ActivitySampler | None, on: bool) -> ActivitySampler | None:
    """The sampler of a worker, which is there while it is on."""
    if sampler is None and on:
        sampler = ActivitySampler()
        sampler.begin()
    elif sampler is not None and not on:
        sampler.stop()
        sampler = None
    return sampler


def _read(path: str) -> str:
    number = os.open(path, os.O_RDONLY)
    try:
        return os.read(number, 4096).decode()
    finally:
        os.close(number)


#: Seconds between two reports.
EVERY = 0.5


def folder_of(number: int) -> Path:
    """The folder of a profile, which the process that trains makes and removes."""
    return Path(gettempdir(), f"trainpipes-profile-{number:x}")


def reported(folder: Path) -> Iterator[Counts]:
    """The counts that workers have written since the last time."""
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError):
            counts = json.loads(path.read_bytes())
            path.unlink()
            yield Counts(**counts)


class _Report:
    """Samples this process and writes, while the profile of this number is taken."""

    def __init__(self, asked: Callable[[], int]) -> None:
        self._asked, self._number = asked, asked()
        self._written, self._due = 0, 0.0
        self.sampler = ActivitySampler(self._tick)
        self.sampler.begin()

    def _tick(self, now: float) -> None:
        if self._asked() != self._number:
            self.sampler.stop()
        elif now > self._due:
            self._due = now + EVERY
            self.write()

    def write(self) -> None:
        counts = json.dumps(self.sampler.take().to_dict())
        path = folder_of(self._number) / f"{os.getpid()}-{self._written}.part"
        self._written += 1
        with suppress(OSError):  # the profile is over
            path.write_text(counts)
            path.rename(path.with_suffix(".json"))


_report: _Report | None = None


def begin_report(asked: Callable[[], int]) -> None:
    """A worker begins a pass. ``asked`` gives the number of the profile that is taken, or 0."""
    global _report
    if asked() and (_report is None or _report.sampler.is_over):
        _report = _Report(asked)


def end_report() -> None:
    """A worker ends a pass: its times are there before the process that trains knows."""
    global _report
    if _report is not None:
        _report.sampler.stop()
        _report.write()
        _report = None
