from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, TypeVar

from trainpipes.engine.pool import Future, Pool, waits_for_server
from trainpipes.errors import UnreachableError

#: Threads of a process that wait for servers.
MAX_THREADS = 32
#: Bytes that a process fetches ahead, unless the user says otherwise.
PREFETCH_BYTES = 256 << 20
#: What one reader has fetched ahead at most, however small each is: all of it is looked at for each one more.
MOST_HELD = 4 * MAX_THREADS
Opened = TypeVar("Opened")
_waiting: list[Pool] = []
#: Bytes that each reader has fetched ahead, by its process and itself.
_held: dict[tuple[int, int], float] = {}


def waiting() -> Pool:
    """The threads that wait for servers, shared by all readers of the process."""
    if not _waiting:
        _waiting.append(Pool(MAX_THREADS))
    return _waiting[0]


class Ahead(Generic[Opened]):
    """What is opened ahead, in the order in which it will be needed."""

    def __init__(
        self,
        open_block: Callable[[int], Opened],
        size: Callable[[int], float],
        most: int = PREFETCH_BYTES,
    ) -> None:
        self._open = open_block
        self._size = size
        self._most = most
        weakref.finalize(self, _held.pop, (os.getpid(), id(self)), None)
        self._upcoming: deque[int] = deque()
        self._futures: dict[int, Future] = {}

    def expect(self, blocks: Iterable[int]) -> None:
        """Say which row groups will be read next, in order; others are forgotten."""
        wanted = dict.fromkeys(blocks)
        self._futures = {n: future for n, future in self._futures.items() if n in wanted}
        self._upcoming = deque(n for n in wanted if n not in self._futures)
        self._go_on()

    def __contains__(self, block: int) -> bool:
        return block in self._futures

    def _go_on(self) -> None:
        own, key = sum(map(self._size, self._futures)), (os.getpid(), id(self))
        all_held = _held.copy()  # at once, while other threads add to it, and take from it
        others = sum(size for (process, _), size in all_held.items() if process == key[0])
        others -= _held.get(key, 0.0)
        while self._upcoming:
            more = self._size(self._upcoming[0])
            busy = sum(not future.done for future in self._futures.values())
            full = others + own + more > self._most or busy >= MAX_THREADS // 2
            if self._futures and (full or len(self._futures) >= MOST_HELD):
                break
            own += more
            block = self._upcoming.popleft()
            self._futures[block] = waiting().submit(partial(self._open, block))
        _held[key] = own

    def take(self, block: int) -> Opened | None:
        """A row group that was opened ahead; None if it was not, or was out of reach."""
        if block in self._upcoming:
            while self._upcoming.popleft() != block:
                pass
        future = self._futures.pop(block, None)
        self._go_on()
        if future is None or (future.done and isinstance(future.error, UnreachableError)):
            return None  # the server may be there again
        try:
            with waits_for_server():
                opened: Opened = waiting().result(future)
        except FileNotFoundError:
            return None  # who reads it says so, and where
        return opened
