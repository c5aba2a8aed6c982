"""Where the time goes, stage by stage.

The stages of one plan are measured, and no others: what they do is put around by a clock in the stages' own
objects, which belong to the plan. What comes out is the same, and a pipeline that nobody measures has
nothing of it.

What is measured are seconds of threads: several work at a time, so that the sum may be more than the time
that has passed; and a thread that waits, for a disk or for the interpreter's lock, counts as well. The time
of a stage is without that of those below it. What is between stages (gathering a shuffled window's rows,
queues) is not counted, but where a stage does it: the first one above a shuffle gathers the rows that it
works on.

What the first call of a thread takes more than later ones is loading: packages are imported, tokenizers and
templates are read. It is counted apart.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, MutableSequence
from time import perf_counter
from typing import Any

from trainpipes.columns.lazy_batches import LazyBatches
from trainpipes.columns.run import Run, RunSource
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.plan import Plan
from trainpipes.kinds.random_access import RandomAccessSource
from trainpipes.kinds.source import RowMixture, RowSource, RowStream
from trainpipes.kinds.stage_kinds import CutStage, OpenBelow, PlaceStage, RunStage

__all__ = ["StageClock", "labels_of"]


def labels_of(plan: Plan) -> list[str]:
    """A name for each stage of a plan that takes time, in the order in which rows go through them."""
    return [label for label, _ in _measured(plan)]


def _measured(plan: Plan) -> list[tuple[str, Any]]:
    """What is measured: sources and stages, each with its name."""
    found: list[tuple[str, Any]] = []
    times: Counter[str] = Counter()
    for name, what in _within(plan.inputs):
        times[name] += 1
        found.append((name if times[name] == 1 else f"{name} ({times[name]})", what))
    return found


def _within(inputs: Inputs, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, part in inputs.mixed.items():
        yield from _within(part, f"{prefix}{name}: ")
    for number, part in enumerate(getattr(inputs.source, "joined_inputs", ())):
        yield from _within(part, f"{prefix}{number}: ")
    if not isinstance(inputs.source, RowMixture):
        yield f"{prefix}{inputs.chain.opener.name}", inputs.source
    chain = inputs.chain
    kept = 0 if chain.cache is None else chain.cached
    for number, stage in enumerate((*chain.before, *chain.after, *chain.place_stages)):
        if chain.cache is not None and number == kept:
            yield f"{prefix}{chain.cache.name}", inputs
        yield f"{prefix}{stage.name}", stage


class StageClock:
    """Seconds that threads spend in each stage of a plan.

    Args:
        plan: to be measured, before anything iterates it.
        seconds: where they are added up, one for each of ``labels_of(plan)``, and last those of loading.
    """

    def __init__(self, plan: Plan, seconds: MutableSequence[float]) -> None:
        self._seconds = seconds
        self._calls: dict[tuple[int, str], _Calls] = {}
        self._lock = threading.Lock()
        self._inner = threading.local()  # seconds of what was measured within, one for each level
        self._changed: list[tuple[dict[str, Any], str, Any]] = []
        for number, (_, what) in enumerate(_measured(plan)):
            self._put_around(number, what)

    def stop(self) -> None:
        """Leave stages and sources as they were."""
        while self._changed:
            values, name, before = self._changed.pop()
            if before is None:
                values.pop(name, None)
            else:
                values[name] = before

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Have one object do something else than its class says; one that has no room for that stays as it
        is."""
        values: dict[str, Any] | None = getattr(owner, "__dict__", None)
        if values is not None:
            self._changed.append((values, name, values.get(name)))
            values[name] = function

    def _put_around(self, number: int, what: Any) -> None:
        if isinstance(what, Inputs):
            blocks = what.cached_blocks
            if blocks is not None:
                self._replace(blocks, "read", self._timed(number, "read", blocks.read))
        elif isinstance(what, RowSource):
            self._source(number, what)
        elif isinstance(what, RowStream):
            self._stream(number, what)
        elif isinstance(what, CutStage):
            own = what.open
            self._replace(what, "open", lambda below, at: self._opened(number, own, below, at))
        elif isinstance(what, RunStage):
            self._run_stage(number, what)
        elif isinstance(what, PlaceStage):
            for name in ("place", "begun"):
                self._replace(what, name, self._timed(number, name, getattr(what, name)))

    def _source(self, number: int, source: RowSource) -> None:
        open_reader = source.reader

        def reader() -> Any:
            found = open_reader()
            if found is not source:
                self._reader(number, found)
            return found

        self._replace(source, "read", self._timed(number, "read", source.read))
        self._replace(source, "reader", reader)
        if isinstance(source, RandomAccessSource):
            self._replace(source, "take", self._timed(number, "take", source.take))

    def _stream(self, number: int, source: RowStream) -> None:
        open_stream = source.open

        def opened(epoch: int, state: dict[str, Any] | None) -> Any:
            found = open_stream(epoch, state)
            self._reader(number, found)
            return found

        self._replace(source, "open", opened)

    def _reader(self, number: int, reader: Any) -> None:
        """Measure a reader, which nobody keeps when the pass is over."""
        values: dict[str, Any] | None = getattr(reader, "__dict__", None)
        if values is not None and "read" not in values:
            values["read"] = self._timed(number, "read", reader.read)

    def _run_stage(self, number: int, stage: RunStage) -> None:
        process = self._timed(number, "process", stage.process)
        submit = self._timed(number, "submit", stage.submit_run)

        def processed(run: Run) -> Run:
            found: Run = process(run)
            self._late(number, found)
            return found

        def submitted(run: Run) -> Callable[[], Run] | None:
            rest = submit(run)
            return None if rest is None else self._timed(number, "rest", rest)

        self._replace(stage, "process", processed)
        self._replace(stage, "submit_run", submitted)

    def _late(self, number: int, run: Run) -> None:
        """Measure items that are made when somebody takes them."""
        if isinstance(run.items, LazyBatches):
            run.items.make_by(lambda make: self._timed(number, "make", make))

    def _opened(
        self, number: int, own: Callable[..., RunSource], below: OpenBelow, at: dict[str, Any]
    ) -> RunSource:
        return _TimedRuns(self._timed(number, "next", own(below, at).next_run))

    def _timed(self, number: int, work: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that counts its seconds to a stage.

        Args:
            number: of the stage.
            work: what it is of the stage's, so that calls are compared with others of the same.
            function: to be measured.
        """

        def timed(*arguments: Any) -> Any:
            inner = self._levels()
            inner.append(0.0)
            start = perf_counter()
            try:
                return function(*arguments)
            finally:
                spent = perf_counter() - start
                own = spent - inner.pop()
                if inner:
                    inner[-1] += spent
                with self._lock:
                    calls = self._calls.setdefault((number, work), _Calls())
                    before = calls.loading
                    calls.add(threading.get_ident(), own)
                    loading = calls.loading - before
                    self._seconds[number] += own - loading
                    self._seconds[-1] += loading

        return timed

    def _levels(self) -> list[float]:
        found: list[float] | None = getattr(self._inner, "levels", None)
        if found is None:
            found = self._inner.levels = []
        return found


class _Calls:
    """The calls of one function of a stage, the first of each thread apart: others may wait for its lock."""

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self._first = self._later = 0.0
        self._count = 0

    def add(self, thread: int, seconds: float) -> None:
        if thread in self._threads:
            self._later += seconds
            self._count += 1
        else:
            self._threads.add(thread)
            self._first += seconds

    @property
    def loading(self) -> float:
        """Seconds that first calls have taken more than as many later ones on average; 0 before those."""
        if not self._count:
            return 0.0
        return max(0.0, self._first - len(self._threads) * self._later / self._count)


class _TimedRuns:
    """The runs of a shard, measured."""

    def __init__(self, next_run: Callable[[], Run]) -> None:
        self.next_run = next_run
