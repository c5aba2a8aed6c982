"""Waits that Ctrl-C ends: they wait a little at a time, as a signal is not seen during a wait in C."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")

#: Seconds until a signal just before a wait is seen.
TICK = 0.1


class InterruptibleLock(type(threading.RLock())):  # type: ignore[misc]  # its end is in C
    """A lock for a ``with`` statement that Ctrl-C never leaves locked. Windows and readers of remote files
    hold it while they read, so the thread that trains may wait for it long.
    """

    def __enter__(self) -> bool:
        try:
            while not self.acquire(timeout=TICK):
                pass
        except BaseException:
            with suppress(RuntimeError):  # it was not acquired
                self.release()
            raise
        return True


def wait_for(event: threading.Event) -> None:
    while not event.wait(TICK):
        pass


def result_of(future: Future[T]) -> T:
    while not future.done():
        wait([future], TICK)
    return future.result()


def get(queue: SimpleQueue[T]) -> T:
    while True:
        try:
            return queue.get(timeout=TICK)
        except Empty:
            pass
