"""What a task does in a Ray worker process, and what it sends to the driver.

What all tasks of a job share (plan, options, tokenizer) lies in the object store once. A worker process opens
it for its first task and keeps it for the following ones. An error of ours or the user's is the task's
*result*, not an exception: Ray would log it, wrap it, and might run the task again. How many rows a task has
done goes to one small actor, at most once in some seconds, and the driver asks that actor. As often the task
looks whether the driver has asked all tasks to end, which an actor with the job's name says.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from trainpipes.errors import ConfigError, WorkerError
from trainpipes.version import __version__

__all__ = ["Failed", "Finished", "Job", "Rows", "StopFlag", "Tell", "Work", "do_task", "flag_of"]

#: Is called with rows done since the last call.
Tell: TypeAlias = Callable[[int], None]
#: Does a task; gives its result, which pickles.
Work: TypeAlias = Callable[[Any, Tell], Any]

#: The variable by which tokenizers are told to start no threads.
PARALLELISM = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True)
class Job:
    """What every task gets besides itself. Small: it travels with each.

    Attributes:
        token: of the job, another one for each.
        shared: a list of one Ray reference, to the function that opens the work. In a list Ray leaves it as
            it is.
        rows: the actor that counts rows; None where nobody asks.
        every: seconds between two calls of it by a task, and between two looks whether it is to end.
        threads: that a task may use.
        asker: for messages.
        version: of trainpipes in the driver.
    """

    token: str
    shared: list[Any]
    rows: Any
    every: float
    threads: int
    asker: str
    version: str = __version__


@dataclass(frozen=True)
class Finished:
    """A task is done.

    Attributes:
        result: of it.
        rows: that it told of, in all.
    """

    result: Any
    rows: int


@dataclass(frozen=True)
class Failed:
    """A task failed by an error of ours or the user's, which another try would not cure."""

    error: BaseException


class Rows:
    """How many rows each running task has done. An actor of Ray; needs no CPU.

    A task that Ray runs again begins at 0 again.
    """

    def __init__(self) -> None:
        self._done: dict[int, int] = {}

    def put(self, number: int, rows: int) -> None:
        """Called by tasks."""
        self._done[number] = rows

    def get(self, ended: Iterable[int]) -> dict[int, int]:
        """Rows of each task, by number; those that have ended are forgotten. Called by the driver."""
        for number in ended:
            self._done.pop(number, None)
        return self._done


class StopFlag:
    """That it is there asks the tasks of a job to end. An actor of Ray; needs no CPU."""


class _Stopped(BaseException):
    """Raised in a task that is asked to end."""


def flag_of(job: Job) -> str:
    """The name of a job's ``StopFlag``."""
    return f"trainpipes-stop-{job.token}"


def do_task(number: int, task: Any, job: Job) -> Finished | Failed:
    """Do one task. Ray calls it in a worker process."""
    meter = _Meter(number, job)
    try:
        meter.look()
        return Finished(_opened(job)(task, meter.tell), meter.rows)
    except _Stopped:
        return Failed(WorkerError(f"{job.asker}: the task was asked to end"))
    except (Exception, SystemExit) as error:  # by sys.exit() Ray would run it again
        return Failed(_portable(error, job.asker))


class _Meter:
    """Tells the actor how far a task is, and ends it where it is asked to."""

    def __init__(self, number: int, job: Job) -> None:
        self._number, self._job = number, job
        self._next = time.monotonic() + job.every
        self.rows = 0

    def tell(self, rows: int) -> None:
        self.rows += rows
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._job.every
            self.look()
            if self._job.rows is not None:
                with suppress(Exception):  # the actor's node is gone: work goes on uncounted
                    self._job.rows.put.remote(self._number, self.rows)

    def look(self) -> None:
        """Raise if the driver has asked the tasks to end."""
        import ray

        with suppress(Exception):  # there is no such actor
            ray.get_actor(flag_of(self._job))
            raise _Stopped


#: The job that this process works for, and its work.
_kept: tuple[str, Work] | None = None


def _opened(job: Job) -> Work:
    """The work of a job, opened once in this process."""
    global _kept
    if _kept is None or _kept[0] != job.token:
        import ray

        if job.version != __version__:
            raise ConfigError(
                f"{job.asker}: a node of the Ray cluster has trainpipes {__version__}, and the driver "
                f"{job.version}: install the same there, or let ray.init() ship the driver's by "
                'runtime_env={"py_modules": [trainpipes]}'
            )
        _kept = None  # before the next one takes memory, too
        _use_threads(job.threads)
        try:
            open_work: Callable[[], Work] = ray.get(job.shared[0])
        except ray.exceptions.RaySystemError as error:  # it does not unpickle here
            said = str(error).strip().splitlines()[0].removeprefix("System error: ")
            raise ConfigError(
                f"{job.asker}: a node of the Ray cluster cannot open the pipeline ({said}): install there "
                "what the driver has; modules of your own travel by "
                'ray.init(runtime_env={"working_dir": "."})'
            ) from None
        _kept = (job.token, open_work())
    return _kept[1]


def _use_threads(threads: int) -> None:
    """Use no more threads than the task has cores: there is a task on each of the others."""
    import pyarrow as pa
    import torch

    if threads == 1:
        os.environ[PARALLELISM] = "false"  # read whenever a tokenizer encodes
    torch.set_num_threads(threads)
    pa.set_cpu_count(threads)


def _portable(error: BaseException, asker: str) -> BaseException:
    """An error that reaches the driver."""
    try:
        if isinstance(pickle.loads(pickle.dumps(error)), Exception):
            return error
    except Exception:  # whatever its own methods raise
        pass
    try:
        said = str(error)
    except Exception as of_it:
        said = f"(its text cannot be had: {type(of_it).__qualname__})"
    return WorkerError(f"{asker}: {type(error).__qualname__}: {said}")
