"""The shuffle windows of a process: made once, shared by the shards that need them, let go when all are past.

A window is handed out before it is read, where its number of rows is known: whoever needs its rows first
reads it. With threads, the next window of a span is read while one is used, as far as memory allows.
Memory: one window for each open span, two where its shards stand at a window's end or the next one is read
ahead. What windows are made of is the loader's to know: ``listed``, ``numbered`` and ``streamed`` have one
each.

Owned by one pass; the thread that iterates asks for windows, or those that make the runs of its shards, and
they or the pool's read them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import ref

from trainpipes.columns.block import Block
from trainpipes.engine.interrupts import InterruptibleLock
from trainpipes.engine.layout import IntArray, WindowKey
from trainpipes.engine.pool import Pool, Priority


class WindowRows(Protocol):
    """What a window's rows are taken from, such as a ``Block``."""

    @property
    def nbytes(self) -> int:
        """Bytes that are held; 0 if that cannot be told."""
        ...

    def __len__(self) -> int: ...

    def take(self, index: IntArray) -> Block:
        """The rows at ``index``, in that order."""
        ...

    def slice(self, start: int, stop: int) -> Block:
        """Rows ``start`` to ``stop``."""
        ...


#: A window's rows as they stand in the files, and the order in which they come out, int64 ``[rows]``; None
#: for as they are.
Content = tuple[WindowRows, IntArray | None]


class Window:
    """Rows that a shuffle holds at once. Any thread may ask.

    Args:
        rows: how many; None where they must be read to know.
        read: reads them.
        after: the state of what is read from at this window's end; empty if it needs none.
        first: how many rows are left out that stand before what anybody has asked for, where they come out as
            they stand.

    Attributes:
        nbytes: bytes of its rows, 0 until they are read.
        failed: what reading them came to, if it failed.
    """

    def __init__(
        self,
        rows: int | None,
        read: Callable[[], Content],
        after: dict[str, Any] | None = None,
        first: int = 0,
    ) -> None:
        self._rows = rows
        self._read = read
        self.after = after or {}
        self.first = first
        self.nbytes = 0
        self._content: Content | None = None
        self._is_begun = False  # whether somebody reads it, or was told to
        self.failed: Exception | None = None
        self._lock = InterruptibleLock()

    def __len__(self) -> int:
        if self._rows is None:
            self._rows = len(self.content()[0])
        return self._rows

    def content(self) -> Content:
        """Its rows and their order, read if nobody has. What goes wrong stays so: read again is another
        window."""
        if self._content is not None:
            return self._content
        with self._lock:
            if self.failed is not None:
                raise self.failed
            if self._content is None:
                self._is_begun = True
                try:
                    self._content = self._read()
                except Exception as error:
                    self.failed = error
                    raise
                self.nbytes = self._content[0].nbytes
            return self._content

    def read_ahead(self, pool: Pool) -> None:
        """Have a pool read its rows, if nobody has begun to."""
        if not self._is_begun:
            self._is_begun = True
            # What is let go before that is not read.
            pool.submit(partial(_read_if_held, ref(self)), Priority.READING_AHEAD)

    def take(self, positions: IntArray) -> Block:
        """The rows at positions of the window's order, int64."""
        rows, order = self.content()
        if order is not None:
            return rows.take(order[positions])
        start, count = int(positions[0]), len(positions)
        if count == int(positions[-1]) - start + 1:
            return rows.slice(start - self.first, start - self.first + count)
        return rows.take(positions - self.first)


def _read_if_held(window: ref[Window]) -> None:
    found = window()
    if found is not None:
        found.content()


class WindowLoader(ABC):
    """What windows are made of. Called by one thread at a time; what it has windows read, by any.

    Attributes:
        most_held: windows of one span held at most, and one that is read ahead: shards that a filter sets
            far apart have older ones made again. None for no limit.
    """

    most_held: int | None = 4

    @abstractmethod
    def planned(self, key: WindowKey) -> int | None:
        """Rows in a window before it is read: 0 past the last; None where it must be read to know."""

    @abstractmethod
    def window(self, key: WindowKey, state: dict[str, Any], first: int = 0) -> Window | None:
        """A window; None past the last one of its span. ``state`` is where to read from, as an earlier
        one's ``after`` said. Rows before ``first`` may be left out, where they come out as they stand."""

    def start(self, epoch: int) -> dict[str, Any]:
        """The state that leads back to an epoch's start; empty where the epoch's number does."""
        return {}

    def let_go(self, epoch: int) -> None:  # noqa: B027  (most hold nothing of an epoch)
        """Nobody needs an epoch before this one any more."""

    @abstractmethod
    def close(self) -> None:
        """The pass is over."""


class Windows:
    """The windows of all spans and epochs, for the shards of one process.

    A user is a shard, or what stands for one, and at one window at a time. A window is let go once all
    users of its span are past it, or have gone on to other spans.

    Args:
        loader: makes them.
        pool: threads that read ahead; None for no reading ahead.
        ahead_bytes: bytes that all windows may take for one more to be read ahead.
        following: of a user and an epoch, the span that the user comes to in the next one, which is then read
            ahead too; None if there is none.
        last: no window after this one is read ahead; None for no such end.
    """

    def __init__(
        self,
        loader: WindowLoader,
        pool: Pool | None = None,
        ahead_bytes: int = 0,
        following: Callable[[int, int], int | None] | None = None,
        last: WindowKey | None = None,
    ) -> None:
        self._loader = loader
        self._pool = pool
        self._ahead_bytes = ahead_bytes
        self._following = following
        self._last = last
        self._held: dict[WindowKey, Window] = {}
        self._needs: dict[int, WindowKey] = {}  # where each user is
        self._firsts: dict[int, int] = {}  # the first position of users that have not asked yet
        self._lock = threading.Lock()

    def planned(self, key: WindowKey) -> int | None:
        """Rows in a window before it is read: 0 past the last; None where it must be read to know."""
        return self._loader.planned(key)

    def start(self, epoch: int) -> dict[str, Any]:
        """The state that leads back to an epoch's start; empty where the epoch's number does."""
        with self._lock:
            return self._loader.start(epoch)

    def expect(self, user: int, key: WindowKey, first: int) -> None:
        """Say that ``user`` will ask for this window, from a position on, and for later ones of the span."""
        with self._lock:
            self._move(user, key)
            self._firsts[user] = first

    def get(
        self, user: int, key: WindowKey, state: dict[str, Any], first: int = 0
    ) -> Window | None:
        """A window, to be read if no other user has; None past the last one.

        ``user`` has no more need of earlier ones. ``state`` is where to read from, as an earlier window's
        ``after`` said, and ``first`` the first position in it that ``user`` needs.
        """
        with self._lock:
            self._move(user, key)
            self._firsts.pop(user, None)
            found = self._held.get(key)
            if found is None or found.failed is not None or first < found.first:
                self._limit(key.span)
                # Whoever asks first, those before it find their rows there.
                others = [n for one, n in self._firsts.items() if self._needs[one] == key]
                found = self._loader.window(key, state, min([first, *others]))
                if found is None:
                    return None
                self._held[key] = found
        if self._pool is not None:
            self._read_ahead(user, key, found, self._pool)
        return found

    def close(self) -> None:
        """Let go of all rows: the pass is over."""
        with self._lock:
            self._held, self._needs, self._firsts = {}, {}, {}
            self._loader.close()

    def _move(self, user: int, key: WindowKey) -> None:
        """Have a user at a window, and let go of what nobody needs any more."""
        if self._needs.get(user) == key:
            return
        self._needs[user] = key
        least: dict[int, WindowKey] = {}
        for need in self._needs.values():
            least[need.span] = min(need, least.get(need.span, need))
        past = [k for k in self._held if k < least.get(k.span, (key.epoch,))]
        for old in past:
            del self._held[old]
        self._loader.let_go(min(least.values()).epoch)

    def _limit(self, span: int) -> None:
        """Have room for one more window of a span."""
        own = sorted(key for key in self._held if key.span == span)
        if self._loader.most_held is not None:
            for old in own[: max(0, len(own) + 1 - self._loader.most_held)]:
                del self._held[old]

    def _read_ahead(self, user: int, key: WindowKey, current: Window, pool: Pool) -> None:
        """Have the window after one read by the pool, if there is room for it."""
        if self._last is not None and key >= self._last:
            return
        coming = key._replace(window=key.window + 1)
        if self._loader.planned(coming) == 0:
            span = None if self._following is None else self._following(user, key.epoch)
            if span is None:
                return
            coming = WindowKey(key.epoch + 1, span, 0)
        with self._lock:
            if coming in self._held:
                return
            # Those that are to be read are taken for as large as the largest.
            largest = max(window.nbytes for window in self._held.values())
            sizes = [window.nbytes or largest for window in (*self._held.values(), current)]
            if not largest or sum(sizes) > self._ahead_bytes:
                return
            found = self._loader.window(coming, {})
            if found is None:
                return
            self._held[coming] = found
        found.read_ahead(pool)
