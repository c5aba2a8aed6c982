"""A file on another machine as Arrow reads it: several places of it in turn, each of them forward.

fsspec's own file objects keep one block of 5 to 50 MB and read on from wherever they were asked last.
The columns of a row group lie far apart and are read in turn, so most of such blocks would be
thrown away; and opening one asks the server for a size that the listing has told already.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from fsspec.utils import merge_offset_ranges

from trainpipes.engine.pool import Pool, Ticket, waits_for_server
from trainpipes.errors import UnreachableError
from trainpipes.sources.remote.retry import Requests

#: Bytes held of a file, about.
HELD_BYTES = 16 << 20
#: Bytes fetched of one stretch at a time, at least; the gap over which two are fetched as one. About
#: what the wait for a request costs in bytes.
LEAST_BYTES = GAP = 64 << 10
#: Bytes of what is fetched as one, at most, so that several connections share the work.
REQUEST_BYTES = 2 << 20


class _Stretch:
    """Bytes ``start`` to ``stop`` of the file, which are read from front to back.

    Held are those from ``first`` on; the next to be read is ``at``.
    """

    def __init__(self, start: int, stop: int, step: int) -> None:
        self.start, self.stop, self.step = start, stop, step
        self.at = self.first = start
        self.data = b""

    @property
    def end(self) -> int:
        return self.first + len(self.data)

    def seek(self, at: int) -> None:
        """Let go of what is before ``at``."""
        self.data = self.data[at - self.first :] if self.first <= at <= self.end else b""
        self.at = self.first = at

    def take(self, stop: int) -> bytes:
        found = self.data[self.at - self.first : stop - self.first]
        self.at += len(found)
        return found


class RemoteFile(io.RawIOBase):
    """Bytes of a file in an fsspec file system, read-only.

    Whatever is fetched, is fetched for all expected stretches at once where the file system can, so that
    the columns of a row group wait for the server once, not in turn.

    Args:
        system: the file system.
        path: the path in it.
        size: bytes of the file, as listed.
        requests: makes the requests.

    Attributes:
        check: called after a request that had to be tried again: raises if the file is another one by
            then.
    """

    def __init__(self, system: Any, path: str, size: int, requests: Requests | None = None) -> None:
        super().__init__()
        self._system = system
        self._path = path
        self._size = size
        self._requests = requests or Requests()
        self.check: Callable[[], object] = lambda: None
        self._position = 0
        self._stretches: list[_Stretch] = []

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Say which ``(start, stop)`` will be read next, each from front to back; others are
        forgotten. Up to 16 MiB together are fetched whole, of more a part at a time."""
        total = sum(stop - start for start, stop in ranges)
        share = 1.0 if total <= HELD_BYTES else HELD_BYTES / 2 / total
        self._stretches = [
            _Stretch(start, stop, max(LEAST_BYTES, int((stop - start) * share)))
            for start, stop in ranges
        ]

    def fetch(self) -> None:
        """Fetch what is expected before it is read."""
        if self._stretches:
            first = self._stretches[0]
            self._fetch(first, first.start, first.start)

    def fetch_range(self, start: int, stop: int) -> bytes:
        """Bytes as they are on the server now, whatever is held."""
        found, _ = self._requests.ranges(self._system, self._path, [start], [stop], self._size)
        return found[0]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        start = self._position
        stop = self._size if size is None or size < 0 else min(self._size, start + size)
        if stop <= start:
            return b""
        inside = (s for s in self._stretches if s.start <= start and stop <= s.stop)
        stretch = next(inside, None)
        if stretch is None:
            found = self._ranges([start], [stop])[0]
        else:
            if start < stretch.first or stop > stretch.end:
                self._fetch(stretch, start, stop)
            stretch.at = start
            found = stretch.take(stop)
        self._position = start + len(found)
        return found

    def readinto(self, buffer: Any) -> int:
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def _fetch(self, asker: _Stretch, start: int, stop: int) -> None:
        """Fetch what is asked for, and of each other stretch that runs low its next part."""
        asker.seek(start)
        low = [s for s in self._stretches if s is not asker and s.end - s.at < s.step]
        jobs = [(asker, max(stop, asker.end + asker.step)), *((s, s.end + s.step) for s in low)]
        jobs = [(s, min(end, s.stop, self._size)) for s, end in jobs]
        jobs = [(s, end) for s, end in jobs if s.end < end]
        starts, stops = [s.end for s, _ in jobs], [end for _, end in jobs]
        paths = [self._path] * len(jobs)
        paths, starts, stops = merge_offset_ranges(paths, starts, stops, GAP, REQUEST_BYTES)
        parts = self._ranges(starts, stops)
        for s, end in jobs:
            n = bisect_right(starts, s.end) - 1
            part = parts[n][s.end - starts[n] : end - starts[n]]
            s.seek(s.at)
            s.data += part

    def _ranges(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        found, tries = self._requests.ranges(self._system, self._path, starts, stops, self._size)
        if tries > 1:
            self.check()
        return found


#: Threads of a process that wait for servers.
MAX_THREADS = 16
#: Row groups that one reader has opened ahead, and their bytes, about.
AHEAD_BLOCKS, AHEAD_BYTES = 8, 32 << 20
Opened = TypeVar("Opened")
_waiting: list[Pool] = []


def waiting() -> Pool:
    """The threads that wait for servers, shared by all readers of the process."""
    if not _waiting:
        _waiting.append(Pool(MAX_THREADS))
    return _waiting[0]


class Ahead(Generic[Opened]):
    """What is opened ahead, in the order in which it will be needed.

    Args:
        open_block: opens a row group and fetches it; called by several threads at once.
        size: bytes of a row group, about.
    """

    def __init__(self, open_block: Callable[[int], Opened], size: Callable[[int], float]) -> None:
        self._open = open_block
        self._size = size
        self._upcoming: deque[int] = deque()
        self._tickets: dict[int, Ticket] = {}

    def expect(self, blocks: Iterable[int]) -> None:
        """Say which row groups will be read next, in order; others are forgotten."""
        self._upcoming = deque(blocks)
        self._tickets = {}
        self._go_on()

    def _go_on(self) -> None:
        held = sum(self._size(block) for block in self._tickets)
        while self._upcoming and len(self._tickets) < AHEAD_BLOCKS:
            held += self._size(self._upcoming[0])
            if held > AHEAD_BYTES and self._tickets:
                return
            block = self._upcoming.popleft()
            self._tickets[block] = waiting().submit(partial(self._open, block))

    def take(self, block: int) -> Opened | None:
        """A row group that was opened ahead; None for one that was not expected, or that could not be
        reached then. Raises what opening it raised."""
        if block in self._upcoming:
            while self._upcoming.popleft() != block:
                pass
        ticket = self._tickets.pop(block, None)
        self._go_on()
        if ticket is None or (ticket.done and isinstance(ticket.error, UnreachableError)):
            return None  # the server may be there again
        try:
            with waits_for_server():
                opened: Opened = waiting().result(ticket)
        except FileNotFoundError:
            return None  # who reads it says so, and where
        return opened
