"""Tasks on a Ray cluster, in a worker process, and how they are ended.

A user's error is a task's result: as an exception, Ray would log it, and might run the task again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainpipes.errors import ConfigError
from trainpipes.storage.executor import Stopped, portable, set_stop_check, use_threads
from trainpipes.version import __version__

#: Seconds that tasks which are asked to end are waited for before they are cancelled, and then before their
#: processes are killed.
PATIENCE = 5.0


@dataclass(frozen=True)
class Job:
    token: str
    shared: list[Any]
    every: float
    version: str = __version__

    @property
    def flag(self) -> str:
        return f"trainpipes-stop-{self.token}"


@dataclass(frozen=True)
class Failed:
    """A task failed by an error that another try would not cure."""

    error: BaseException


class StopFlag:
    """That it is there asks the tasks of a job to end."""


def do_task(task: Any, job: Job) -> Any:
    next_look = 0.0

    def look() -> None:
        nonlocal next_look
        if time.monotonic() >= next_look:
            import ray

            next_look = time.monotonic() + job.every
            with suppress(Exception):  # there is no such actor
                ray.get_actor(job.flag)
                raise Stopped

    set_stop_check(look)
    try:
        look()
        fn, state = _opened(job)
        return fn(task, state)
    except Stopped:
        return Failed(RuntimeError("the task was asked to end"))
    except (Exception, SystemExit) as error:  # by sys.exit() Ray would run it again
        return Failed(portable(error, task))


#: The job that this process works for, its function, and the state.
_kept: tuple[str, Callable[[Any, Any], Any], Any] | None = None


def _opened(job: Job) -> tuple[Callable[[Any, Any], Any], Any]:
    global _kept
    if _kept is None or _kept[0] != job.token:
        import ray

        if job.version != __version__:
            raise ConfigError(
                f"a node of the Ray cluster has trainpipes {__version__}, and the driver {job.version}: "
                'install the same there, or let ray.init() ship the driver\'s by runtime_env={"py_modules": '
                "[trainpipes]}"
            )
        _kept = None  # before the next one takes memory, too
        use_threads(1)
        try:
            fn, open_state = ray.get(job.shared[0])
        except ray.exceptions.RaySystemError as error:  # it does not unpickle here
            said = str(error).strip().splitlines()[0].removeprefix("System error: ")
            raise ConfigError(
                f"a node of the Ray cluster cannot open the pipeline ({said}): install there what the driver "
                'has; modules of your own travel by ray.init(runtime_env={"working_dir": "."})'
            ) from None
        _kept = (job.token, fn, open_state())
    return _kept[1:]


def end_tasks(job: Job, references: list[Any]) -> None:
    """Ask the tasks of a job to end, and cancel those that go on: Ray (2.60) may abort this process where a
    task is cancelled as it ends.
    """
    import ray

    if not references or not ray.is_initialized():
        return
    flag = None
    with suppress(Exception):
        flag = ray.remote(num_cpus=0)(StopFlag).options(name=job.flag).remote()
    timeout = job.every + PATIENCE if flag else 0
    _, references = ray.wait(references, num_returns=len(references), timeout=timeout)
    for force in (False, True):
        for reference in references:
            with suppress(Exception):
                ray.cancel(reference, force=force)
        if references:
            _, references = ray.wait(references, num_returns=len(references), timeout=PATIENCE)
    if flag is not None:
        with suppress(Exception):
            ray.kill(flag)
