"""What processes of a Ray cluster do: tasks of a job, and calls of functions.

A user's error is a task's result: as an exception, Ray would log it, and might run the task again.

A run at which a process has died, or whose calls have a time limit, is worked on in a child of the task's
process, so that the row at which it dies is known.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from trainpipes.engine.processes import channel
from trainpipes.engine.processes.channel import Message, pickled
from trainpipes.engine.processes.executors import ProcessWorker, use_threads
from trainpipes.engine.processes.process_worker import Call, answer_to, portable
from trainpipes.engine.processes.worker_pool import Died
from trainpipes.errors import ConfigError, WorkerError
from trainpipes.filesystems.places import TaskStopped, set_stop_check
from trainpipes.interfaces.watched_calls import Place, current, set_current
from trainpipes.version import __version__

INSTALL = (
    "install there what the driver has; modules of your own travel by "
    'ray.init(runtime_env={"working_dir": "."})'
)
#: Seconds between two looks of a task at whether it is to end.
LOOK_FOR_END = 2.0
#: The last jobs of this process that are over.
ended: deque[str] = deque(maxlen=64)


@dataclass(frozen=True)
class Job:
    """What all tasks of one job share: its function and state, sent once."""

    token: str
    shared: list[Any]
    version: str = __version__
    #: Jobs of this process that are over.
    ended: tuple[str, ...] = field(default_factory=lambda: tuple(ended), repr=False)

    @property
    def flag(self) -> str:
        return f"trainpipes-stop-{self.token}"

    def end(self) -> None:
        """Note that it is over, for jobs to come."""
        if self.token not in ended:
            ended.append(self.token)


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
    with at_work_for(job):
        try:
            look()
            fn, state = opened(job, lambda work: (work[0], work[1]()))
            return fn(task, state)
        except TaskStopped:
            return Failed(RuntimeError("the task was asked to end"))
        except (Exception, SystemExit) as error:  # by sys.exit() Ray would run it again
            return failed(error, str(task))
        finally:
            set_stop_check(None)


#: What the jobs that this process works for share, opened, by their tokens, the last used one last; for how
#: many at most, where no job says which are over; and what sets the process as it was for each.
_opened: dict[str, Any] = {}
MOST_OPENED = 16
_settings: dict[str, Callable[[], None]] = {}


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
        for token in job.ended:  # before the next one takes memory, too
            _opened.pop(token, None)
        while len(_opened) >= MOST_OPENED:
            del _opened[next(iter(_opened))]
        try:
            shared = ray.get(job.shared[0])
        except ray.exceptions.RaySystemError as error:  # it does not unpickle here
            said = first_line(error).removeprefix("System error: ")
            raise ConfigError(
                f"a node of the Ray cluster cannot open the pipeline ({said}): {INSTALL}"
            ) from None
        _opened[job.token] = opens(shared)
    _opened[job.token] = _opened.pop(job.token)
    return _opened[job.token]


@contextmanager
def at_work_for(job: Job) -> Iterator[None]:
    """The process as tasks of a job left it; then as others did, whose tasks it does, too."""
    before = _as_it_is()
    try:
        if job.token in _settings:
            _settings[job.token]()
        else:
            use_threads(1)
            channel.pickler = by_value()
        yield
    finally:
        _settings[job.token] = _as_it_is()
        for token in _settings.keys() - _opened.keys():
            del _settings[token]
        before()


def _as_it_is() -> Callable[[], None]:
    """A function that sets what a process has one of as it is now."""
    info, collates = torch_worker._worker_info, torch_collate.default_collate_fn_map
    stacks, pickler, at_work = collates[torch.Tensor], channel.pickler, current()
    threads, of_arrow = torch.get_num_threads(), pa.cpu_count()
    of_tokenizers = os.environ.get("TOKENIZERS_PARALLELISM")
    of_python, of_torch = random.getstate(), torch.get_rng_state()
    of_numpy = np.random.get_state(legacy=False)

    def set_again() -> None:
        torch_worker._worker_info, collates[torch.Tensor] = info, stacks
        channel.pickler = pickler
        set_current(at_work)
        torch.set_num_threads(threads)
        pa.set_cpu_count(of_arrow)
        os.environ.pop("TOKENIZERS_PARALLELISM", None)
        if of_tokenizers is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = of_tokenizers
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)

    return set_again


@cache
def by_value() -> type[channel.Pickler]:
    """Pickles classes and functions of the program as Ray does: in its processes ``__main__`` is its own."""
    from ray import cloudpickle

    class ByValue(channel.Pickler, cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, io.TextIOWrapper):  # it would give what the file holds
                raise TypeError(f"cannot pickle {type(value).__name__!r} object")
            given = super().reducer_override(value)
            return (
                cloudpickle.Pickler.reducer_override(self, value)
                if given is NotImplemented
                else given
            )

    return ByValue


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
        vars(call)["begin"] = lambda _: None  # children have it as it is here
        return call

    with at_work_for(job):
        try:
            call = opened(job, begun)
            if rows.is_again or rows.timeout is not None:
                answer = _in_a_child(call, rows)
            else:
                answer = answer_to(call, own(rows.parts), [*Place()])
            return [np.frombuffer(part, np.uint8) for part in answer]
        except Died as death:
            # A death before, of which no row is known, is taken to have been at this one.
            tries = min(death.tries, 2) if rows.is_again else death.tries
            return Death(str(death), death.place, tries)
        except (Exception, SystemExit) as error:
            return failed(error, "the function")


def _in_a_child(call: Call, rows: RowsToCall) -> Message:
    context = multiprocessing.get_context("fork")
    worker = ProcessWorker(rows.number, call, context, call, rows.timeout)
    worker.begin()
    try:
        return pickled(worker.answer(own(rows.parts)))
    finally:
        worker.hang_up()
        worker.end()
