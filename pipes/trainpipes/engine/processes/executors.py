"""Where functions are called, and the tasks of a job run: in threads, in worker processes of this machine,
or on Ray.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from multiprocessing import connection, forkserver
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from trainpipes._internal.activity import TURN
from trainpipes._internal.checks import require, whole_number
from trainpipes._internal.locks import Flag, get, wait_for
from trainpipes._internal.pool import Future, Pool
from trainpipes.engine.calling import Answer, RowCall, ThreadMap
from trainpipes.engine.processes.channel import Channel, Message, pickled, unpickled
from trainpipes.engine.processes.process_worker import Call, portable, work
from trainpipes.engine.processes.worker_pool import (
    NO_PICKLE,
    PATIENCE,
    Died,
    Task,
    WorkerPool,
    no_pickle,
    of_no_row,
)
from trainpipes.errors import ConfigError, TrainpipesError, WorkerError, how_ended
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
        n = whole_number(self.n, 1, "Threads(n)", "how many work at once")
        object.__setattr__(self, "n", n)

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
            n = whole_number(self.n, 1, "Processes(n)", "how many work at once")
            object.__setattr__(self, "n", n)
        there, method = multiprocessing.get_all_start_methods(), self.start_method
        good = method in (None, *there) or hasattr(method, "get_start_method")
        require(good, "Processes(start_method)", f"one of {there} here", method)

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
    without = "use executor=Threads(1)"
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


#: The process that imported this; its fork server does not serve its forks.
HOME = os.getpid()


def process_pool(
    call: Call,
    workers: int,
    method: Any = None,
    timeout: float | None = None,
    idle: float | None = None,
) -> WorkerPool:
    """Processes that answer a call.

    Args:
        method: how they start, by name or as a context of ``multiprocessing``.
        timeout, idle: see ``WorkerPool``.
    """
    if multiprocessing.current_process().daemon:
        text = "a daemonic process may start no others, and this one is: make it with daemon=False, or "
        raise of_no_row(ConfigError, call.said, text + call.without)
    if method is None:  # not fork, which copies locks of other threads
        there = "forkserver" in multiprocessing.get_all_start_methods()
        method = "forkserver" if there and os.getpid() == HOME else "spawn"
    context: Any = multiprocessing.get_context(method) if isinstance(method, str) else method
    payload: Call | list[bytearray] | None = call if context.get_start_method() == "fork" else None

    def worker(number: int) -> ProcessWorker:
        nonlocal payload
        if payload is None:
            try:
                payload = [bytearray(part) for part in pickled(call)]  # for all of them
            except NO_PICKLE as error:
                raise no_pickle(call, "the function", "", error) from error
        return ProcessWorker(number, call, context, payload, timeout)

    return WorkerPool(call, workers, worker, timeout, idle)


#: Seconds that a system can wait; a longer timeout is no end.
LONGEST = 2_000_000


class ProcessWorker:
    """One worker process.

    Args:
        payload: the call, pickled where it is not forked.
        timeout: see ``WorkerPool``.
    """

    def __init__(
        self,
        number: int,
        call: Call,
        context: Any,
        payload: Call | list[bytearray],
        timeout: float | None,
    ) -> None:
        self._number, self._said, self._without = number, call.said, call.without
        self._context = context
        self._payload = payload
        self._timeout = timeout if timeout is not None and timeout < LONGEST else None
        self._place = context.RawArray("q", Place())
        self._process: Any = None
        self._exit_code: int | None = None
        self.is_ready = False
        self._connection, self._its_end = socket.socketpair()
        self._channel = Channel(self._connection)

    def begin(self) -> None:
        if self._context.get_start_method() == "forkserver":
            preload(self._context, "__main__", work.__module__)
        args = self._its_end, self._payload, self._place, self._number
        process = self._context.Process(target=work, args=args, name="trainpipes-map", daemon=True)
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise self._unready("the server of worker processes has ended") from error
        finally:
            self._its_end.close()
        self._process = process

    def has_died(self) -> bool:
        return self.is_ready and bool(connection.wait([self._process.sentinel], 0))

    def ask(self, task: Task) -> tuple[list[Any], BaseException | None, Any]:
        return self.answer(task.message)

    def answer(self, message: Message) -> tuple[list[Any], BaseException | None, Any]:
        """What the process answers to a message."""
        try:
            problem = None if self.is_ready else unpickled(self._receive())
            if problem is None:
                self.is_ready = True
                self._channel.send(message)
                answer = self._receive(self._timeout)
        except (EOFError, ConnectionError):
            how = self.end()
            unready = None if self.is_ready else self._unready(how)
            if unready is not None and (self._exit_code or 0) >= 0:  # it ended by itself
                raise unready from None
            raise Died(how, self._at_work(), unready=unready) from None
        if problem is not None:
            raise (
                problem
                if isinstance(problem, BaseException)
                else of_no_row(ConfigError, self._said, f"{problem}, or {self._without}")
            )
        given: tuple[list[Any], BaseException | None, Any] = unpickled(answer)
        return given

    def _receive(self, timeout: float | None = None) -> Message:
        place = self._at_work()
        while not (ready := connection.wait([self._connection, self._process.sentinel], timeout)):
            if place == self._at_work():  # it has been at this row since the last look
                self._process.kill()
                self.end()
                raise Died(f"a worker process was ended after {timeout:g} s (timeout)", place, 2)
            place = self._at_work()
        if self._connection not in ready:
            raise EOFError
        return self._channel.receive()

    def _at_work(self) -> Place:
        return Place(*self._place)

    def hang_up(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        self._connection.close()

    def end(self) -> str:
        """End the process; how it ended, in words."""
        self._connection.close()
        process, self._process = self._process, None
        if process is None:
            return ""
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join(PATIENCE)
        self._exit_code = process.exitcode
        return f"worker process {process.pid} {how_ended(process.exitcode)}"

    def _unready(self, how: str) -> TrainpipesError:
        cure = (
            'a program that is a script runs its pipeline below `if __name__ == "__main__":`, since workers '
            "import the script"
        )
        return of_no_row(WorkerError, self._said, f"{how} before it was ready; {cure}")


def preload(context: Any, *modules: str) -> None:
    """Import what workers need once, in the fork server, unless the program has set its preload."""
    server = getattr(forkserver, "_forkserver", None)
    if getattr(server, "_preload_modules", None) == ["__main__"]:
        context.set_forkserver_preload([*modules])
