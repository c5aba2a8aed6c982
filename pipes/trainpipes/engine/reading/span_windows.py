"""How the windows of spans are read: of a source that lists its blocks, where each span has a reader; or of
a stream, cut as it comes, with an open pass for each epoch that is needed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from trainpipes._internal.activity import doing
from trainpipes._internal.checks import IntArray
from trainpipes._internal.locks import InterruptibleLock
from trainpipes._internal.progress import Progress
from trainpipes.columns.block import Block
from trainpipes.columns.payload import join_in_order
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.reading.windows import LEAST_HELD, Content, Window, WindowMaker
from trainpipes.errors import DataError, shown
from trainpipes.interfaces.source import (
    LooksAhead,
    RandomAccessSource,
    Reader,
    RowStream,
    StreamReader,
    Taker,
    read_full,
    read_rows,
)
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import Apply, put_through
from trainpipes.order.layout import StreamLayout, WindowKey

Stretches: TypeAlias = "list[tuple[int, int, int]]"

#: Most windows of a span whose blocks are fetched ahead, and how far beyond what was read, of what was read:
#: little at first, since a peek is no epoch.
MOST_AHEAD, FARTHER = 15, 2


@dataclass
class _SpanReading:
    """Where a span is read: ``at`` block and row. ``coming``: the window that is read next, from row
    ``first`` on; the fetching ahead has come to the window of turn ``ahead``. ``done``: the span's last
    window was read."""

    coming: WindowKey
    ahead: float
    first: int = 0
    lock: InterruptibleLock = field(default_factory=InterruptibleLock)
    reader: Reader | None = None
    at: tuple[int, int] = (-1, 0)
    done: bool = False


class ListedMaker(WindowMaker):
    """Reads windows as stretches of blocks, a reader for each span, and puts them through the stages
    below.
    """

    def __init__(self, plan: Plan) -> None:
        self._layouts = plan.layouts
        self._source, self._opener = plan.inputs.listed, plan.chain.opener
        self._cached = plan.inputs.cached_blocks
        before = plan.chain.before
        has_holes = self._cached is not None and self._cached.holes
        self._keeps_rows = has_holes or all(stage.traits.keeps_rows for stage in before)
        cached = plan.chain.cached or 0
        self._before: Sequence[Any] = before[cached:]
        self._apply: Apply | None = None  # of those below a cache
        if plan.workers is not None:
            self._before = plan.workers.handed_out(plan, self._before)
            self._apply = partial(put_through, plan.workers.handed_out(plan, before[:cached]))
        self._fetched = self._layouts.fetched_bytes
        # A window may have no chunk for a shard: those that share a span stand in as many windows of it.
        self.most_held = max(LEAST_HELD, self._layouts.usual.sharers + 1)
        self._spans: dict[int, _SpanReading] = {}  # of each span
        self._is_far = not getattr(self._source, "is_local", True)
        #: The first turn that was read, and the last that is fetched ahead.
        self._began, self._until = math.inf, -math.inf

    def planned(self, key: WindowKey) -> int | None:
        rows = len(self._layouts.places(key))
        return rows if self._keeps_rows or not rows else None

    def turn(self, key: WindowKey) -> float:
        return self._layouts.turn(key)

    def window(self, key: WindowKey, state: dict[str, Any], first: int = 0) -> Window | None:
        if not self._layouts.places(key):
            return None
        first = self._first(first)
        reading = self._reading(key, first)
        return Window(self.planned(key), partial(self._read, key, reading, first), first=first)

    def expect(self, key: WindowKey, first: int) -> None:
        if self._layouts.places(key):
            reading = self._reading(key, self._first(first))
            if reading.coming == key:
                reading.first = min(reading.first, self._first(first))

    def _first(self, first: int) -> int:
        in_order = self._layouts.chain.seed is None and self._keeps_rows
        return first if in_order else 0  # another order needs all rows

    def _reading(self, key: WindowKey, first: int) -> _SpanReading:
        reading = self._spans.get(key.span)
        if reading is None:
            turn = self._layouts.turn(key)
            reading = self._spans.setdefault(key.span, _SpanReading(key, turn, first))
        return reading

    def close(self) -> None:
        for reading in self._spans.values():
            with reading.lock:
                if reading.reader is not None:
                    reading.reader.close()

    def _read(
        self, key: WindowKey, reading: _SpanReading, first: int
    ) -> tuple[Block, IntArray | None]:
        wanted = self._layouts.stretches(key, first)
        expected, lies_in_order = len(self._layouts.places(key)) - first, False
        # Stages before the shuffle, and a cache, may leave out some.
        known = not self._before and self._cached is None
        order = self._layouts.row_order(key, expected) if known else None
        with reading.lock, doing(self._opener):
            reader = self._reader(reading, wanted[0][:2])
            if self._cached is not None:
                rows = self._cached.read(wanted, reader, self._apply).of_epoch(key.epoch)
            else:
                self._look_ahead(reading, key, wanted)
                parts = (read_rows(self._source, reader, *stretch) for stretch in wanted)
                data, lies_in_order = join_in_order(parts, expected, order)
                ids = self._layouts.inputs.blocks.numbers(wanted)
                ids = ids[order] if lies_in_order else ids
                rows = Block(data, ids, epoch=key.epoch)
            reading.at = wanted[-1][0], wanted[-1][2]
            reading.done = not self._layouts.places(key._replace(window=key.window + 1))
            rows = put_through(self._before, rows)
        if lies_in_order:
            return rows, np.arange(len(rows), dtype=np.int64)
        if order is not None and len(order) == len(rows):
            return rows, order
        return rows, self._layouts.row_order(key, len(rows))

    def _look_ahead(self, reading: _SpanReading, key: WindowKey, wanted: Stretches) -> None:
        """Have the blocks of a window fetched, then those that all spans need next, in order of need."""
        turn = self._layouts.turn(key)
        self._began = min(self._began, turn)
        self._until = max(self._until, turn + FARTHER * (turn - self._began))
        self._expect(reading, key, wanted)
        behind = [span for span in list(self._spans.values()) if span.ahead <= self._until]
        for other in behind if self._is_far else ():
            if other is not reading and other.lock.acquire(blocking=False):
                try:
                    self._expect(other, other.coming)
                finally:
                    other.lock.release()

    def _expect(
        self, reading: _SpanReading, key: WindowKey, wanted: Stretches | None = None
    ) -> None:
        """Name to a span's reader the blocks of its windows from ``key`` on that are fetched ahead."""
        turns: dict[int, float] = {}
        if wanted is not None:
            reading.coming, reading.first = key._replace(window=key.window + 1), 0
        reading.ahead = math.inf
        for n in range(MOST_AHEAD + 1):
            coming = key._replace(window=key.window + n)
            if not self._layouts.places(coming):
                break
            turn = self._layouts.turn(coming)
            if (n or wanted is None) and not (self._is_far and turn <= self._until):
                reading.ahead = turn
                break
            first = reading.first if coming == reading.coming else 0
            stretches = wanted if wanted and not n else self._layouts.stretches(coming, first)
            for block, _, _ in stretches:
                turns.setdefault(block, turn)
        if reading.reader is None:
            reading.reader = self._source.reader()
        if isinstance(reading.reader, LooksAhead):
            reading.reader.expect(list(turns), list(turns.values()), self._fetched)

    def _reader(self, reading: _SpanReading, at: tuple[int, int]) -> Reader:
        """The reader of a window. Where another span's has just read up to there, it goes on: no
        block is decoded twice. So does a reader that has ended its span in this block.
        """
        if reading.at != at:
            others = list(self._spans.values())
            near = [span for span in others if span.at == at]
            near += [span for span in others if span.done and span.at[0] == at[0]]
            for other in near:
                if other is not reading and other.lock.acquire(blocking=False):
                    reading.reader, other.reader = other.reader, reading.reader
                    reading.at, other.at = other.at, reading.at
                    other.ahead = -math.inf  # its new reader expects other blocks
                    other.lock.release()
                    break
        if reading.reader is None:
            reading.reader = self._source.reader()
        return reading.reader


@dataclass(frozen=True)
class NumberedRows:
    """Rows that are read when they are taken. ``first``: the window's place in the epoch's order."""

    source: Taker
    numbers: IntArray
    epoch: int
    first: int | None
    opener: Stage

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, index: IntArray) -> Block:
        numbers = self.numbers[index]
        part = 0 if self.first is None else self.first + index
        with doing(self.opener):
            return Block(self.source.take(numbers), numbers, epoch=self.epoch, part=part)

    def coming(self, index: IntArray) -> None:
        self.source.coming(self.numbers[index])

    def slice(self, start: int, stop: int) -> Block:
        return self.take(np.arange(start, stop, dtype=np.int64))


class NumberedMaker(WindowMaker):
    """Windows of row numbers; the rows are read when they are taken."""

    def __init__(self, plan: Plan, source: RandomAccessSource) -> None:
        self._chain = plan.chain
        self._layouts = plan.layouts
        self._source = source

    def planned(self, key: WindowKey) -> int:
        return len(self._layouts.places(key))

    def window(self, key: WindowKey, state: dict[str, Any], first: int = 0) -> Window | None:
        rows = self.planned(key)
        return Window(rows, partial(self._read, key)) if rows else None

    def close(self) -> None:
        """Nothing is open."""

    def _read(self, key: WindowKey) -> Content:
        chain, places = self._chain, self._layouts.places(key)
        if chain.drawn is None:
            return NumberedRows(
                self._source.taker(), self._buffered(key), key.epoch, None, chain.opener
            ), None
        rows = self._layouts.inputs.blocks.rows
        asked = key.epoch, places.start, places.stop, rows
        drawn = np.asarray(chain.drawn.index(*asked))
        count = places.stop - places.start
        good = drawn.shape == (count,) and (not count or drawn.dtype.kind in "iu")
        if not good or (count and not 0 <= drawn.min() <= drawn.max() < rows):
            rule = f"must give {count:,} row numbers, integers from 0 to {rows - 1:,}"
            raise DataError(
                f"{chain.shuffle}: index{asked} of its order {rule}, got {shown(drawn)}"
            )
        first = places.start if chain.may_repeat else None
        numbers = chain.skip_rows + drawn
        taker = self._source.taker()
        return NumberedRows(taker, numbers, key.epoch, first, chain.opener), None

    def _buffered(self, key: WindowKey) -> IntArray:
        """The numbers of the rows that ``ListedMaker`` would read; announces them to the source."""
        blocks, stretches = self._layouts.inputs.blocks, self._layouts.stretches(key)
        numbers = blocks.numbers(stretches)
        order = self._layouts.row_order(key, len(numbers))
        if order is None:  # in file order the system reads ahead by itself
            return numbers
        for block, low, high in stretches:
            first = int(blocks.firsts[block])
            self._source.will_need(first + low, first + high)
        return numbers[order]


@dataclass
class _Pass:
    """One pass over a stream; ``ahead`` are rows read, each with the state after."""

    reader: StreamReader
    window: int
    row: int
    start: dict[str, Any] | None = None
    ahead: deque[tuple[Block, dict[str, Any]]] = field(default_factory=deque)
    ended: bool = False


class StreamMaker(WindowMaker):
    """Cuts windows from a stream. A shuffled stream is read ahead: a short end joins the window before it."""

    most_held = None  # making a window again means to read from the start

    def __init__(self, plan: Plan, stream: RowStream) -> None:
        self._layouts = plan.layouts
        self._chain = plan.chain
        self._before = plan.chain.before
        if plan.workers is not None:
            self._before = plan.workers.handed_out(plan, self._before)
        self._stream = stream
        layout = plan.layouts.usual
        assert isinstance(layout, StreamLayout)
        self._layout = layout
        self._step = layout.window_rows  # rows that are read at a time where they are passed over
        self._passes: dict[int, _Pass] = {}

    def planned(self, key: WindowKey) -> None:
        return None

    def start(self, epoch: int) -> dict[str, Any]:
        if not self._stream.seekable:
            return {}
        current = self._passes.get(epoch)
        if current is None or current.start is None:
            current = self._open(epoch, 0, {})
        assert current.start is not None
        return current.start

    def window(self, key: WindowKey, state: dict[str, Any], first: int = 0) -> Window | None:
        current = self._passes.get(key.epoch)
        if current is None or current.window > key.window:
            current = self._open(key.epoch, key.window, state)
        try:
            self._skip_rows(current)
            # rows to read and drop
            behind = self._layout.start(key.window) - self._layout.start(current.window)
            with Progress("reading again up to the saved place", behind, "rows") as progress:
                while True:
                    cut = self._cut(key.epoch, current)
                    if cut is None:
                        return None
                    current.window += 1
                    if current.window > key.window:
                        break
                    progress.advance(len(cut[0]))
            rows, after = put_through(self._before, cut[0]), cut[1]
        except BaseException:  # the next call reads again, so no row is lost
            self._close(key.epoch)
            raise
        order = self._layouts.row_order(key, len(rows))
        return Window(len(rows), lambda: (rows, order), after)

    def let_go(self, epoch: int) -> None:
        for old in [number for number in self._passes if number < epoch]:
            self._close(old)

    def close(self) -> None:
        for epoch in list(self._passes):
            self._close(epoch)

    def _close(self, epoch: int) -> None:
        self._passes.pop(epoch).reader.close()

    def _open(self, epoch: int, window: int, state: dict[str, Any]) -> _Pass:
        if epoch in self._passes:
            self._close(epoch)
        at = state if self._stream.seekable else {}
        reader = self._stream.open(epoch, at or None)
        if at and window:
            row = self._chain.skip_rows + self._layout.start(window)
            current = _Pass(reader, window, row)
        else:
            current = _Pass(reader, 0, 0)
            current.start = self._state(current)  # from before the rows to pass over
        self._passes[epoch] = current
        return current

    def _skip_rows(self, current: _Pass) -> None:
        """Pass over the rows that ``skip`` leaves out."""
        skip = self._chain.skip_rows
        while current.row < skip and not current.ended:
            data = read_full(current.reader, min(self._step, skip - current.row))
            current.ended = data is None
            current.row += 0 if data is None else len(data)

    def _state(self, current: _Pass) -> dict[str, Any]:
        return current.reader.state() if self._stream.seekable else {}

    def _cut(self, epoch: int, current: _Pass) -> tuple[Block, dict[str, Any]] | None:
        wanted = 1 if self._chain.seed is None else 2
        ahead, stop = current.ahead, self._chain.stop_rows
        while not current.ended and len(ahead) < wanted:
            left = math.inf if stop is None else max(0, stop - current.row)
            size = self._size(current.window + len(ahead))
            with doing(self._chain.opener):
                data = read_full(current.reader, int(min(size, left))) if left else None
            current.ended = data is None or len(data) < size
            if data is not None and len(data):
                ids = np.arange(current.row, current.row + len(data), dtype=np.int64)
                current.row += len(data)
                ahead.append((Block(data, ids, epoch=epoch), self._state(current)))
        if not ahead:
            return None
        rows, after = ahead.popleft()
        if current.ended and len(ahead) == 1 and len(ahead[0][0]) < self._size(current.window + 1):
            rest, after = ahead.popleft()
            rows = Block.join([rows, rest])
        return rows, after

    def _size(self, window: int) -> int:
        return self._layout.start(window + 1) - self._layout.start(window)
