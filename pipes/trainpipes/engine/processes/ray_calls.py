"""Calls of functions on a Ray cluster: each run of rows is a task there, and goes again to another machine if
its process or node dies. A run at which a process has died, or whose calls have a time limit, is worked on in
a child of the task's process, so that the row at which it dies is known.
"""

from __future__ import annotations

import multiprocessing
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainpipes._internal.messages import log_once
from trainpipes.engine.processes.process_pool import ProcessWorker
from trainpipes.engine.processes.process_worker import (
    Call,
    Message,
    answer_to,
    pickled,
    unpickled,
)
from trainpipes.engine.processes.ray_jobs import (
    Failed,
    Job,
    end_tasks,
    failed,
    first_line,
    opened,
    put,
    result_of,
)
from trainpipes.engine.processes.worker_pool import Died, Task, WorkerPool, of_no_row
from trainpipes.errors import TrainpipesError, WorkerError
from trainpipes.interfaces.watched_calls import NO_ROW, Place

#: Seconds between two looks at whether an answer is still wanted, and after which a task that has no answer
#: yet is worth a line.
LOOK, LONG = 0.5, 60.0


def ray_pool(
    remote: Any,
    call: Call,
    workers: int,
    most_bytes: int,
    timeout: float | None,
    idle: float | None,
) -> WorkerPool:
    """Tasks of a cluster that answer a call.

    Args:
        remote: ``do_call`` as tasks of a connected executor.
        workers: how many run at once.
        most_bytes: of rows that are on their way to them, at most.
        timeout, idle: see ``WorkerPool``.
    """
    job, flight = Job(secrets.token_hex(8), [put(call)]), _Flight(most_bytes)

    def worker(number: int) -> RayWorker:
        return RayWorker(number, call.said, remote, job, flight, timeout)

    return WorkerPool(call, workers, worker, timeout, idle)


class _Flight:
    """How many bytes of rows are on their way to a cluster, at most."""

    def __init__(self, most: int) -> None:
        self._most, self._bytes, self._lock = most, 0, threading.Lock()

    def begin(self, count: int) -> bool:
        """Whether so many bytes may go; a run that is larger than all may go alone."""
        with self._lock:
            good = not self._bytes or self._bytes + count <= self._most
            self._bytes += count if good else 0
            return good

    def end(self, count: int) -> None:
        with self._lock:
            self._bytes -= count


@dataclass
class RayWorker:
    """Sends runs of rows to a cluster, one after the other."""

    number: int
    said: str
    remote: Any
    job: Job
    flight: _Flight
    timeout: float | None
    is_ready: bool = True
    _reference: Any = None
    _closed: bool = False

    def begin(self) -> None: ...

    def has_died(self) -> bool:
        return False

    def forget(self) -> None: ...

    def hang_up(self) -> None:
        self._closed = True

    def end(self) -> None:
        import ray

        reference, self._reference = self._reference, None
        try:
            end_tasks([] if reference is None else [reference])
        except Exception:
            if ray.is_initialized():  # else it has ended meanwhile, with its tasks
                raise

    def ask(self, task: Task) -> tuple[list[Any], BaseException | None, Any]:
        parts = [np.frombuffer(part, np.uint8) for part in task.message]
        size = sum(part.nbytes for part in parts)
        while not self.flight.begin(size):
            if self._closed:
                raise self._gone()
            time.sleep(0.002)
        try:
            is_again = any(place.row == NO_ROW for place in task.deaths)
            rows = RowsToCall(self.number, parts, is_again, self.timeout)
            self._reference = self.remote.remote(rows, self.job)
            answer = self._answer()
        finally:
            self.flight.end(size)
        given: tuple[list[Any], BaseException | None, Any] = unpickled(own(answer))
        return given

    def _answer(self) -> list[Any]:
        import ray

        asked = time.monotonic()
        while not ray.wait([self._reference], timeout=LOOK)[0]:
            if self._closed:
                raise self._gone()
            if time.monotonic() - asked > LONG:
                log_once(
                    f"{self.said}: the Ray cluster has not answered for {LONG:g} s: its nodes are busy or "
                    "have no room for such a task (`ray status` says), or a function takes that long"
                )
        reference, self._reference = self._reference, None
        try:
            answer = result_of(reference, f"a call of {self.said}")
        except WorkerError as error:
            cause = error.__cause__
            assert cause is not None
            if may_pass(cause):
                how = f"a process of the Ray cluster has died ({first_line(cause)})"
                raise Died(how, Place()) from None
            text = f"the Ray cluster failed ({first_line(cause)}); go on from the last state"
            raise of_no_row(WorkerError, self.said, text) from cause
        if isinstance(answer, Failed):
            raise answer.error
        if isinstance(answer, Death):
            raise Died(answer.how, answer.place, answer.tries)
        parts: list[Any] = answer
        return parts

    def _gone(self) -> TrainpipesError:
        return of_no_row(WorkerError, self.said, "its workers were ended")


def may_pass(error: BaseException) -> bool:
    """Whether a task failed since its process or node did."""
    from ray import exceptions

    kinds = [
        getattr(exceptions, name, None)
        for name in (
            "WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "OutOfMemoryError",
            "ObjectLostError", "RayActorError",
        )
    ]  # fmt: skip
    return isinstance(error, tuple(kind for kind in kinds if kind is not None))


# In a process of the cluster


@dataclass
class RowsToCall:
    """What a task gets: the number of a worker, and a message.

    Args:
        parts: uint8, of the message.
        is_again: whether a process has died at these rows, nobody knows at which.
    """

    number: int
    parts: list[Any] = field(repr=False)
    is_again: bool
    timeout: float | None


@dataclass(frozen=True)
class Death:
    """A child died at a row of a stage, which is the cause after so many tries."""

    how: str
    place: Place
    tries: int


def own(parts: Sequence[Any]) -> Message:
    """A message that may be written to: what Ray gives belongs to its store."""
    return [memoryview(bytearray(part)) for part in parts]


def do_call(rows: RowsToCall, job: Job) -> Any:
    def begun(call: Call) -> Call:
        call.begin(rows.number)
        return call

    try:
        call = opened(job, begun)
        if rows.is_again or rows.timeout is not None:
            answer = _in_a_child(call, rows)
        else:
            answer = answer_to(call, own(rows.parts), [*Place()])
        return [np.frombuffer(part, np.uint8) for part in answer]
    except Died as death:
        # A death before, of which no row is known, is taken to have been at this one.
        return Death(str(death), death.place, min(death.tries, 2) if rows.is_again else death.tries)
    except (Exception, SystemExit) as error:
        return failed(error, "the function")


def _in_a_child(call: Call, rows: RowsToCall) -> Message:
    context = multiprocessing.get_context("fork")
    worker = ProcessWorker(rows.number, call.said, context, call, rows.timeout)
    worker.begin()
    try:
        return pickled(worker.answer(own(rows.parts)))
    finally:
        worker.hang_up()
        worker.end()
