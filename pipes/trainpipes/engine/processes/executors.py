"""Where functions are called, and the tasks of a job run: in threads, in processes, or on Ray."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from trainpipes._internal.activity import TURN
from trainpipes._internal.checks import require, whole_number
from trainpipes._internal.locks import Flag, get, wait_for
from trainpipes._internal.pool import Future, Pool
from trainpipes.engine.calling import Answer, RowCall, ThreadMap
from trainpipes.engine.processes.process_pool import process_pool
from trainpipes.engine.processes.process_worker import Call, portable
from trainpipes.engine.processes.worker_pool import WorkerPool
from trainpipes.errors import TrainpipesError, WorkerError
from trainpipes.filesystems.places import TaskStopped, set_stop_check
from trainpipes.interfaces.watched_calls import Place

T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")

#: Seconds.
FOREVER = 1e6


class Executor(Protocol):
    """Runs tasks: ``Threads(n)``, ``Processes(n)`` or ``Ray(address)``; a context."""

    @property
    def workers(self) -> int:
        """How many tasks run at once; on Ray, about."""
        ...

    def __enter__(self) -> Executor: ...

    def __exit__(self, *_: object) -> None: ...

    def check_path(self, path: str, option: str) -> None:
        """Raise ConfigError where a worker cannot get at a path or URL, which ``option`` named."""
        ...

    def _answering(
        self,
        call: Any,
        *,
        timeout: float | None = None,
        idle: float | None = None,
        shares: bool = False,
    ) -> Any:
        """Workers that answer a call: see ``WorkerPool``, and ``ThreadMap`` of a ``RowCall``."""
        ...

    def map_unordered(
        self, fn: Callable[[T, S], R], tasks: Iterable[T], open_state: Callable[[], S]
    ) -> Iterator[tuple[T, R]]:
        """Each task with what ``fn(task, state)`` gives, as they end. Closed early, it ends the others.

        Args:
            fn: does a task; pickles, but for threads, as ``open_state`` does.
            tasks: taken one by one, when there is room.
            open_state: called once in each worker.
        """
        ...


class _OnThisMachine:
    """What executors without a cluster share: nothing to open, and any path is seen."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def check_path(self, path: str, option: str) -> None: ...


@dataclass(frozen=True)
class Threads(_OnThisMachine):
    """Threads of this process. With one, the thread that asks does the work of a writer.

    Args:
        n: how many.

    >>> import trainpipes as tp
    >>> list(tp.from_dataset(range(3)).map(lambda x: x + 1, executor=tp.Threads(2)))
    [1, 2, 3]
    """

    n: int = 1

    def __post_init__(self) -> None:
        whole_number(self.n, 1, "Threads(n)", "how many work at once")

    @property
    def workers(self) -> int:
        return self.n

    def _answering(
        self,
        call: RowCall,
        *,
        timeout: float | None = None,
        idle: float | None = None,
        shares: bool = False,
    ) -> ThreadMap:
        return ThreadMap(call, self.n, shares)

    def map_unordered(
        self, fn: Callable[[T, S], R], tasks: Iterable[T], open_state: Callable[[], S]
    ) -> Iterator[tuple[T, R]]:
        here, states, stop = threading.local(), list[S](), Flag()

        def check() -> None:
            if stop.is_set():
                raise TaskStopped

        def do(task: T) -> R:
            if not hasattr(here, "state"):
                here.state = open_state()
                states.append(here.state)
            return fn(task, here.state)

        def do_in_thread(task: T) -> R:
            set_stop_check(check)
            return do(task)

        try:
            if self.n == 1:
                yield from ((task, do(task)) for task in tasks)
            else:
                yield from _in_threads(do_in_thread, tasks, self.n, stop.set)
        finally:
            for state in states:
                getattr(state, "close", lambda: None)()


@dataclass(frozen=True)
class Processes(_OnThisMachine):
    """Processes of this machine, which end with this one. A script uses them below
    ``if __name__ == "__main__":``.

    Args:
        n: how many; one a core if left out.
        start_method: "forkserver", "spawn" or "fork", or a context of ``multiprocessing``; by default the
            first that the platform has, and for a ``Loader`` that of ``multiprocessing``. A fork copies locks
            that threads hold, and may hang.

    >>> import trainpipes as tp
    >>> tp.Loader(tp.from_dataset(range(8)).batch(4), executor=tp.Processes(2))
    Loader(num_workers=2) over
      from_dataset(range of 8 items)
        .batch(4)
    """

    n: int | None = None
    start_method: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.n is not None:
            whole_number(self.n, 1, "Processes(n)", "how many work at once")
        there = multiprocessing.get_all_start_methods()
        good = not isinstance(self.start_method, str) or self.start_method in there
        require(good, "Processes(start_method)", f"one of {there} here", self.start_method)

    @property
    def workers(self) -> int:
        return self.n or cores()

    @property
    def _forks(self) -> bool:
        """Whether they are forks of this process, which get all that it has."""
        method = self.start_method
        return (method if isinstance(method, str | None) else method.get_start_method()) == "fork"

    def check_path(self, path: str, option: str) -> None:
        refuse_memory(path, option)

    def _answering(
        self,
        call: Call,
        *,
        timeout: float | None = None,
        idle: float | None = None,
        shares: bool = False,
    ) -> WorkerPool:
        return process_pool(call, self.workers, self.start_method, timeout, idle)

    def map_unordered(
        self, fn: Callable[[T, S], R], tasks: Iterable[T], open_state: Callable[[], S]
    ) -> Iterator[tuple[T, R]]:
        call = _TaskCall(fn, open_state, f"executor={self}")
        pool = self._answering(call, idle=FOREVER)

        def do(task: T) -> R:
            results, error = pool.submit([task], None)()
            if isinstance(error, _TaskDied):
                raise WorkerError(
                    f"{error} while making {task}; the same call goes on after the files that are whole, "
                    "with fewer processes if memory ran out: executor=Processes(n)"
                )
            if error is not None:
                raise error
            made: R = results[0]
            return made

        try:
            yield from _in_threads(do, tasks, self.workers, pool.close)
        finally:
            pool.close()
            pool.join()


class _TaskDied(TrainpipesError):
    """Workers died one after the other as they did a task."""


@dataclass(eq=False)
class _TaskCall:
    """Does tasks in worker processes, one at a time.

    Args:
        fn: of a task and a state.
        open_state: called once in each process.
    """

    fn: Callable[[Any, Any], Any]
    open_state: Callable[[], Any]
    said: str
    without = "leave executor out"
    while_waiting = TURN
    shares = False
    _state: list[Any] = field(default_factory=list)  # once it is open

    def begin(self, worker: int) -> None:
        use_threads(1)

    def answer(self, items: Sequence[Any], words: Any) -> Answer:
        [task] = items
        try:
            if not self._state:
                self._state.append(self.open_state())
            return [self.fn(task, self._state[0])], None
        except Exception as error:
            return [], portable(error, str(task), is_task=True)

    def noticed(self) -> None: ...

    def hear(self, noticed: None) -> None: ...

    def leaves_out(self, stage: int) -> bool:
        return False

    def objects(self, sent_here: Sequence[Any]) -> Sequence[Any]:
        return sent_here

    def where(self, place: Place) -> str:
        return ""

    def died_at(self, error: TrainpipesError, how: str, place: Place) -> Answer:
        return [], _TaskDied(how)


def _in_threads(
    do: Callable[[T], R], tasks: Iterable[T], threads: int, stop: Callable[[], None]
) -> Iterator[tuple[T, R]]:
    """Each task with its result, as they end; at the end none runs, once it has seen that it is to stop."""
    pool = Pool(threads, shares=False, name="trainpipes-task", pauses=False)
    waiting, running, ended = iter(tasks), dict[Future, T](), SimpleQueue[Future]()

    def begin(task: T) -> None:
        future = Future(partial(do, task), ended.put)
        running[future] = task  # first: Ctrl-C may come as soon as it runs
        pool.begin(future)

    try:
        while feed(waiting, running, threads, begin):
            future = get(ended)
            yield running.pop(future), future.result()
    finally:
        stop()
        pool.close()
        for future in running:
            if future.begun:
                wait_for(future.finished)


def refuse_memory(path: str, option: str) -> None:
    rule = (
        "a path, or a URL of storage: others work there, who do not see the memory of this process"
    )
    require(not path.startswith("memory://"), option, rule, path)


def cores() -> int:
    mine = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if mine is None else len(mine(0))


def use_threads(threads: int) -> None:
    """Let a worker process use no more threads than its share of the cores."""
    import pyarrow as pa
    import torch

    if threads == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read whenever a tokenizer encodes
    torch.set_num_threads(threads)
    pa.set_cpu_count(threads)


def feed(waiting: Iterator[T], running: Sized, most: int, begin: Callable[[T], None]) -> bool:
    """Begin tasks that wait until so many run; whether any does."""
    for task in islice(waiting, max(0, most - len(running))):
        begin(task)
    return bool(len(running))
