"""The shuffle windows of a process, shared by the shards that need them.

Whoever first needs a window's rows reads it. With threads, a span's next window is read ahead as far
as memory allows. Memory: one window for each open span, two where its shards stand at a window's end
or the next one is read ahead.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

from trainpipes.columns.block import Block
from trainpipes.engine.interrupts import InterruptibleLock
from trainpipes.engine.layout import IntArray, WindowKey
from trainpipes.engine.pool import Pool, Priority

if TYPE_CHECKING:
    from trainpipes.engine.reading.listed_loader import NumberedRows


#: A window's rows in file order, and the order in which they come out, int64 ``[rows]``, or None.
Content: TypeAlias = "tuple[Block | NumberedRows, IntArray | None]"


@dataclass(eq=False)
class Window:
    """Rows that a shuffle holds at once. Any thread may ask.

    Args:
        rows: how many; None where they must be read to know.
        after: the source's state at this window's end.
        first: rows left out at the start.
    """

    rows: int | None
    read: Callable[[], Content]
    after: dict[str, Any] = field(default_factory=dict)
    first: int = 0

    def __post_init__(self) -> None:
        self.nbytes = 0
        self._content: Content | None = None
        self._is_begun = False
        self.failed: Exception | None = None
        self._lock = InterruptibleLock()

    def __len__(self) -> int:
        if self.rows is None:
            self.rows = len(self.content()[0])
        return self.rows

    def content(self) -> Content:
        """Its rows and their order, read if nobody has. An error stays."""
        if self._content is not None:
            return self._content
        with self._lock:
            if self.failed is not None:
                raise self.failed
            if self._content is None:
                self._is_begun = True
                try:
                    self._content = self.read()
                except Exception as error:
                    self.failed = error
                    raise
                self.nbytes = self._content[0].nbytes
            return self._content

    def read_ahead(self, pool: Pool) -> None:
        if not self._is_begun:
            self._is_begun = True
            # A window that is dropped before is not read.
            pool.submit(partial(_read_if_held, ref(self)), Priority.READING_AHEAD)

    def take(self, positions: IntArray, later: IntArray) -> Block:
        """The rows at some positions; those of ``later`` are asked for next."""
        rows, order = self.content()
        if len(later) and (coming := getattr(rows, "coming", None)) is not None:
            coming(later - self.first if order is None else order[later])
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
    """Makes windows, in one thread at a time; any thread may read them. Of each span it holds
    ``most_held`` at most, and one read ahead.
    """

    most_held: int | None = 4

    @abstractmethod
    def planned(self, key: WindowKey) -> int | None:
        """Rows in a window: 0 past the last; None where it must be read to know."""

    @abstractmethod
    def window(self, key: WindowKey, state: dict[str, Any], first: int = 0) -> Window | None:
        """A window; None past the span's last. ``state`` is an earlier one's ``after``."""

    def start(self, epoch: int) -> dict[str, Any]:
        """The source's state at an epoch's start, if it needs one."""
        return {}

    def let_go(self, epoch: int) -> None:  # noqa: B027  (most hold nothing of an epoch)
        """Nobody needs an earlier epoch any more."""

    @abstractmethod
    def close(self) -> None:
        """The pass is over."""


@dataclass(eq=False)
class Windows:
    """The windows of all spans and epochs. Each user, a shard, is at one window at a time; a window is
    dropped once all users of its span are past it.

    Args:
        ahead_bytes: that all windows may take for one more to be read ahead.
        following: the span that a user comes to after an epoch, or None.
        last: no window after this one is read ahead.
    """

    loader: WindowLoader
    pool: Pool | None = None
    ahead_bytes: int = 0
    following: Callable[[int, int], int | None] | None = None
    last: WindowKey | None = None

    def __post_init__(self) -> None:
        self._held: dict[WindowKey, Window] = {}
        self._needs: dict[int, WindowKey] = {}  # where each user is
        self._firsts: dict[int, int] = {}  # the first position of users that have not asked yet
        self._lock = threading.Lock()

    def planned(self, key: WindowKey) -> int | None:
        return self.loader.planned(key)

    def start(self, epoch: int) -> dict[str, Any]:
        with self._lock:
            return self.loader.start(epoch)

    def expect(self, user: int, key: WindowKey, first: int) -> None:
        """``user`` will ask for this window, from a position on, and for later ones of the span."""
        with self._lock:
            self._move(user, key)
            self._firsts[user] = first

    def get(
        self, user: int, key: WindowKey, state: dict[str, Any], first: int = 0
    ) -> Window | None:
        """A window; None past the last one. ``user`` needs no earlier ones, nor what is before ``first``."""
        with self._lock:
            self._move(user, key)
            self._firsts.pop(user, None)
            found = self._held.get(key)
            if found is None or found.failed is not None or first < found.first:
                self._limit(key.span)
                # Leave out only rows that no user needs.
                others = [n for one, n in self._firsts.items() if self._needs[one] == key]
                found = self.loader.window(key, state, min([first, *others]))
                if found is None:
                    return None
                self._held[key] = found
        if self.pool is not None:
            self._read_ahead(user, key, found, self.pool)
        return found

    def close(self) -> None:
        with self._lock:
            self._held, self._needs, self._firsts = {}, {}, {}
            self.loader.close()

    def _move(self, user: int, key: WindowKey) -> None:
        if self._needs.get(user) == key:
            return
        self._needs[user] = key
        least: dict[int, WindowKey] = {}
        for need in self._needs.values():
            least[need.span] = min(need, least.get(need.span, need))
        past = [k for k in self._held if k < least.get(k.span, (key.epoch,))]
        for old in past:
            del self._held[old]
        self.loader.let_go(min(least.values()).epoch)

    def _limit(self, span: int) -> None:
        own = sorted(key for key in self._held if key.span == span)
        if self.loader.most_held is not None:
            for old in own[: max(0, len(own) + 1 - self.loader.most_held)]:
                del self._held[old]

    def _read_ahead(self, user: int, key: WindowKey, current: Window, pool: Pool) -> None:
        if self.last is not None and key >= self.last:
            return
        coming = key._replace(window=key.window + 1)
        if self.loader.planned(coming) == 0:
            span = None if self.following is None else self.following(user, key.epoch)
            if span is None:
                return
            coming = WindowKey(key.epoch + 1, span, 0)
        with self._lock:
            if coming in self._held:
                return
            found = self.loader.window(coming, {})
            if found is None or not self._fits((*self._held.values(), found)):
                return
            self._held[coming] = found
        found.read_ahead(pool)

    def _fits(self, windows: Sequence[Window]) -> bool:
        """Whether these windows, the last of which would be read ahead, take no more than they may. Rows
        that are not read yet count as those that are, and windows whose rows are not known as the
        largest.
        """
        read = [(window.nbytes, window.rows or 1) for window in windows if window.nbytes]
        if not read:
            return False
        a_row = sum(nbytes for nbytes, _ in read) / sum(rows for _, rows in read)
        largest = max(nbytes for nbytes, _ in read)
        sizes = [w.nbytes or (largest if w.rows is None else w.rows * a_row) for w in windows]
        return sum(sizes) <= self.ahead_bytes
