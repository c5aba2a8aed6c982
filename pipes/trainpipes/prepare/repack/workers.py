"""A few threads that do tasks which do not depend on each other, and stop together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

__all__ = ["Stopped", "Workers"]

T = TypeVar("T")


class Stopped(Exception):
    """Raised in a task when another one has failed."""


class Workers:
    """Threads for one job.

    Args:
        threads: how many; with one, tasks are done by the thread that asks.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._stop = threading.Event()

    def go_on(self) -> None:
        """Called by tasks now and then.

        Raises:
            Stopped: they are to stop.
        """
        if self._stop.is_set():
            raise Stopped

    def each(self, work: Callable[[T], Any], items: Iterable[T]) -> Iterator[tuple[T, Any]]:
        """Do a task for each item. Gives what came of it as tasks end, in whatever order."""
        if self.threads < 2:
            for item in items:
                yield item, work(item)
            return
        waiting = iter(items)
        running: dict[Future[Any], T] = {}
        pool = ThreadPoolExecutor(self.threads, "repack")
        try:
            while True:
                while len(running) < self.threads:
                    try:
                        item = next(waiting)
                    except StopIteration:
                        break
                    running[pool.submit(work, item)] = item
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BaseException:
            self._stop.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def in_turn(self) -> InTurn:
        """A thread that does one task after the other."""
        return InTurn(self.threads > 1)


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
