from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from trainpipes.engine.interrupts import InterruptibleLock
from trainpipes.engine.pool import Future, Pool, waits_for_server
from trainpipes.errors import UnreachableError

#: Threads of a process that wait for servers, and how many of them one reader keeps busy.
MAX_THREADS, BUSY = 32, 16
#: Bytes that a process fetches ahead, unless the user says otherwise.
PREFETCH_BYTES = 256 << 20
#: What one reader has fetched ahead at most, however small each is: all of it is looked at for each one more.
MOST_HELD = 4 * MAX_THREADS
#: Bytes that each reader has fetched ahead, by its process and itself.
_held: dict[tuple[int, int], float] = {}


@cache
def waiting() -> Pool:
    """The threads that wait for servers, shared by all readers of the process."""
    return Pool(MAX_THREADS)


class Ahead:
    """What is opened ahead, in the order in which it will be needed. Any thread may ask."""

    def __init__(
        self, open_block: Callable[[Any], Any], size: Callable[[Any], float], most: int
    ) -> None:
        self._open, self._size, self._most = open_block, size, most
        weakref.finalize(self, _held.pop, (os.getpid(), id(self)), None)
        self._upcoming: dict[Any, None] = {}
        self._futures: dict[Any, Future] = {}
        self._busy: set[Any] = set()  # those that a thread opens, or will
        self._lock = InterruptibleLock()

    def expect(self, blocks: Iterable[Any], more: bool = False) -> None:
        """Say what will be read next, in order; others are forgotten, or come after ``more``."""
        with self._lock:
            wanted = dict.fromkeys(blocks)
            if more:
                wanted |= self._upcoming
            else:
                self._futures = {n: one for n, one in self._futures.items() if n in wanted}
                self._busy &= self._futures.keys()
            self._upcoming = {n: None for n in wanted if n not in self._futures}
            self._go_on()

    def __contains__(self, block: Any) -> bool:
        return block in self._futures

    def _go_on(self) -> None:
        own, key = sum(map(self._size, self._futures)), (os.getpid(), id(self))
        all_held = _held.copy().items()  # at once, while other threads add to it, and take from it
        others = sum(size for other, size in all_held if other[0] == key[0] and other != key)
        for block in list(self._upcoming):
            size = self._size(block)
            full = others + own + size > self._most or len(self._busy) >= BUSY
            if self._futures and (full or len(self._futures) >= MOST_HELD):
                break
            own += size
            del self._upcoming[block]
            self._busy.add(block)
            work = partial(_opened, self._open, block, weakref.ref(self))
            self._futures[block] = waiting().submit(work)
        _held[key] = own

    def is_open(self, block: Any) -> None:
        with self._lock:
            self._busy.discard(block)
            self._go_on()

    def take(self, block: Any) -> Any:
        """What was opened ahead; None if it was not, or was out of reach."""
        with self._lock:
            self._upcoming.pop(block, None)
            future = self._futures.pop(block, None)
            self._go_on()
        if future is None or (future.done and isinstance(future.error, UnreachableError)):
            return None  # the server may be there again
        try:
            with waits_for_server():
                return waiting().result(future)
        except FileNotFoundError:
            return None  # who reads it says so, and where


def _opened(open_block: Callable[[Any], Any], block: Any, ahead: weakref.ref[Ahead]) -> Any:
    try:
        return open_block(block)
    finally:
        if (found := ahead()) is not None:
            found.is_open(block)
