"""Who does the tasks of a step, which do not depend on each other: a few threads, or a Ray cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from trainpipes.integrations.on_ray import RayCluster

T = TypeVar("T")

#: Called by a task now and then, with the rows done since.
Tell: TypeAlias = Callable[[int], None]


class Task(Protocol):
    """Does one task of a step."""

    def __call__(self, item: Any, tell: Tell, /) -> Any:
        """Do it; gives what came of it."""

    def named(self, item: Any, /) -> str:
        """What it makes, for messages."""


class Workers(Protocol):
    """Does tasks."""

    def each(self, task: Task, items: Iterable[T], tell: Tell) -> Iterator[tuple[T, Any]]:
        """Do a task for each item. Gives what came of it as tasks end, in whatever order."""


class Stopped(Exception):
    """Raised in a task when another one has failed."""


class Threads:
    """Threads of this process.

    Args:
        count: how many; with one, tasks are done by the thread that asks.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._stop = threading.Event()

    def each(self, task: Task, items: Iterable[T], tell: Tell) -> Iterator[tuple[T, Any]]:
        """Do a task for each item. Gives what came of it as tasks end, in whatever order."""
        if self._count < 2:
            for item in items:
                yield item, task(item, tell)
            return
        told = partial(self._go_on, tell)
        waiting = iter(items)
        running: dict[Future[Any], T] = {}
        pool = ThreadPoolExecutor(self._count, "repack")
        try:
            while True:
                while len(running) < self._count:
                    try:
                        item = next(waiting)
                    except StopIteration:
                        break
                    running[pool.submit(task, item, told)] = item
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BaseException:
            self._stop.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _go_on(self, tell: Tell, rows: int) -> None:
        if self._stop.is_set():
            raise Stopped
        tell(rows)

    def in_turn(self) -> InTurn:
        """A thread that does one task after the other."""
        return InTurn(self._count > 1)


class RayTasks:
    """Tasks on a Ray cluster.

    Args:
        cluster: a connection to it.
    """

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    def each(self, task: Task, items: Iterable[T], tell: Tell) -> Iterator[tuple[T, Any]]:
        """Do a task for each item. Gives what came of it as tasks end, in whatever order."""
        opened = partial(_counting, task)
        # Rows are told as tasks end: an actor that counts them meanwhile would be a process for each step.
        done = self._cluster.run(opened, items, name_of=task.named)
        with closing(done):
            for item, (result, rows) in done:
                tell(rows)
                yield item, result


def _counting(task: Task) -> Callable[[Any, Tell], tuple[Any, int]]:
    """A task, in a process of Ray, that gives its rows besides what came of it."""

    def do(item: Any, tell: Tell) -> tuple[Any, int]:
        rows = 0

        def count(more: int) -> None:
            nonlocal rows
            rows += more
            tell(more)  # which ends the task where it is asked to

        return task(item, count), rows

    return do


class InTurn:
    """Does tasks in order, each while the next one is prepared.

    Args:
        apart: whether in a thread of its own.
    """

    def __init__(self, apart: bool) -> None:
        self._pool = ThreadPoolExecutor(1, "repack") if apart else None
        self._running: Future[Any] | None = None

    def __enter__(self) -> InTurn:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def do(self, work: Callable[[], Any]) -> None:
        """Begin a task, once the one before has ended."""
        if self._pool is None:
            work()
            return
        self.finish()
        self._running = self._pool.submit(work)

    def wait(self) -> None:
        """Wait for the last task, whatever came of it."""
        if self._running is not None:
            wait([self._running])

    def finish(self) -> None:
        """Wait for the last task, and raise what it raised."""
        running, self._running = self._running, None
        if running is not None:
            running.result()
