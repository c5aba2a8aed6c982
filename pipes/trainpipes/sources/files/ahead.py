"""What a process fetches ahead from servers: for all its readers together, what is needed first, first."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import repeat
from typing import Any

from trainpipes._internal.activity import BYTES
from trainpipes._internal.locks import Flag, InterruptibleLock, Living, wait_for
from trainpipes._internal.pool import Future, Pool, waits_for_server
from trainpipes.errors import UnreachableError

#: Threads of a process that wait for servers.
MAX_THREADS = 32
#: Bytes that a process fetches ahead, unless the user says otherwise.
PREFETCH_BYTES = 256 << 20
#: What one reader has fetched ahead at most, however small each is: all of it is looked at for each one more.
MOST_HELD = 4 * MAX_THREADS


@cache
def waiting() -> Pool:
    """The threads that wait for servers, shared by all readers of the process."""
    return Pool(MAX_THREADS, name="trainpipes-requests", waiting=BYTES)


class _Readers:
    """All readers of a process that read ahead: what somebody waits for comes first, then what is needed
    next.
    """

    def __init__(self) -> None:
        self.lock = InterruptibleLock()
        self._all: Living[Ahead] = Living()
        self._busy = 0
        self._is_cold = True

    def add(self, reader: Ahead) -> None:
        with self.lock:
            self._all.add(reader)

    def go_on(self, is_cold: bool | None = None) -> None:
        """Begin what there is room for, with the lock. The very first fetch has the line for itself, since
        the first batch waits for it.
        """
        readers = list(self._all)
        coming = [reader for reader in readers if reader.upcoming]
        held = sum(reader.held for reader in readers)
        if is_cold is not None or not (self._busy or held):
            self._is_cold = is_cold is None
        while coming and self._busy < (1 if self._is_cold else MAX_THREADS):
            first = min(coming, key=Ahead.place)
            size = first.begin(held)
            if size is None:
                return
            held += size
            self._busy += 1
            coming = [reader for reader in coming if reader.upcoming]

    def is_done(self) -> None:
        with self.lock:
            self._busy -= 1
            self.go_on(is_cold=False)


_readers = _Readers()


def _forget() -> None:
    global _readers
    _readers = _Readers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # the parent's readers are not the child's


class Ahead:
    """What one reader has opened ahead, in the order in which it will be needed. Any thread may ask."""

    def __init__(
        self, open_block: Callable[[Any], Any], size: Callable[[Any], float], most: float
    ) -> None:
        self._open, self._size, self._most = open_block, size, most
        self._readers = _readers
        #: What is to be opened, and its turn; bytes of what is open or being opened.
        self.upcoming: dict[Any, float] = {}
        self.held = 0.0
        self._futures: dict[Any, Future] = {}
        #: What somebody waits for before its turn; set once it is being opened.
        self._wanted: dict[Any, Flag] = {}
        self._readers.add(self)

    def expect(
        self,
        blocks: Iterable[Any],
        more: bool = False,
        turns: Sequence[float] = (),
        most: float = math.inf,
    ) -> None:
        """Say what will be read next, in order; others are forgotten, or come after ``more``.

        Args:
            turns: of each block; the least of all readers come first.
            most: bytes that the process may hold, where that is less than the user's limit.
        """
        with self._readers.lock:
            self._most = min(self._most, most)
            wanted = dict(zip(blocks, turns or repeat(0.0), strict=False))
            kept = self.upcoming if more else {n: self.upcoming[n] for n in self._wanted}
            wanted |= {n: turn for n, turn in kept.items() if n not in wanted}
            if not more:
                for block in [n for n in self._futures if n not in wanted]:
                    self._pop(block)
            self._set({n: turn for n, turn in wanted.items() if n not in self._futures})
            self._readers.go_on()

    def __contains__(self, block: Any) -> bool:
        return block in self._futures

    def _set(self, upcoming: dict[Any, float]) -> None:
        self.upcoming = dict(sorted(upcoming.items(), key=lambda item: item[0] not in self._wanted))

    def _pop(self, block: Any) -> Future | None:
        future = self._futures.pop(block, None)
        self.held -= 0.0 if future is None else self._size(block)
        return future

    def place(self) -> tuple[bool, float, int]:
        """Of the first upcoming one in the line of the process."""
        block, turn = next(iter(self.upcoming.items()))
        return block not in self._wanted, turn, len(self._futures)

    def begin(self, held: float) -> float | None:
        """Open the first upcoming one; its size, or None if it has to wait. ``held``: by all readers."""
        block = next(iter(self.upcoming))
        size, wanted = self._size(block), self._wanted.pop(block, None)
        full = held + size > self._most or len(self._futures) >= MOST_HELD
        if full and held and wanted is None:
            return None
        del self.upcoming[block]
        work = partial(_opened, self._open, block, self._readers)
        self._futures[block] = waiting().submit(work)
        self.held += size
        if wanted is not None:
            wanted.set()
        return size

    def take(self, block: Any) -> Any:
        """What was opened ahead; None if it was not, or was out of reach."""
        readers, wanted = self._readers, None
        with readers.lock:
            if block in self.upcoming:
                wanted = self._wanted.setdefault(block, Flag())
                self._set(self.upcoming)
                readers.go_on()
        if wanted is not None:
            with waits_for_server():
                wait_for(wanted)
        with readers.lock:
            future = self._pop(block)
            readers.go_on()
        if future is None or (future.done and isinstance(future.error, UnreachableError)):
            return None  # the server may be there again
        try:
            with waits_for_server():
                return waiting().result(future)
        except FileNotFoundError:
            return None  # who reads it says so, and where


def _opened(open_block: Callable[[Any], Any], block: Any, readers: _Readers) -> Any:
    try:
        return open_block(block)
    finally:
        readers.is_done()
