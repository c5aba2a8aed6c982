"""Locks that no fork inherits locked, waits that Ctrl-C ends, and sets that let go of what nobody holds."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar
from weakref import ref

T = TypeVar("T")


class Living(Generic[T]):
    """A set of objects that lets go of those that nobody else holds. In a ``WeakSet``, Ctrl-C during the
    callback for an object that goes would be lost.
    """

    def __init__(self) -> None:
        self._refs: deque[ref[T]] = deque()

    def add(self, one: T) -> None:
        for _ in range(2):  # more than come
            with suppress(IndexError, ValueError):  # another thread was there
                if (first := self._refs[0])() is None:
                    self._refs.remove(first)
                else:
                    self._refs.rotate(-1)
        self._refs.append(ref(one))

    def clear(self) -> None:
        self._refs.clear()

    def __iter__(self) -> Iterator[T]:
        for one in list(self._refs):
            if (found := one()) is not None:
                yield found


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


class ForkLock(InterruptibleLock):
    """One that is free in a forked child."""

    def __init__(self) -> None:
        _all.add(self)


_all: Living[ForkLock] = Living()


def _renew() -> None:
    for lock in list(_all):
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


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
