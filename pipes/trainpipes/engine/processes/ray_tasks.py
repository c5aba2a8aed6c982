"""Tasks on a Ray cluster, as the driver sees them: how they begin, their results, how they end; and calls.

Of calls each run of rows is a task, and goes again to another machine if its process or node dies. What
tasks do is in ``ray_worker``.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainpipes._internal.messages import log_once
from trainpipes.engine.processes.channel import pickled, unpickled
from trainpipes.engine.processes.process_worker import Call
from trainpipes.engine.processes.ray_worker import (
    INSTALL,
    LOOK_FOR_END,
    Death,
    Failed,
    Job,
    RowsToCall,
    StopFlag,
    by_value,
    first_line,
    own,
)
from trainpipes.engine.processes.worker_pool import Died, Task, WorkerPool, of_no_row
from trainpipes.errors import ConfigError, TrainpipesError, WorkerError
from trainpipes.interfaces.watched_calls import NO_ROW, Place

log = logging.getLogger("trainpipes")

#: How often a task is run again whose process or node has died: by us, since Ray goes on for ever, without a
#: word, where memory runs out.
RETRIES = 3
#: Seconds that tasks which are asked to end are waited for before they are cancelled, and then before their
#: processes are killed.
PATIENCE = 5.0


def put(work: Any) -> Any:
    import ray
    from ray.exceptions import RayError

    try:
        return ray.put(work)
    except RayError as error:
        raise WorkerError(
            "the object store of the Ray cluster does not take the pipeline "
            f"({first_line(error)}): let other programs on the cluster end, or start it with a larger "
            "--object-store-memory; rows in memory are better read from files by the tasks"
        ) from error
    except Exception as error:  # of anything that the pipeline holds
        raise ConfigError(
            "executor=Ray(): the pipeline must pickle to reach the nodes of the cluster, and does "
            f"not ({first_line(error.__cause__ or error)}): define functions at the top of a module or "
            "of the program, and open files and connections in them"
        ) from error


def result_of(reference: Any, name: str, tries: int = 1) -> Any:
    import ray
    from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError, TaskCancelledError

    try:
        return ray.get(reference)
    except (RayTaskError, RuntimeEnvSetupError) as error:
        cause = getattr(error, "cause", None) or error
        raise ConfigError(
            f"{name} cannot be begun on a node of the Ray cluster "
            f"({type(cause).__name__}: {first_line(cause)}): {INSTALL}"
        ) from error
    except TaskCancelledError as error:
        raise WorkerError(f"{name} was cancelled from outside") from error
    except RayError as error:
        raise WorkerError(
            f"{name} was given up after {tries} tr{'y' if tries == 1 else 'ies'}: {first_line(error)} Call "
            "it again to go on after the files that are whole; where memory runs out, with fewer tasks on a "
            "node"
        ) from error


def check_again(error: WorkerError, name: str, tries: int) -> None:
    """Raise the error of a task unless it is to be run again: after some time, where memory has run out."""
    from ray.exceptions import OutOfMemoryError

    cause = error.__cause__
    if cause is None or not may_pass(cause) or tries > RETRIES:
        raise error
    log.warning("%s is run again: %s", name, first_line(cause))
    if isinstance(cause, OutOfMemoryError):
        time.sleep(2 ** (tries - 1))


def end_tasks(references: list[Any], job: Job | None = None) -> None:
    """Wait for tasks that have begun, after asking those of a job to end, and cancel those that go on: Ray
    (2.60) may abort this process where a task is cancelled as it ends.
    """
    import ray

    if not references or not ray.is_initialized():
        return
    flag, timeout = None, PATIENCE
    if job is not None:
        with suppress(Exception):
            flag = ray.remote(num_cpus=0)(StopFlag).options(name=job.flag).remote()
        timeout = LOOK_FOR_END + PATIENCE if flag else 0
    _, references = ray.wait(references, num_returns=len(references), timeout=timeout)
    for force in (False, True):
        for reference in references:
            with suppress(Exception):
                ray.cancel(reference, force=force)
        if references:
            _, references = ray.wait(references, num_returns=len(references), timeout=PATIENCE)
    with suppress(Exception):
        if flag is not None:
            ray.kill(flag)


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
        self.job.end()

    def end(self) -> None:
        import ray

        reference, self._reference = self._reference, None
        try:
            end_tasks([] if reference is None else [reference])
        except Exception:
            if ray.is_initialized():  # else it has ended meanwhile, with its tasks
                raise

    def ask(self, task: Task) -> tuple[list[Any], BaseException | None, Any]:
        message = task.message
        if b"__main__" in bytes(message[0]):
            message = pickled(unpickled(message), by_value())
        parts = [np.frombuffer(part, np.uint8) for part in message]
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
