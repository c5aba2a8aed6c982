"""The shuffle windows of a process, shared by the shards that need them; of one source, or of several
pipelines whose rows are mixed.

Whoever first needs a window's rows reads it. With threads, the next windows of spans are read ahead as
far as memory allows, those that are needed first before others. Memory: a window for each open span, two
where its shards stand at a window's end or the next is read ahead.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias
from weakref import ref

from trainpipes._internal.activity import TURN, doing
from trainpipes._internal.checks import IntArray
from trainpipes._internal.locks import InterruptibleLock
from trainpipes._internal.pool import Pool, Priority, SharedWork, is_of_pool
from trainpipes.columns.block import Block
from trainpipes.columns.run import Run
from trainpipes.engine.planning.chain import RowMixture
from trainpipes.engine.planning.plan import Plan
from trainpipes.order.layout import WindowKey

#: The part of the memory for windows that those read ahead may take, or a single window.
AHEAD_PART = 1 / 5
#: Most windows of a span that are held where memory is short.
LEAST_HELD = 4
#: Of a row of Python objects, beside its arrays and texts.
OBJECT_BYTES = 512


class LazyRows(Protocol):
    """Rows of a window that are read when they are taken."""

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...

    def slice(self, start: int, stop: int) -> Block: ...

    def take(self, index: IntArray) -> Block: ...

    def coming(self, index: IntArray) -> None:
        """The rows at ``index`` are asked for next."""
        ...


#: A window's rows in file order, and the order in which they come out, int64 ``[rows]``, or None.
Content: TypeAlias = tuple[Block | LazyRows, IntArray | None]


@dataclass(eq=False)
class Window:
    """Rows that a shuffle holds at once. Any thread may ask.

    Args:
        rows: how many; None where they must be read to know.
        after: the source's state at this window's end.
        first: rows left out at the start.
        shared: what threads that wait for its rows do meanwhile; None without a pool.
    """

    rows: int | None
    read: Callable[[], Content]
    after: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    shared: SharedWork | None = None

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
        with doing(TURN):
            if self.shared is not None and is_of_pool():
                self.shared.help(self._is_free)
            with self._lock:
                return self._read_once()

    @property
    def held_bytes(self) -> float:
        """What its rows take, about; 0 before they are read."""
        rows = None if self._content is None else self._content[0]
        if self.nbytes or not isinstance(rows, Block) or not len(rows):
            return self.nbytes
        return len(rows) * (rows.row_bytes + OBJECT_BYTES)

    def _is_free(self) -> bool:
        """Whether nobody reads it."""
        is_read = self._content is not None or self.failed is not None
        if not is_read and self._lock.acquire(blocking=False):
            self._lock.release()
            return True
        return is_read

    def _read_once(self) -> Content:
        if self.failed is not None:
            raise self.failed
        if self._content is None:
            self._is_begun = True
            with nullcontext() if self.shared is None else self.shared.here():
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
        if len(later) and not isinstance(rows, Block):
            rows.coming(later - self.first if order is None else order[later])
        if order is not None:
            return rows.take(order[positions])
        start, count = int(positions[0]), len(positions)
        if count == int(positions[-1]) - start + 1:
            return rows.slice(start - self.first, start - self.first + count)
        return rows.take(positions - self.first)


def _read_if_held(window: ref[Window]) -> None:
    held = window()
    if held is not None:
        held.content()


class WindowMaker(ABC):
    """Makes windows, in a single thread at a time; any thread may read them. Of each span ``most_held`` are
    held at most, and one read ahead; fewer where memory is short.
    """

    most_held: int | None = LEAST_HELD

    @abstractmethod
    def planned(self, key: WindowKey) -> int | None:
        """Rows in a window: 0 past the last; None where it must be read to know."""

    @abstractmethod
    def window(self, key: WindowKey, state: dict[str, Any], first: int = 0) -> Window | None:
        """A window; None past the span's last. ``state`` is the ``after`` of an earlier window."""

    def turn(self, key: WindowKey) -> float:
        """When a window is needed: the epoch, and the share of it that comes before."""
        return float(key.epoch)

    def expect(self, key: WindowKey, first: int) -> None:  # noqa: B027  (most fetch nothing ahead)
        """A window will be asked for from a row on, and later ones of its span."""

    def start(self, epoch: int) -> dict[str, Any]:
        """The source's state at an epoch's start, if it needs a state."""
        return {}

    def let_go(self, epoch: int) -> None:  # noqa: B027  (most hold nothing of an epoch)
        """Nobody needs an earlier epoch any more."""

    @abstractmethod
    def close(self) -> None:
        """The pass is over."""


@dataclass(eq=False)
class Windows:
    """The windows of a pass, for the shards of a process. Each user, a shard, is at a single window at a
    time; a window is dropped once all users of its span are past it.

    Args:
        most_bytes: that all windows may take for a further window to be read ahead, or for more than
            ``LEAST_HELD`` of a span to be held.
        following: the span that a user comes to after an epoch, or None.
        last: no later window is read ahead.
    """

    maker: WindowMaker
    pool: Pool | None = None
    most_bytes: int = 0
    following: Callable[[int, int], int | None] | None = None
    last: WindowKey | None = None

    def __post_init__(self) -> None:
        self._held: dict[WindowKey, Window] = {}
        self._needs: dict[int, WindowKey] = {}  # where each user is
        self._firsts: dict[int, int] = {}  # the first position of users that have not asked yet
        self._moved = True  # whether somebody came to another window since windows were read ahead
        self._lock = threading.Lock()

    def planned(self, key: WindowKey) -> int | None:
        return self.maker.planned(key)

    def start(self, epoch: int) -> dict[str, Any]:
        with self._lock:
            return self.maker.start(epoch)

    def expect(self, user: int, key: WindowKey, first: int) -> None:
        """``user`` will ask for this window, from a position on, and for later ones of the span."""
        with self._lock:
            self._move(user, key)
            self._firsts[user] = first
            self.maker.expect(key, first)

    def get(
        self, user: int, key: WindowKey, state: dict[str, Any], first: int = 0
    ) -> Window | None:
        """A window; None past the last. ``user`` needs no earlier windows, nor rows before ``first``."""
        with self._lock:
            self._move(user, key)
            self._firsts.pop(user, None)
            window = self._held.get(key)
            if window is None or window.failed is not None or first < window.first:
                self._limit(key.span)
                # Leave out only rows that no user needs.
                others = [n for reader, n in self._firsts.items() if self._needs[reader] == key]
                window = self.maker.window(key, state, min([first, *others]))
                if window is None:
                    return None
                self._hold(key, window)
        if self.pool is not None and self._moved:
            self._read_ahead(self.pool)
        return window

    def close(self) -> None:
        with self._lock:
            self._held, self._needs, self._firsts = {}, {}, {}
            self.maker.close()

    def let_go(self) -> None:
        """Let go of all rows, without the lock: those that are asked for are read again."""
        self._held = {}

    def _move(self, user: int, key: WindowKey) -> None:
        if self._needs.get(user) == key:
            return
        self._needs[user], self._moved = key, True
        least: dict[int, WindowKey] = {}
        for need in self._needs.values():
            least[need.span] = min(need, least.get(need.span, need))
        past = [k for k in self._held if k < least.get(k.span, (key.epoch,))]
        for old in past:
            self._held.pop(old, None)
        self.maker.let_go(min(least.values()).epoch)

    def _hold(self, key: WindowKey, window: Window) -> None:
        if self.pool is not None:
            window.shared = SharedWork()
        self._held[key] = window

    def _limit(self, span: int) -> None:
        windows_held = sorted(key for key in self._held if key.span == span)
        most = self.maker.most_held
        if most is None or len(windows_held) < LEAST_HELD:
            return
        sizes = [window.held_bytes for window in self._held.values()]
        if sum(sizes) + max(sizes) > self.most_bytes:
            most = LEAST_HELD
        for old in windows_held[: max(0, len(windows_held) + 1 - most)]:
            self._held.pop(old, None)

    def _read_ahead(self, pool: Pool) -> None:
        begun: list[Window] = []
        with self._lock:
            read = [window for window in self._held.values() if window.nbytes]
            if not read:  # how large they are is not known yet
                return
            self._moved = False
            row_bytes = sum(window.nbytes for window in read) / max(1, sum(map(len, read)))
            largest = max(window.nbytes for window in read)

            def size(window: Window) -> float:
                return window.nbytes or (
                    largest if window.rows is None else row_bytes * window.rows
                )

            at = set(self._needs.values())
            ahead = sum(size(window) for key, window in self._held.items() if key not in at)
            held = sum(map(size, self._held.values()))
            most = min(max(largest, self.most_bytes * AHEAD_PART) - ahead, self.most_bytes - held)
            for key in sorted(self._coming(), key=self.maker.turn):
                found = self.maker.window(key, {})
                if found is None or (most := most - size(found)) < 0:
                    break
                self._hold(key, found)
                begun.append(found)
        for found in begun:
            found.read_ahead(pool)

    def _coming(self) -> Iterator[WindowKey]:
        """The next window of each span, which nobody has read."""
        least: dict[tuple[int, int], tuple[WindowKey, int]] = {}
        for user, key in self._needs.items():
            place = key.epoch, key.span
            least[place] = max((key, user), least.get(place, (key, user)))
        for key, user in least.values():
            if self.last is not None and key >= self.last:
                continue
            coming = key._replace(window=key.window + 1)
            if self.maker.planned(coming) == 0:
                span = None if self.following is None else self.following(user, key.epoch)
                if span is None:
                    continue
                coming = WindowKey(key.epoch + 1, span, 0)
            if coming not in self._held:
                yield coming


class MixedWindows(ABC):
    """The windows of several pipelines whose rows are mixed."""

    @abstractmethod
    def expect(self, shard: int, state: dict[str, Any], shards: int) -> None:
        """Keep the windows that a shard needs of each source from ``state`` on; ``shards`` are this
        process's.
        """

    @abstractmethod
    def open(
        self,
        shard: int,
        state: dict[str, Any],
        rows: tuple[int, int],
        shards: int,
        first: int,
        weights: int | None,
    ) -> Iterator[Run]:
        """The mixed rows of a shard from a state on; ``weights``: which of the plan's new weights hold."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all rows: the pass is over."""

    @abstractmethod
    def let_go(self) -> None:
        """The same, where any thread may be at work, without a lock and without an end of readers."""

    def start(self, epoch: int) -> dict[str, Any]:
        """The state of an epoch's start: none, since its number says it."""
        return {}


class WindowedMixture(RowMixture):
    """Rows of several pipelines, each read by its own windows."""

    @abstractmethod
    def windows(self, plan: Plan, pool: Pool | None, pass_number: int) -> MixedWindows:
        """The windows of all pipelines, for the shards of a process; see ``open_windows``."""
