"""Tasks on a Ray cluster: what all tasks of a job share, their results, and how they end.

A user's error is a task's result: as an exception, Ray would log it, and might run the task again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainpipes.engine.processes.executors import use_threads
from trainpipes.engine.processes.process_worker import portable
from trainpipes.errors import ConfigError, WorkerError
from trainpipes.filesystems.places import TaskStopped, set_stop_check
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
