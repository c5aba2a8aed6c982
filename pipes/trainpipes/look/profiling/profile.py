"""``profile``: the work of a run's threads, its bottleneck, and changes."""

from __future__ import annotations

import html
import multiprocessing
import os
import secrets
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from torch.utils.data import DataLoader

from trainpipes._internal import activity
from trainpipes._internal.locks import cached_property
from trainpipes._internal.messages import Printed
from trainpipes.engine.iterating.epoch_iterator import EpochIterator
from trainpipes.errors import ConfigError, TrainpipesError
from trainpipes.filesystems.places import write_text
from trainpipes.interfaces.options import instead
from trainpipes.look.order_quality import order_quality
from trainpipes.look.profiling import facts
from trainpipes.look.profiling.page import page, text_lines
from trainpipes.look.profiling.verdict import Verdict, verdict
from trainpipes.look.show import html_of
from trainpipes.look.values import masks_of

__all__ = ["Profile", "profile"]

#: Points of the time series, at most, and seconds between them at first; then twice as many seconds.
MOST_POINTS, FIRST_STEP = 600, 0.2
#: Batches that are looked at: the first so many, then every so many-th.
LOOKED_AT, THEN_ONE_OF = 16, 64
#: Modules of torch's loaders, in whose methods a loop waits for data.
TORCHS = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")
#: The profile that is taken in this process; changed with the lock.
_running: Profile | None = None
_entering = threading.Lock()


def profile(loader: Any) -> Profile:
    """Watch a run, and say what bounds it: ``with profile(loader) as run:`` around the loop.

    The batches stay the same. It costs 2 to 3 % of the time where a batch takes 0.1 ms, less where it takes
    longer, and nothing outside of the block. Print it within the block for what is known so far, or after it.
    Ctrl-C in the block prints it.

    Args:
        loader: the ``Loader``, the pipeline that a trainer was given, or torch's ``DataLoader`` or
            ``StatefulDataLoader`` over it. Its loop may be anybody's, such as ``Trainer``'s.

    Raises:
        ConfigError: it is none of these, or another profile is being taken.

    >>> import trainpipes as tp
    >>> loader = tp.Loader(tp.from_dataset(range(1000)).map(lambda x: x + 1).batch(10))
    >>> with tp.profile(loader) as run:
    ...     batches = list(loader)
    >>> 0 < run.to_dict()["waited"] <= run.to_dict()["seconds"]
    True
    """
    return Profile(loader)


class Profile(Printed):
    """What ``profile`` gives. Prints as text.

    Attributes:
        verdict: the bottleneck of the run, and at most two changes.
        series: the run over time: dicts with ``seconds`` since the start, the ``waited`` part of the step
            before (0 to 1), and ``busy``, threads at work, by group and stage.
    """

    def __init__(self, loader: Any) -> None:
        pipeline, iteration, self._how = facts.parts_of(loader)
        if pipeline is None:
            raise ConfigError(
                f"profile(loader) must be a Loader, a Pipeline or a DataLoader of one, got "
                f"{type(loader).__name__}; {instead(loader) or 'give it what the loop iterates'}"
            )
        self._pipeline, self._iteration = pipeline, iteration
        self._counts, self._workers = activity.Counts(), activity.Counts()
        self._points: list[tuple[float, float, activity.Counts]] = []
        self._step = FIRST_STEP
        self._sampler: activity.ActivitySampler | None = None
        self._began = self._seconds = self._timed = self._exact = self._others = 0.0
        self._first: float | None = None
        self._children: dict[int, tuple[float, float]] = {}
        self._cells = self._padding = self._seen = 0
        self._lengths: Counter[int] = Counter()
        self._sizes: Counter[int] = Counter()
        self._states: dict[Any, float] = {}
        #: When a wait began that goes on, and the seconds waited until then.
        self._going: tuple[float, float] | None = None
        #: Methods that are timed, as they were.
        self._methods: list[tuple[type, str, Any]] = []
        #: Where workers of a plain DataLoader write, and their pipeline's numbers.
        self._folder: Path | None = None
        self._passes = pipeline._iteration.passes
        self._lock, self._looking = threading.Lock(), threading.Lock()

    def __enter__(self) -> Self:
        global _running
        try:
            with _entering:
                if self._began or _running is not None:
                    problem = "used once" if self._began else "one at a time in a process"
                    raise ConfigError(
                        f"a profile is {problem}: write a new `with profile(loader) as run:` after it"
                    )
                _running = self
            self._begin()
        except BaseException:
            if _running is self:
                self._end()
            raise
        return self

    def _begin(self) -> None:
        self._main = threading.get_ident()
        self._began = self._drawn = self._asked = perf_counter()
        if self._iteration is not None:
            iterations = {self._iteration, *self._iteration.derived}
            self._states = {iteration: iteration.wait_seconds for iteration in iterations}
        self._machine, self._cpu = facts.busy_seconds(), sum(os.times()[:2])
        pids = [child.pid or 0 for child in multiprocessing.active_children()]
        self._children = {pid: (facts.cpu_of(pid), facts.cpu_of(pid)) for pid in pids}
        activity.from_workers.clear()
        if self._how.get("plain") and self._how["workers"]:
            number = secrets.randbits(62) + 1
            self._folder = activity.folder_of(number)
            self._folder.mkdir(mode=0o700)
            self._passes.now.profile = number
        activity.observer = self._observe
        for kind, name in _torchs() if self._iteration is None else [(EpochIterator, "__next__")]:
            self._methods.append((kind, name, vars(kind)[name]))
            setattr(kind, name, self._timing(vars(kind)[name]))
        self._sampler = activity.ActivitySampler(self._tick)
        self._sampler.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._sampler is not None
        try:
            self._sampler.stop()
            vars(self).pop("_facts", None)  # of a loader that was made meanwhile
            self._draw(perf_counter())
        finally:
            self._sampler = None
            self._end()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            print(self, file=sys.stderr)  # noqa: T201

    def _end(self) -> None:
        global _running
        try:
            activity.observer = None
            for kind, name, method in self._methods:
                setattr(kind, name, method)
            if self._sampler is not None:
                self._sampler.stop()
            self._passes.now.profile = 0
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            _running = None

    # Counting

    def _timing(self, method: Any) -> Any:
        """The method of a loader or an iterator, which says how long the loop's thread is in it. The stack of
        a thread that goes on cannot be read instead: in Python 3.11 its frames may be gone meanwhile.
        """

        @wraps(method)
        def timed(waits_for: Any, *args: Any, **more: Any) -> Any:
            if self._going or threading.get_ident() != self._main or not self._is_ours(waits_for):
                return method(waits_for, *args, **more)
            begun = perf_counter()
            self._going = begun, self._ended_waits()
            try:
                return method(waits_for, *args, **more)
            finally:
                self._timed += perf_counter() - begun
                self._going = None
                if self._first is None and method.__name__ == "__next__":
                    self._first = self._ended_waits()

        return timed

    def _is_ours(self, iterator: Any) -> bool:
        """Whether it is of the loader, or of one that a trainer has made meanwhile."""
        if self._iteration is None:
            return True
        iteration = iterator._iteration
        return iteration in self._states or any(
            iteration is each for each in self._iteration.derived
        )

    def _ended_waits(self) -> float:
        """Seconds in waits that have ended: by the clocks of our iterators, or as torch's were timed."""
        if self._iteration is None:
            return self._timed
        for iteration in {self._iteration, *self._iteration.derived}:
            self._states.setdefault(iteration, 0.0)
        return sum((each.wait_seconds - start for each, start in self._states.items()), 0.0)

    def _waited(self) -> float:
        """Seconds, with those of a wait that goes on."""
        going, ended = self._going, self._ended_waits()
        return ended if going is None else max(ended, going[1] + perf_counter() - going[0])

    def _tick(self, now: float) -> None:
        """After each sample, in the sampler's thread."""
        if self._first is None and self._iteration is not None:  # its loop may be in any thread
            self._first = self._ended_waits() or None
        if now - self._drawn >= self._step:
            self._draw(now)

    def _start(self) -> float:
        """When it first waited less than half of the time, over four points: seconds."""
        ends = [0.0, *(end for end, *_ in self._points)]
        waited = [waited for _, waited, _ in self._points]
        for n in range(len(waited) - 3):
            if sum(waited[n : n + 4]) < (ends[n + 4] - ends[n]) / 2:
                return ends[n]
        return self._seconds

    def _draw(self, now: float) -> None:
        """Take the counts since the last time: a point of the series."""
        with self._lock:
            if self._sampler is None:
                return
            counts = self._sampler.take()
            self._counts.add(counts)
            waited_until_now = max(self._exact, self._waited())
            waited, self._exact = waited_until_now - self._exact, waited_until_now
            workers = activity.Counts()
            while activity.from_workers:
                workers.add(activity.from_workers.pop())
            for worker in () if self._folder is None else activity.reported(self._folder):
                workers.add(worker)
            self._workers.add(workers)
            if workers.times:
                counts.times["workers"] = workers.times.get(activity.ITERATES, {})
            self._points.append((now - self._began, waited, counts))
            self._drawn, self._seconds = now, now - self._began
            if self._sampler.is_over or now - self._asked > activity.SYSTEM:
                self._ask_system(now)
            if len(self._points) > MOST_POINTS:
                self._step *= 2
                self._points = list(_merged(self._points))

    def _ask_system(self, now: float) -> None:
        """Cores that other processes take: of this run, and of other programs."""
        self._asked = now
        for child in multiprocessing.active_children():
            pid = child.pid or 0
            self._children[pid] = self._children.get(pid, (0.0, 0.0))[0], facts.cpu_of(pid)
        if self._machine is not None and (busy := facts.busy_seconds()) is not None:
            children = sum(last - first for first, last in self._children.values())
            used = sum(os.times()[:2]) - self._cpu + children
            self._others = max(0.0, busy - self._machine - used) / max(self._seconds, 1e-9)

    def _observe(self, items: Any, k: int) -> None:
        self._seen += 1
        if self._seen > LOOKED_AT and self._seen % THEN_ONE_OF:
            return
        batch = items[k]
        masks = masks_of(batch) if isinstance(batch, dict) else []
        lengths = [length for mask in masks for length in (mask != 0).sum(-1).tolist()]
        if cells := sum(mask.numel() for mask in masks):
            with self._looking:  # several threads make batches
                self._cells += cells
                self._padding += cells - sum(lengths)
                self._lengths.update(lengths)
                self._sizes[cells] += 1

    # What was found

    @cached_property
    def _facts(self) -> facts.Facts:
        iteration = self._iteration or self._pipeline._iteration
        ranks = iteration.ranks()[1]
        hows = [] if self._iteration is None else [state.how for state in self._iteration.derived]
        how = hows[-1] if hows else self._how
        return facts.facts_of(iteration.plan, ranks, **how)

    @property
    def measured(self) -> facts.Measured:
        """The counts that the verdict is made of."""
        if self._sampler is not None:
            self._draw(perf_counter())
        waited = min(self._exact, self._seconds)
        children = sum(last - first for first, last in self._children.values())
        first = waited if self._first is None else self._first
        return facts.Measured(
            self._seconds, waited, first, self._start(), self._counts, self._workers,
            children, self._others, self._cells, self._padding, dict(self._sizes),
        )  # fmt: skip

    @property
    def verdict(self) -> Verdict:
        return verdict(self._facts, self.measured)

    @property
    def series(self) -> list[dict[str, Any]]:
        points, before = [], 0.0
        for end, waited, counts in self._points:
            step = max(end - before, 1e-9)
            busy = {
                group: {label: sums[0] / step for label, sums in times.items()}
                for group, times in counts.times.items()
            }
            points.append({"seconds": end, "waited": min(1.0, waited / step), "busy": busy})
            before = end
        return points

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types, for a log: seconds, counts, facts, verdict."""
        m, decided = self.measured, self.verdict
        return {
            "seconds": m.seconds, "waited": m.waited, "first_batch": m.first, "others": m.others,
            "children": m.children, "cells": m.cells, "padding": m.padding,
            "threads": m.counts.to_dict(), "workers": m.workers.to_dict(),
            "facts": asdict(self._facts), "verdict": asdict(decided),
        }  # fmt: skip

    def lines(self) -> list[tuple[str, str]]:
        """The text, as label and text."""
        return list(text_lines(self._facts, self.measured))

    _rows = lines

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page to look at: an HTML file that needs no other.

        It shows the text, waiting and the work of each stage over time, the lengths of rows, how well they
        are shuffled, and the first rows of the next epoch, which it reads.

        Args:
            path: a file of this machine, which is written anew.

        Raises:
            ConfigError: the file cannot be written, or nothing was run yet.
        """
        if not self._began:
            raise ConfigError("save(path) shows a run: call it in or after `with profile(loader)`")
        order = (
            order_quality(self._pipeline) if self._pipeline._iteration.plan.chain.shuffle else None
        )
        try:
            rows = html_of(self._pipeline.show(), r"<mark>\g<0></mark>")
        except TrainpipesError as error:
            rows = html.escape(f"cannot be shown: {error}")
        text = page(self.lines(), self.series, self._lengths, str(order or ""), rows)
        write_text(path, text, "save")

    def __str__(self) -> str:
        return super().__str__() if self._began else "profile: nothing was run yet"


def _torchs() -> Iterator[tuple[type, str]]:
    """The methods of torch's loaders and their iterators in which a loop waits."""
    for module in TORCHS:
        for kind in list(vars(sys.modules.get(module, object)).values()):
            if isinstance(kind, type) and kind.__module__ == module:
                name = "__iter__" if issubclass(kind, DataLoader) else "__next__"
                if name in vars(kind):
                    yield kind, name


def _merged(
    points: list[tuple[float, float, activity.Counts]],
) -> Iterator[tuple[float, float, activity.Counts]]:
    """Points of twice the length."""
    for n in range(0, len(points) - 1, 2):
        (_, waited, counts), (end, more, others) = points[n : n + 2]
        counts.add(others)
        yield end, waited + more, counts
    if len(points) % 2:
        yield points[-1]
