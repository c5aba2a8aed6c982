"""The ranks and workers of a run, emulated in one process.

A leg is a stretch of a run on one topology: so many ranks, each of which reads in one of three ways:

    pipe       ``for batch in pipe``
    loader     ``Loader`` with workers, whose rounds are made in turn in this process
    workers    a plain or stateful ``DataLoader``, each of its workers an iterator of its own

What a leg gives are its steps, each the batches of all ranks in the order of m, and the
states of all consumers after the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import pytest
from torch.utils.data._utils import worker as torch_worker

import trainpipes as tp
from trainpipes.engine.iterating import lookahead
from trainpipes.engine.processes import loader_workers
from trainpipes.engine.processes.channel import pickled, unpickled
from trainpipes.engine.processes.executors import Processes
from trainpipes.engine.processes.loader_workers import LoaderWorkers
from trainpipes.engine.processes.stage_calls import StageCall

__all__ = ["ENDED", "Leg", "Meeting", "OneProcessLoader", "Reads", "in_worker"]

Reads = Literal["pipe", "loader", "workers"]

#: Stands for a step in which a rank got nothing more.
ENDED: Any = type("Ended", (), {"__repr__": lambda self: "ENDED"})()


class OneProcessLoader(tp.Loader):
    """A ``Loader`` whose workers' tasks are done in this process, as they are handed out."""

    def __init__(self, pipeline: tp.Pipeline, num_workers: int) -> None:
        super().__init__(pipeline, num_workers=num_workers)
        self.threads = 0
        if num_workers:
            self._workers = WorkersHere(
                lambda: pipeline.stages, lambda: None, Processes(num_workers), 2, False, None
            )


class WorkersHere(LoaderWorkers):
    def begin(self, plan: Any) -> loader_workers.Workers:
        count = self.executor.workers
        call = StageCall(plan, self.stages(), count)
        return loader_workers.Workers(plan, call, DoneHere(call), 2 * count)  # type: ignore[arg-type]


class DoneHere:
    """Does tasks as worker processes do, on copies that were pickled."""

    closed = False

    def __init__(self, call: StageCall) -> None:
        self._call, self._worker = call, StageCall(call.plan, call.stages, call.workers)
        self._worker.open()

    def submit(self, items: Any, words: Any) -> Any:
        results, error = self._worker.answer(unpickled(pickled(items)), words)
        self._call.hear(self._worker.noticed())
        return lambda: (unpickled(pickled(results)), error)

    def start(self) -> None: ...
    def close(self) -> None: ...


@contextmanager
def in_worker(worker: int, workers: int, seed: int, pipe: Any) -> Iterator[None]:
    """For what runs inside, this process is a worker of a DataLoader."""
    info = torch_worker.WorkerInfo(id=worker, num_workers=workers, seed=seed + worker, dataset=pipe)
    torch_worker._worker_info = info
    try:
        yield
    finally:
        torch_worker._worker_info = None


class Meeting:
    """Threads that stand for ranks agree here on the least of their numbers, or their sum.

    Attributes:
        agreements: how often they have.
    """

    def __init__(self, ranks: int) -> None:
        self.agreements = 0
        self._numbers: list[int] = []
        self._least = self._total = 0
        # A rank that asks once more than another must fail, not hang.
        self._barrier = threading.Barrier(ranks, action=self._close, timeout=120)

    def _close(self) -> None:
        self._least, self._total = min(self._numbers), sum(self._numbers)
        self._numbers.clear()
        self.agreements += 1

    def agree(self, number: int, total: bool) -> int:
        self._numbers.append(number)
        self._barrier.wait()
        return self._total if total else self._least

    def leave(self) -> None:
        """Let those that wait fail."""
        self._barrier.abort()


class Consumed(Protocol):
    """One rank, pass after pass."""

    def begin(self) -> None: ...
    def next(self) -> Any: ...
    def states(self) -> list[dict[str, Any]]: ...


class Alone:
    """A rank that iterates a pipeline or a ``Loader``."""

    def __init__(self, subject: tp.Pipeline | tp.Loader, state: dict[str, Any] | None) -> None:
        self._subject = subject
        if state is not None:
            subject.load_state_dict(state)

    def begin(self) -> None:
        self._iterator = iter(self._subject)

    def next(self) -> Any:
        return next(self._iterator, ENDED)

    def states(self) -> list[dict[str, Any]]:
        state = self._subject.state_dict()
        assert state is not None
        return [state]


class Workers:
    """A rank whose DataLoader asks its workers in strict turn. The pipeline by itself gives the same, and
    states that others can load."""

    def __init__(self, pipe: tp.Pipeline, workers: int, state: dict[str, Any] | None) -> None:
        if state is not None:
            pipe.load_state_dict(state)
        self._beside = tp.Pipeline(pipe.stages, pipe._ranks)
        if state is not None:
            self._beside.load_state_dict(state)
        self._copies = []
        for _ in range(workers):
            copy = tp.Pipeline(pipe.stages, pipe._ranks)
            copy._iteration.passes = pipe._iteration.passes
            copy._iteration.pending = pipe._iteration.pending
            self._copies.append(copy)
        self._seed = 1000
        self._turn: int | None = None

    def begin(self) -> None:
        self._seed += 1000
        self._iterators = []
        for worker, copy in enumerate(self._copies):
            with in_worker(worker, len(self._copies), self._seed, copy):
                self._iterators.append(iter(copy))
        if self._turn is not None and self._beside._iteration.plan.chain.endless:  # it would go on
            after = self._beside.state_dict()["epoch"] + 1
            self._beside.load_state_dict(self._beside.state_at(0, epoch=after))
        self._alone = iter(self._beside)
        self._turn = 0

    def next(self) -> Any:
        workers = len(self._copies)
        worker = self._turn % workers
        self._turn += 1
        with in_worker(worker, workers, self._seed, self._copies[worker]):
            item = next(self._iterators[worker], ENDED)
        if item is not ENDED:
            next(self._alone)
        return item

    def states(self) -> list[dict[str, Any]]:
        return [self._alone.state_dict()]


class Leg:
    """A stretch of a run on one topology.

    Args:
        pipe: the pipeline, of any ranks.
        ranks: R.
        workers: W, for ``reads`` other than "pipe".
        reads: how each rank reads.
        states: a state for each rank to load, or None to start afresh.

    Attributes:
        meeting: where the ranks agree on an epoch's end.
    """

    def __init__(
        self,
        pipe: tp.Pipeline,
        ranks: int,
        workers: int = 1,
        reads: Reads = "pipe",
        states: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self.ranks = ranks
        self.meeting = Meeting(ranks)
        self._consumers: list[Consumed] = []
        self._threads: ThreadPoolExecutor | None = None
        if ranks > 1 and pipe._iteration.plan.counts.ends_unevenly:  # they wait for each other
            self._threads = ThreadPoolExecutor(ranks)
        for rank in range(ranks):
            own = pipe.distributed(rank=rank, world_size=ranks)
            state = None if states is None else states[rank]
            if reads == "workers":
                self._consumers.append(Workers(own, workers, state))
            elif reads == "loader":
                self._consumers.append(Alone(OneProcessLoader(own, num_workers=workers), state))
            else:
                self._consumers.append(Alone(own, state))

    def begin(self) -> None:
        """Start the next pass on all ranks."""
        for consumer in self._consumers:
            consumer.begin()

    def step(self) -> list[Any]:
        """What each rank gets next, in the order of ranks; ENDED for one that got nothing."""
        with self._agreeing():
            if self._threads is None:
                return [consumer.next() for consumer in self._consumers]
            answers = [self._threads.submit(self._ask, consumer) for consumer in self._consumers]
            errors = [e for e in (answer.exception() for answer in answers) if e is not None]
            for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
                raise error  # the cause before those that waited for it
            return [answer.result() for answer in answers]

    def _ask(self, consumer: Consumed) -> Any:
        try:
            return consumer.next()
        except BaseException:
            self.meeting.leave()
            raise

    def states(self) -> list[dict[str, Any]]:
        """The states of all ranks."""
        with self._agreeing():
            return [state for consumer in self._consumers for state in consumer.states()]

    def close(self) -> None:
        """Let the threads go."""
        if self._threads is not None:
            self._threads.shutdown()

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lookahead, "agreement_over", lambda *ranks: self.meeting.agree)
            yield
