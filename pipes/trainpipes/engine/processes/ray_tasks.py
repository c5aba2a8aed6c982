"""Tasks on a Ray cluster: what all tasks of a job share, their results, and how they end; and calls of
functions.

A user's error is a task's result: as an exception, Ray would log it, and might run the task again.

Of calls each run of rows is a task, and goes again to another machine if its process or node dies. A run
at which a process has died, or whose calls have a time limit, is worked on in a child of the task's
process, so that the row at which it dies is known.
"""

from __future__ import annotations

import multiprocessing
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainpipes._internal.messages import log_once
from trainpipes.engine.processes.channel import Message, pickled, unpickled
from trainpipes.engine.processes.executors import ProcessWorker, use_threads
from trainpipes.engine.processes.process_worker import Call, answer_to, portable
from trainpipes.engine.processes.worker_pool import Died, Task, WorkerPool, of_no_row
from trainpipes.errors import ConfigError, TrainpipesError, WorkerError
from trainpipes.filesystems.places import TaskStopped, set_stop_check
from trainpipes.interfaces.watched_calls import NO_ROW, Place
from trainpipes.version import __version__

INSTALL = (
    "install there what the driver has; modules of your own travel by "
    'ray.init(runtime_env={"working_dir": "."})'
)
#: How often Ray runs a task again whose process or node has died.
RETRIES = 3
#: Seconds between two looks of a task at whether it is to end.
LOOK_FOR_END = 2.0
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


def result_of(reference: Any, name: str) -> Any:
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
            f"{name} was given up after {1 + RETRIES} tries: {first_line(error)} Call it again to go on "
            "after the files that are whole; where memory runs out, with fewer tasks on a node"
        ) from error


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# In a worker process


@dataclass(frozen=True)
class Job:
    """What all tasks of one job share: its function and state, sent once."""

    token: str
    shared: list[Any]
    version: str = __version__

    @property
    def flag(self) -> str:
        return f"trainpipes-stop-{self.token}"


@dataclass(frozen=True)
class Failed:
    """A task failed by an error that another try would not cure."""

    error: BaseException


def failed(error: BaseException, said: str) -> Failed:
    if not isinstance(error, Exception):
        return Failed(WorkerError(f"{said}: {type(error).__qualname__}: {error}"))
    return Failed(portable(error, said, is_task=True))


class StopFlag:
    """An actor: while there is one of a job's name, the tasks of this job end."""


def do_task(task: Any, job: Job) -> Any:
    import ray

    next_look = 0.0

    def look() -> None:
        nonlocal next_look
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + LOOK_FOR_END
            with suppress(Exception):  # there is no such actor
                ray.get_actor(job.flag)
                raise TaskStopped

    set_stop_check(look)
    try:
        look()
        fn, state = opened(job, lambda work: (work[0], work[1]()))
        return fn(task, state)
    except TaskStopped:
        return Failed(RuntimeError("the task was asked to end"))
    except (Exception, SystemExit) as error:  # by sys.exit() Ray would run it again
        return failed(error, str(task))


#: What the jobs that this process works for share, opened, by their tokens; and for how many at most.
_opened: dict[str, Any] = {}
MOST_OPENED = 2


def opened(job: Job, opens: Callable[[Any], Any]) -> Any:
    """What a job shares, as it is opened once in this process."""
    if job.token not in _opened:
        import ray

        if job.version != __version__:
            raise ConfigError(
                f"a node of the Ray cluster has trainpipes {__version__}, and the driver {job.version}: "
                'install the same there, or let ray.init() ship the driver\'s by runtime_env={"py_modules": '
                "[trainpipes]}"
            )
        while len(_opened) >= MOST_OPENED:  # before the next one takes memory, too
            del _opened[next(iter(_opened))]
        use_threads(1)
        try:
            shared = ray.get(job.shared[0])
        except ray.exceptions.RaySystemError as error:  # it does not unpickle here
            said = first_line(error).removeprefix("System error: ")
            raise ConfigError(
                f"a node of the Ray cluster cannot open the pipeline ({said}): {INSTALL}"
            ) from None
        _opened[job.token] = opens(shared)
    return _opened[job.token]


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
