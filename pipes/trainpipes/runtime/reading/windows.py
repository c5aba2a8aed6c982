"""The windows of an epoch: read once in a process, put through what stands before the shuffle,
ordered, and shared by the shards that need them.

A window is handed out before it is read, where its number of rows is known: whoever needs its rows
first reads it. With threads, the next window of a span is read while one is used, as far as memory
allows. Memory: one window for each open span, two where its shards stand at a window's end or the
next one is read ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import ref

import numpy as np

from trainpipes.order import IntArray, Layout, StreamLayout, permutation, segments
from trainpipes.runtime.caching.block_cache import BlockCache
from trainpipes.runtime.pool import Pool, Urgency
from trainpipes.runtime.reading.block_table import BlockTable
from trainpipes.runtime.rows.block import Block, join_payloads, payload_bytes
from trainpipes.runtime.rows.utf8 import naming_bad_text
from trainpipes.runtime.run import Cursors, Run
from trainpipes.runtime.source import LooksAhead, Reader, RowSource, read_rows

__all__ = [
    "Before",
    "Following",
    "Held",
    "ListedWindows",
    "Window",
    "Windows",
    "chain_before",
    "no_more",
]

#: Windows of one span held at most: shards that a filter sets far apart have older ones read again.
MOST_HELD = 4
#: What stands before the shuffle: rows in, rows out.
Before = Callable[[Block], Block]
#: Of a user and an epoch, the span that the user comes to in the next epoch; None if there is none.
Following = Callable[[int, int], int | None]


def no_more(user: int, epoch: int) -> None:
    """No epoch follows, or nobody knows of one."""


class Window:
    """Rows that a shuffle holds at once.

    Args:
        rows: how many; None where they must be read to know.
        read: reads the rows, in the order in which they stand in the files, and the order in which
            they come out, int64 ``[rows]``; None for as they are.
        after: the state of what is read from at this window's end; empty if it needs none.

    Attributes:
        nbytes: bytes of its rows, 0 until they are read.
        failed: what reading them came to, if it failed.
    """

    def __init__(
        self,
        rows: int | None,
        read: Callable[[], tuple[Block, IntArray | None]],
        after: dict[str, Any] | None = None,
    ) -> None:
        self._rows = rows
        self._read = read
        self.after = after or {}
        self.nbytes = 0
        self._content: tuple[Block, IntArray | None] | None = None
        self._is_begun = False
        self.failed: Exception | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        if self._rows is None:
            self._rows = len(self.content()[0])
        return self._rows

    def content(self) -> tuple[Block, IntArray | None]:
        """Its rows and their order, read if nobody has. What goes wrong stays so: read again is another
        window."""
        with self._lock:
            if self.failed is not None:
                raise self.failed
            if self._content is None:
                self._is_begun = True
                try:
                    self._content = found = self._read()
                except Exception as error:
                    self.failed = error
                    raise
                self.nbytes = payload_bytes(found[0].data)
            return self._content

    @property
    def is_read(self) -> bool:
        """Whether its rows are there, or cannot be read."""
        return self._content is not None or self.failed is not None

    def read_in(self, pool: Pool) -> None:
        """Have a pool read its rows, if nobody has begun to."""
        if not self._is_begun:
            self._is_begun = True
            pool.submit(self.content, Urgency.READING)

    def read_later(self, pool: Pool) -> None:
        """The same, when the pool has nothing else to do."""
        if not self._is_begun:
            self._is_begun = True
            pool.submit(self.content, Urgency.READING_AHEAD)

    def take(self, positions: IntArray) -> Block:
        """The rows at positions of the window's order, int64."""
        block, order = self.content()
        if order is not None:
            return block.take(order[positions])
        first, count = int(positions[0]), len(positions)
        if count == int(positions[-1]) - first + 1:
            return block.slice(first, first + count)
        return block.take(positions)


class Windows(Protocol):
    """The windows of all spans and epochs, for the shards of one process."""

    def planned(self, epoch: int, span: int, window: int) -> int | None:
        """Rows in a window before it is read: 0 past the last; None where it must be read to
        know."""
        ...

    def start(self, epoch: int) -> dict[str, Any]:
        """The state that leads back to an epoch's start; empty where the epoch's number does."""
        ...

    def expect(self, user: int, epoch: int, span: int, window: int) -> None:
        """Say that ``user`` will ask for this window and later ones of the span."""
        ...

    def get(
        self, user: int, epoch: int, span: int, window: int, state: dict[str, Any]
    ) -> Window | None:
        """A window, to be read if no other user has; None past the last one.

        ``user`` has no more need of earlier windows of this span. ``state`` is where to read
        from, as an earlier window's ``after`` said.
        """
        ...

    def close(self) -> None:
        """Let go of all rows: the pass is over."""
        ...


class Held:
    """What one process holds of a span."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reading = threading.Lock()
        self.reader: Reader | None = None
        self.windows: dict[tuple[int, int], Window] = {}
        self.needs: dict[int, tuple[int, int]] = {}

    def prune(self, user: int, key: tuple[int, int], most: int | None = None) -> None:
        """Drop windows before those that users are at, and the oldest beyond ``most``."""
        self.needs[user] = key
        least = min(self.needs.values())
        for old in [k for k in self.windows if k < least]:
            del self.windows[old]
        while most is not None and len(self.windows) > most:
            del self.windows[min(k for k in self.windows if k != key)]


class ListedWindows:
    """Windows of a source that lists its blocks.

    Args:
        source: where rows are read.
        blocks: the source's blocks.
        layout_of: how an epoch is cut.
        block_order: order of the blocks in an epoch, or None for file order.
        seed: of the shuffle; None where nothing is shuffled.
        before: the stages before the shuffle.
        keeps_rows: whether those keep all rows.
        pool: threads that read ahead; None for no reading ahead.
        ahead_bytes: bytes that all windows may take for one more to be read ahead.
        cached: the source's blocks as a cache keeps them; None to read the source.
        following: tells the span that a user comes to in the next epoch, which is then read ahead too.
    """

    def __init__(
        self,
        source: RowSource,
        blocks: BlockTable,
        layout_of: Callable[[int], Layout | StreamLayout],
        block_order: Callable[[int], IntArray | None],
        seed: int | None,
        before: Before,
        keeps_rows: bool,
        pool: Pool | None = None,
        ahead_bytes: int = 0,
        cached: BlockCache | None = None,
        following: Following = no_more,
    ) -> None:
        self._source = source
        self._blocks = blocks
        self._layout_of = layout_of
        self._block_order = block_order
        self._seed = seed
        self._before = before
        self._keeps_rows = keeps_rows
        self._pool = pool
        self._ahead_bytes = ahead_bytes
        self._following = following
        self._cached = cached
        self._spans: dict[int, Held] = {}
        self._span_of: dict[int, int] = {}
        self._lock = threading.Lock()

    def expect(self, user: int, epoch: int, span: int, window: int) -> None:
        held = self._held(user, span)
        with held.lock:
            held.needs.setdefault(user, (epoch, window))

    def _held(self, user: int, span: int) -> Held:
        """What is held of a span for a user, who is in no other span any more."""
        with self._lock:
            before = self._span_of.get(user)
            if before is not None and before != span:
                left = self._spans[before]
                with left.lock:
                    left.needs.pop(user, None)
            self._span_of[user] = span
            return self._spans.setdefault(span, Held())

    def start(self, epoch: int) -> dict[str, Any]:
        return {}

    def planned(self, epoch: int, span: int, window: int) -> int | None:
        layout = self._layout(epoch)
        if window >= layout.num_windows(span):
            return 0
        if not self._keeps_rows:
            return None
        start, stop = layout.window(span, window)
        return stop - start

    def _layout(self, epoch: int) -> Layout:
        layout = self._layout_of(epoch)
        assert isinstance(layout, Layout)
        return layout

    def get(
        self, user: int, epoch: int, span: int, window: int, state: dict[str, Any]
    ) -> Window | None:
        held = self._held(user, span)
        with held.lock:
            held.prune(user, (epoch, window), MOST_HELD)
            if window >= self._layout(epoch).num_windows(span):
                return None
            found = self._window(held, epoch, span, window)
        if self._pool is not None:
            upcoming: int | None = span
            later = (epoch, window + 1)
            if window + 1 >= self._layout(epoch).num_windows(span):
                upcoming, later = self._following(user, epoch), (epoch + 1, 0)
            if upcoming is not None:
                self._read_ahead(found, upcoming, *later)
        return found

    def close(self) -> None:
        with self._lock:
            spans, self._spans, self._span_of = list(self._spans.values()), {}, {}
        for held in spans:
            with held.reading:
                if held.reader is not None:
                    held.reader.close()

    def _window(self, held: Held, epoch: int, span: int, window: int) -> Window:
        key = (epoch, window)
        if key not in held.windows or held.windows[key].failed is not None:
            planned = self.planned(epoch, span, window)
            # Not a reference to these windows: in a cycle, their rows would outlive the last one.
            read = partial(_read_of, ref(self), ref(held), epoch, span, window)
            held.windows[key] = Window(planned, read)
        return held.windows[key]

    def _read_ahead(self, current: Window, span: int, epoch: int, window: int) -> None:
        """Have a window read by the pool, if there is room for it."""
        assert self._pool is not None
        with self._lock:
            held = self._spans.setdefault(span, Held())
        if (epoch, window) in held.windows or window >= self._layout(epoch).num_windows(span):
            return
        size, all_bytes = self._bytes(current)
        if not size or all_bytes + size > self._ahead_bytes:
            return
        with held.lock:
            found = self._window(held, epoch, span, window)
        found.read_later(self._pool)

    def _bytes(self, current: Window) -> tuple[int, int]:
        """Bytes of a window, and of all, those that are to be read taken for as large as the largest."""
        with self._lock:
            spans = list(self._spans.values())
        sizes = [window.nbytes for held in spans for window in list(held.windows.values())]
        largest = max(sizes, default=0)
        return current.nbytes or largest, sum(size or largest for size in sizes)

    def _read(
        self, held: Held, epoch: int, span: int, window: int
    ) -> tuple[Block, IntArray | None]:
        if held.reader is None:
            held.reader = self._source.reader()
        layout = self._layout(epoch)
        first = layout.span(span)[0]
        start, stop = layout.window(span, window)
        with self._lock:
            starts, order = self._blocks.order((epoch,), lambda: self._block_order(epoch))
        wanted = []
        for block, low, high in segments(starts, order, first + start, first + stop):
            begin = int(self._blocks.begins[block])
            wanted.append((block, begin + low, begin + high))
        if self._cached is not None:
            rows = self._before(self._cached.read(wanted, held.reader).of_epoch(epoch))
        else:
            firsts = self._blocks.firsts
            if isinstance(held.reader, LooksAhead):
                held.reader.expect([block for block, _, _ in wanted])
            reader, source = held.reader, self._source
            parts = (read_rows(source, reader, *stretch) for stretch in wanted)
            ids = [np.arange(firsts[b] + low, firsts[b] + high) for b, low, high in wanted]
            data = join_payloads(parts, stop - start)
            read = Block(data, np.concatenate(ids), epoch=epoch)
            rows = self._before(read)
        if self._seed is None:
            return rows, None
        return rows, permutation(len(rows), self._seed, "window", epoch, span, window)


def _read_of(
    windows: ref[ListedWindows], held: ref[Held], epoch: int, span: int, window: int
) -> tuple[Block, IntArray | None]:
    """Read a window, if somebody is left who needs it."""
    asked, its = windows(), held()
    if asked is None or its is None:
        raise RuntimeError("a window was asked for whose pass is over")
    with its.reading:
        return asked._read(its, epoch, span, window)


def chain_before(stages: Sequence[Any]) -> Before:
    """The stages before the shuffle as one function on a window's rows."""

    def apply(block: Block) -> Block:
        for stage in stages:
            run = Run(block, Cursors.counting({}, np.arange(len(block) + 1, dtype=np.int64)))
            with naming_bad_text(block, stage):
                block = stage.process(run).block
        return block

    return apply
