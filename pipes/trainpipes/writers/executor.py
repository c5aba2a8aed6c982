"""Where the tasks of a job run: in threads, in processes, or on Ray."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import connection
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from trainpipes._internal.checks import require, whole_number
from trainpipes._internal.locks import TICK, Flag, get, start, wait_for
from trainpipes._internal.pool import Future, Pool
from trainpipes.engine.processes.process_pool import preload
from trainpipes.errors import ConfigError, WorkerError, how_ended
from trainpipes.filesystems.places import TaskStopped, set_stop_check
from trainpipes.tokenizers.engine import VARIABLE

T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")

#: What the server that forks processes imports once for all of them.
PRELOADED = "trainpipes.writers.write"


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
    """Threads of this process. With one, the thread that asks does the work.

    Args:
        n: how many.
    """

    n: int = 1

    def __post_init__(self) -> None:
        whole_number(self.n, 1, "Threads(n)", "how many work at once")

    @property
    def workers(self) -> int:
        return self.n

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
                yield from _in_threads(do_in_thread, tasks, self.n, stop)
        finally:
            for state in states:
                getattr(state, "close", lambda: None)()


@dataclass(frozen=True)
class Processes(_OnThisMachine):
    """Processes of this machine, which end with this one. A script uses them below
    ``if __name__ == "__main__":``.

    Args:
        n: how many; one a core if left out.
    """

    n: int | None = None

    def __post_init__(self) -> None:
        if self.n is not None:
            whole_number(self.n, 1, "Processes(n)", "how many work at once")

    @property
    def workers(self) -> int:
        return self.n or cores()

    def check_path(self, path: str, option: str) -> None:
        refuse_memory(path, option)

    def map_unordered(
        self, fn: Callable[[T, S], R], tasks: Iterable[T], open_state: Callable[[], S]
    ) -> Iterator[tuple[T, R]]:
        work = partial(_in_processes, self.workers, _pickled((fn, open_state), self), iter(tasks))
        stop, coming = Flag(), SimpleQueue[Any]()
        # In a thread, which gets no signals: of concurrent.futures, Ctrl-C may leave a lock held.
        ended = Future(partial(work, stop, coming.put), coming.put)
        pool = Pool(1, shares=False, name="trainpipes-processes", pauses=False)
        try:
            pool.begin(ended)
            while (done := get(coming)) is not ended:
                yield done
            ended.result()
        finally:
            stop.set()
            pool.close()
            if ended.begun:
                wait_for(ended.finished)


def _in_threads(
    do: Callable[[T], R], tasks: Iterable[T], threads: int, stop: Flag
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
        stop.set()
        pool.close()
        for future in running:
            if future.begun:
                wait_for(future.finished)


def _in_processes(
    workers: int, payload: bytes, waiting: Iterator[T], stop: Flag, put: Callable[[Any], None]
) -> None:
    """Put each task with its result, as they end, until there are no more, or it is to stop."""
    context = _context()
    theirs, ours = context.Pipe(duplex=False)  # closed with this process
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(theirs, payload))
    running: dict[Any, T] = {}
    others, ours_now, whole = {*multiprocessing.active_children()}, set[Any](), False

    def submit(task: T) -> None:
        running[pool.submit(_do, task)] = task
        ours_now.update({*multiprocessing.active_children()} - others)

    try:
        while not stop.is_set() and feed(waiting, running, workers, submit):
            for future in wait(running, TICK, FIRST_COMPLETED)[0]:
                put((running.pop(future), future.result()))
        whole = not running
    except BrokenProcessPool as error:
        pool.shutdown()
        raise _died([*running.values()], ours_now) from error
    finally:
        if not whole:
            ours.send_bytes(b"end")
        pool.shutdown(cancel_futures=True)
        ours.close()
        theirs.close()


def checked_executor(value: Any, caller: str, default: Executor) -> Executor:
    if value is None:
        return default
    rule = "Threads(n), Processes(n) or Ray(address) of trainpipes.writers, or None"
    require(hasattr(type(value), "map_unordered"), f"{caller}(executor)", rule, value)
    found: Executor = value
    return found


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
        os.environ[VARIABLE] = "false"  # read whenever a tokenizer encodes
    torch.set_num_threads(threads)
    pa.set_cpu_count(threads)


def portable(error: BaseException, task: object) -> BaseException:
    try:
        if isinstance(pickle.loads(pickle.dumps(error)), Exception):
            return error
    except Exception:  # its own methods may do anything
        pass
    try:
        said = str(error)
    except Exception as of_it:
        said = f"(its text cannot be had: {type(of_it).__qualname__})"
    return WorkerError(f"{type(error).__qualname__}: {said} (at {task})")


def feed(waiting: Iterator[T], running: Sized, most: int, begin: Callable[[T], None]) -> bool:
    """Begin tasks that wait until so many run; whether any does."""
    for task in islice(waiting, max(0, most - len(running))):
        begin(task)
    return bool(len(running))


def _died(tasks: list[Any], workers: Iterable[Any]) -> WorkerError:
    ended = [one for one in workers if one.exitcode not in (None, 0, -signal.SIGTERM)]
    said = [f"process {one.pid} {how_ended(one.exitcode)}" for one in ended]
    who = [*said, "a worker process has died"][0]
    return WorkerError(
        f"{who} while making {' or '.join(sorted(map(str, tasks)))}; the same call goes on after the files "
        "that are whole, with fewer processes if memory ran out: executor=Processes(n). A program that is a "
        'script calls it below `if __name__ == "__main__":`, since processes import the script'
    )


def _pickled(work: Any, executor: Processes) -> bytes:
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"executor={executor}: the pipeline must pickle to reach a process, and does not ({error}); "
            "define functions at the top of a module, or leave executor out"
        ) from error


def _context() -> Any:
    """Starts processes from a server: a fork of this one would copy locks that other threads hold."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    preload(context, PRELOADED)
    return context


#: What this worker process does: pickled, and then opened.
_payload = b""
_work: tuple[Callable[[Any, Any], Any], Any] | None = None


def _begin(parent: Any, payload: bytes) -> None:
    global _payload
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    start(threading.Thread(target=_end_with, args=(parent,), daemon=True))
    use_threads(1)
    _payload = payload


def _end_with(parent: Any) -> None:
    connection.wait([parent])
    os._exit(1)


def _do(task: Any) -> Any:
    global _work
    try:
        if _work is None:
            fn, open_state = pickle.loads(_payload)
            _work = fn, open_state()
        return _work[0](task, _work[1])
    except Exception as error:
        found = portable(error, task)
        if found is error:
            raise
        raise found from None
