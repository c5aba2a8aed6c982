"""The windows of an epoch: read once in a process, put through what stands before the shuffle,
ordered, and shared by the shards that need them.

Memory: one window for each open span, two where its shards stand at a window's end.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from trainpipes.order import IntArray, Layout, StreamLayout, permutation, segments
from trainpipes.runtime.block import Block, join_payloads
from trainpipes.runtime.run import Cursors, Run
from trainpipes.runtime.source import Place, Reader, RowSource, RowStream, StreamReader

__all__ = ["BlockTable", "ListedWindows", "StreamWindows", "Window", "Windows"]

#: Windows of one span held at most: shards that a filter sets far apart have older ones read again.
MOST_HELD = 4
#: What stands before the shuffle: rows in, rows out.
Before = Callable[[Block], Block]


@dataclass(frozen=True)
class Window:
    """Rows that a shuffle holds at once.

    Args:
        block: the rows, in the order in which they were read.
        order: the order in which they come out, int64 ``[rows]``; None for as they are.
        after: the state of what is read from at this window's end; empty if it needs none.
    """

    block: Block
    order: IntArray | None
    after: dict[str, Any] = field(default_factory=dict)

    def take(self, positions: IntArray) -> Block:
        """The rows at positions of the window's order, int64."""
        if self.order is not None:
            return self.block.take(self.order[positions])
        first, count = int(positions[0]), len(positions)
        if count == int(positions[-1]) - first + 1:
            return self.block.slice(first, first + count)
        return self.block.take(positions)


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
        """A window, read if no other user has; None past the last one.

        ``user`` has no more need of earlier windows of this span. ``state`` is where to read
        from, as an earlier window's ``after`` said.
        """
        ...


class BlockTable:
    """A source's blocks as arrays, with rows before ``skip`` and from ``take`` on cut away.

    Attributes:
        firsts: number of each block's first row in file order, int64 ``[blocks + 1]``.
        begins: first row used of each block.
        lengths: rows used of each block.
    """

    def __init__(self, lengths: IntArray, skip: int = 0, stop: int | None = None) -> None:
        self.firsts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        total = int(self.firsts[-1])
        last = total if stop is None else min(stop, total)
        low = np.clip(self.firsts[:-1], skip, max(skip, last))
        high = np.clip(self.firsts[1:], skip, max(skip, last))
        self.begins = low - self.firsts[:-1]
        self.lengths = high - low
        self.rows = int(self.lengths.sum())
        self._orders: OrderedDict[tuple[int, ...], tuple[IntArray, IntArray | None]] = OrderedDict()

    def order(
        self, key: tuple[int, ...], make: Callable[[], IntArray | None]
    ) -> tuple[IntArray, IntArray | None]:
        """Rows before each place of an epoch's order of blocks, and that order."""
        if key not in self._orders:
            order = make()
            lengths = self.lengths if order is None else self.lengths[order]
            starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            self._orders[key] = (starts, order)
            while len(self._orders) > 3:
                self._orders.popitem(last=False)
        return self._orders[key]

    def locate(self, source: RowSource, row: int) -> Place:
        """Where a row, numbered in file order, stands."""
        block = int(np.searchsorted(self.firsts, row, side="right")) - 1
        return source.place(block, row - int(self.firsts[block]))


class _Span:
    """What one process holds of a span."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
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
    ) -> None:
        self._source = source
        self._blocks = blocks
        self._layout_of = layout_of
        self._block_order = block_order
        self._seed = seed
        self._before = before
        self._keeps_rows = keeps_rows
        self._spans: dict[int, _Span] = {}
        self._span_of: dict[int, int] = {}
        self._lock = threading.Lock()

    def expect(self, user: int, epoch: int, span: int, window: int) -> None:
        held = self._held(user, span)
        with held.lock:
            held.needs.setdefault(user, (epoch, window))

    def _held(self, user: int, span: int) -> _Span:
        """What is held of a span for a user, who is in no other span any more."""
        with self._lock:
            before = self._span_of.get(user)
            if before is not None and before != span:
                left = self._spans[before]
                with left.lock:
                    left.needs.pop(user, None)
            self._span_of[user] = span
            return self._spans.setdefault(span, _Span())

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
            key = (epoch, window)
            if key not in held.windows:
                held.windows[key] = self._read(held, epoch, span, window)
            return held.windows[key]

    def _read(self, held: _Span, epoch: int, span: int, window: int) -> Window:
        if held.reader is None:
            held.reader = self._source.reader()
        layout = self._layout(epoch)
        first = layout.span(span)[0]
        start, stop = layout.window(span, window)
        with self._lock:
            starts, order = self._blocks.order((epoch,), lambda: self._block_order(epoch))
        parts, ids = [], []
        for block, low, high in segments(starts, order, first + start, first + stop):
            begin = int(self._blocks.begins[block])
            parts.append(held.reader.read(block, begin + low, begin + high))
            number = int(self._blocks.firsts[block]) + begin
            ids.append(np.arange(number + low, number + high, dtype=np.int64))
        rows = self._before(Block(join_payloads(parts), np.concatenate(ids)))
        if self._seed is None:
            return Window(rows, None)
        return Window(rows, permutation(len(rows), self._seed, "window", epoch, span, window))


class _Pass:
    """One pass over a stream, and the windows that are still needed of it."""

    def __init__(self, reader: StreamReader) -> None:
        self.reader = reader
        self.start = reader.state()
        self.next = 0  # the window that is read next
        self.row = 0  # number of the next row
        self.ahead: list[tuple[Block, dict[str, Any]]] = []
        self.ended = False


class StreamWindows:
    """Windows of a stream, cut as it comes.

    A shuffled stream is read one window ahead, so that a short end joins the window before it.

    Args:
        stream: where rows are read.
        window_rows: rows in a window.
        cut: rows to pass over at the start, and the row to stop before (None for no end).
        seed: of the shuffle; None where nothing is shuffled.
        before: the stages before the shuffle.
    """

    def __init__(
        self,
        stream: RowStream,
        window_rows: int,
        cut: tuple[int, int | None],
        seed: int | None,
        before: Before,
    ) -> None:
        self._stream = stream
        self._rows = window_rows
        self._skip, self._stop = cut
        self._seed = seed
        self._before = before
        self._held = _Span()
        self._passes: dict[int, _Pass] = {}

    def expect(self, user: int, epoch: int, span: int, window: int) -> None:
        with self._held.lock:
            self._held.needs.setdefault(user, (epoch, window))

    def start(self, epoch: int) -> dict[str, Any]:
        if not self._stream.seekable:
            return {}
        with self._held.lock:
            if epoch not in self._passes:
                self._open(epoch, 0, {})
            return self._passes[epoch].start

    def planned(self, epoch: int, span: int, window: int) -> int | None:
        return None

    def get(
        self, user: int, epoch: int, span: int, window: int, state: dict[str, Any]
    ) -> Window | None:
        held = self._held
        with held.lock:
            held.prune(user, (epoch, window))
            for old in [e for e in self._passes if e < min(held.needs.values())[0]]:
                self._passes.pop(old).reader.close()
            key = (epoch, window)
            if key in held.windows:
                return held.windows[key]
            current = self._passes.get(epoch)
            if current is None or current.next > window:
                current = self._open(epoch, window, state)
            while current.next <= window:
                found = self._cut(epoch, current)
                if found is None:
                    return None
                if current.next > window:
                    held.windows[key] = found
                    return found
            return None

    def _open(self, epoch: int, window: int, state: dict[str, Any]) -> _Pass:
        if epoch in self._passes:
            self._passes.pop(epoch).reader.close()
        at = state if self._stream.seekable else {}
        current = _Pass(self._stream.open(epoch, at or None))
        if at:
            current.next, current.row = window, self._skip + window * self._rows
        while current.row < self._skip and not current.ended:
            data = current.reader.read(min(self._rows, self._skip - current.row))
            current.ended = data is None
            current.row += 0 if data is None else len(data)
        self._passes[epoch] = current
        return current

    def _cut(self, epoch: int, current: _Pass) -> Window | None:
        wanted = 1 if self._seed is None else 2
        while not current.ended and len(current.ahead) < wanted:
            left = math.inf if self._stop is None else max(0, self._stop - current.row)
            data = current.reader.read(int(min(self._rows, left))) if left else None
            if data is None or len(data) < self._rows:
                current.ended = True
            if data is not None and len(data):
                ids = np.arange(current.row, current.row + len(data), dtype=np.int64)
                current.row += len(data)
                current.ahead.append((Block(data, ids), current.reader.state()))
        if not current.ahead:
            return None
        rows, after = current.ahead.pop(0)
        short = self._seed is not None and current.ended and len(current.ahead) == 1
        if short and len(current.ahead[0][0]) < self._rows:
            rest, after = current.ahead.pop(0)
            rows = Block.join([rows, rest])
        number, current.next = current.next, current.next + 1
        rows = self._before(rows)
        if self._seed is None:
            return Window(rows, None, after)
        return Window(rows, permutation(len(rows), self._seed, "window", epoch, 0, number), after)


def chain_before(stages: Sequence[Any]) -> Before:
    """The stages before the shuffle as one function on a window's rows."""

    def apply(block: Block) -> Block:
        for stage in stages:
            run = Run(block, Cursors.counting({}, np.arange(len(block) + 1, dtype=np.int64)))
            block = stage.process(run).block
        return block

    return apply
