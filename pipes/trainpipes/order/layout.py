"""Who gets which rows, in which order: pure functions, no I/O, no state.

For an epoch of N rows cut into batches of B rows:

    batch m     number in the global sequence, over all ranks
    shard s     residue class of m modulo S = num_shards: *who*
    span g      one of G contiguous ranges of the epoch's rows: *where*   (G divides S)
    window w    part of a span; its rows are permuted together
    chunk c     rows that one of the S / G shards of a span gets at a time

Batch i of an epoch is chunk ``i // G`` of span ``i % G`` and belongs to shard ``i % S``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np

from trainpipes._internal.checks import IntArray
from trainpipes._internal.locks import cached_property
from trainpipes._internal.messages import warn_once
from trainpipes.errors import TopologyError


@dataclass(frozen=True)
class Topology:
    """Worker ``worker`` of W on rank ``rank`` of R.

    Args:
        members: the group's global ranks, if not all.
        reads_all: whether each consumer goes through the batches of all shards, to count them.
    """

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1
    members: tuple[int, ...] | None = None
    reads_all: bool = False

    def check(self, num_shards: int, sharded: bool, one_consumer: str = "") -> None:
        """Raise where the ranks and workers can't share the shards, and warn once where they share some.
        ``one_consumer``: why there may be only one consumer."""
        consumers = self.world_size * self.num_workers
        if num_shards % consumers == 0:
            return
        readers = f"{self.world_size} ranks" if self.world_size > 1 else ""
        if self.num_workers > 1:
            readers += (" x " if readers else "") + f"{self.num_workers} DataLoader workers"
        if one_consumer:
            raise TopologyError(f"{readers}: {one_consumer}")
        if not sharded:
            raise TopologyError(
                f"{readers} would all read the same rows: add .sharding_filter() to the pipeline"
            )
        if self.rank or self.worker:
            return
        reads, least = num_shards // gcd(consumers, num_shards), -(-num_shards // consumers)
        cost = f"each reads {reads} shards where {least} would do"
        if reads == least:
            cost = f"each shard is read {consumers // gcd(consumers, num_shards)} times"
        would = [n for n in (num_shards // consumers * consumers, least * consumers) if n]
        way = f"num_shards={' or '.join(map(str, would))} would"
        if self.num_workers > 1 and num_shards % self.world_size == 0:
            way += ", and trainpipes.Loader takes any number of workers"
        warn_once(f"{readers} do not divide num_shards={num_shards}: {cost}; {way}")

    def first(self, m: int) -> int:
        return m + (self.rank - m) % self.world_size

    def next_slot(self, m: int, origin: int) -> int:
        """The first batch of this consumer at or after ``m``; workers take turns from ``origin`` on."""
        stride = self.world_size * self.num_workers
        first = self.first(origin) + self.world_size * self.worker
        return max(m, origin) + (first - max(m, origin)) % stride

    def step(self, num_shards: int) -> int:
        """The distance between batches of the shards that this consumer reads, which may be another
        consumer's.
        """
        return 1 if self.reads_all else gcd(self.world_size * self.num_workers, num_shards)

    def shards(self, origin: int, num_shards: int) -> set[int]:
        """The shards that it reads."""
        return set(range(num_shards)) if self.reads_all else self.own_shards(origin, num_shards)

    def own_shards(self, origin: int, num_shards: int) -> set[int]:
        """The shards that give it batches."""
        step = gcd(self.world_size * self.num_workers, num_shards)
        return set(range(self.next_slot(origin, origin) % step, num_shards, step))


#: Most rows that a shard gets at a time where counts are unknown.
MAX_CHUNK = 256
#: How often the first window of a span doubles until it has a whole window's rows.
OCTAVES = 4


class WindowKey(NamedTuple):
    """Which window: its epoch, span and number. Earlier windows of a span compare as less."""

    epoch: int
    span: int
    window: int


def divisors(n: int) -> list[int]:
    """Ascending.

    >>> divisors(12), divisors(16)
    ([1, 2, 3, 4, 6, 12], [1, 2, 4, 8, 16])
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def count_batches(rows: int, batch_size: int, drop_last: bool) -> int:
    """As a plain ``DataLoader`` counts them.

    >>> count_batches(100, 32, drop_last=False), count_batches(100, 32, drop_last=True)
    (4, 3)
    """
    return rows // batch_size if drop_last else -(-rows // batch_size)


def slots_before(m: int, shard: int, num_shards: int) -> int:
    """How many batches below number ``m`` belong to ``shard``.

    >>> [slots_before(10, shard, 4) for shard in range(4)]
    [3, 3, 2, 2]
    """
    return max(0, -(-(m - shard) // num_shards))


@dataclass(frozen=True)
class EqualWindows:
    """Windows of about the same number of rows."""

    rows: int
    count: int

    @property
    def largest(self) -> int:
        return -(-self.rows // self.count) if self.count else 0

    def start(self, window: int) -> int:
        """First row of a window; ``rows`` past the last."""
        return window * self.rows // self.count


@dataclass(frozen=True)
class GrowingWindows:
    """Windows of a span that begin small and grow to ``size`` rows; the last window has up to ``last``.

    One curve has the starts of all spans' windows. Span g of G has those at v = j + (g + 1/2) / G
    for integers j, so that the windows of different spans begin at different rows, evenly spread. The
    curve begins at v = -``OCTAVES``; it doubles with each step up to v = 1, then each step adds ``size``
    rows, and in the last step the rest of the span falls from ``last`` rows to half of that.

    The arithmetic is of integers: alike on every machine, for any number of rows.

    Args:
        rows: three windows or more.
        size: rows of a window after the growth, at least.
        last: most rows of the last window, ``size`` to twice that, and two rows or more.
        numerator: of the fraction (g + 1/2) / G.
        denominator: of the same.
    """

    rows: int
    size: int
    last: int
    numerator: int
    denominator: int

    @property
    def _grown(self) -> int:
        """Where the growth ends: the curve at v = 1."""
        return min(2 * self.size, self.rows - self.last)

    @property
    def _octaves(self) -> int:
        return min(OCTAVES, (self._grown // 2).bit_length() - 1)

    @property
    def _end(self) -> int:
        """Where the curve ends, times ``denominator * size``, less the fraction of this span."""
        straight = self.rows - self.last - self._grown
        return (2 * self.size + straight) * self.denominator - self.numerator * self.size

    @property
    def count(self) -> int:
        return self._octaves + 1 - -self._end // (self.denominator * self.size)

    def start(self, window: int) -> int:
        """First row of a window; ``rows`` past the last."""
        step, unit = window - 1 - self._octaves, self.denominator
        if window == 0:
            return 0
        if step <= 0:
            return self._grown * _doubling(self.numerator, unit) // (6 * unit**2 << -step)
        left = self._end - step * unit * self.size
        if left <= 0:
            return self.rows
        if left <= (unit := unit * self.size):
            return self.rows - -(-self.last * _doubling(left, unit) // (6 * unit**2))
        return self._grown + (step - 1) * self.size + self.numerator * self.size // self.denominator


def _doubling(numerator: int, denominator: int) -> int:
    """A curve from 1 to 2 over fractions from 0 to 1, close to 2 to the power of the fraction, whose slope
    doubles, too; times ``3 * denominator**2``.
    """
    return 3 * denominator**2 + 2 * numerator * denominator + numerator**2


@dataclass(frozen=True)
class Layout:
    """How an epoch of N rows is cut into spans, windows and chunks.

    Args:
        rows: N, before any filter.
        batch_size: B; 1 where the pipeline gives rows.
        num_shards: S.
        window_rows: least rows in a window: the shuffle's buffer.
        span_rows: least rows in a span: the buffer again, or 1 without a shuffle.
        window_limit: most rows in a window.
        whole: whether spans are cut and dealt in whole batches; else by rows.
        rolling: whether batches go on over the joint of two epochs (``.repeat().batch()``).
        stride: whether there is one span over all rows: file order.
        changes: first batch of each new size, by its number in the epoch, and that size.
        lanes: that take turns at each shard's batches (only with ``whole``).
        grows: whether the first windows of a span are small, and spans' windows end at different
            times, so that no batch waits until all spans have read a window.
    """

    rows: int
    batch_size: int
    num_shards: int
    window_rows: int
    span_rows: int = 1
    window_limit: int | None = None
    whole: bool = True
    rolling: bool = False
    stride: bool = False
    changes: tuple[tuple[int, int], ...] = ()
    lanes: int = 1
    grows: bool = False

    @cached_property
    def num_spans(self) -> int:
        """G: the largest divisor of S for which each span has ``span_rows`` rows, else 1."""
        if self.stride:
            return 1
        for spans in reversed(divisors(self.num_shards)):
            if self._shortest(spans) >= max(1, self.span_rows):
                return spans
        return 1

    @property
    def sharers(self) -> int:
        """S / G: the shards that share a span; each of their lanes counts."""
        return self.num_shards * self.lanes // self.num_spans

    @property
    def by_batches(self) -> bool:
        return self.whole and not self.rolling

    def _shortest(self, spans: int) -> int:
        last = spans - 1
        if self.by_batches:  # the short batch may make an earlier span the shortest
            full = count_batches(self.rows, self.batch_size, drop_last=False)
            short = max(0, full - 1) % spans
            return min(self._size(last, spans), self._size(short, spans))
        return self._size(last, spans)

    def _size(self, span: int, spans: int) -> int:
        return self._start(span + 1, spans) - self._start(span, spans)

    def _start(self, span: int, spans: int) -> int:
        """First row of a span, of ``spans``: longer spans first."""
        if not self.by_batches:
            return span * (self.rows // spans) + min(span, self.rows % spans)
        full = count_batches(self.rows, self.batch_size, drop_last=False)
        start = self.batch_size * (span * (full // spans) + min(span, full % spans))
        if full and span > (full - 1) % spans:
            start -= -self.rows % self.batch_size
        return start

    def span(self, span: int) -> tuple[int, int]:
        """First row of a span in the epoch's order, and the row after its last.

        >>> layout = Layout(rows=100, batch_size=8, num_shards=4, window_rows=1)
        >>> [layout.span(g) for g in range(layout.num_spans)]
        [(0, 28), (28, 52), (52, 76), (76, 100)]
        """
        return self._starts[span], self._starts[span + 1]

    @cached_property
    def _starts(self) -> Sequence[int]:
        spans = self.num_spans
        return [self._start(span, spans) for span in range(spans + 1)]

    def num_windows(self, span: int) -> int:
        return self._windows(span).count

    def window(self, span: int, window: int) -> tuple[int, int]:
        """First row of a window, counted from the span's first, and the row after its last."""
        windows = self._windows(span)
        return windows.start(window), windows.start(window + 1)

    def window_of(self, span: int, row: int) -> int:
        """The window of a row counted from the span's first; the number of windows past the end."""
        windows = self._windows(span)
        if row >= windows.rows:
            return windows.count
        return bisect_right(range(1, windows.count), row, key=windows.start)

    def windows_of(self, span: int, rows: IntArray) -> IntArray:
        """The window of each of some rows, int64, counted from the span's first."""
        windows = self._windows(span)
        starts = np.array([windows.start(n) for n in range(1, windows.count)], dtype=np.int64)
        return np.searchsorted(starts, rows, side="right").astype(np.int64)

    def mixed_rows(self, span: int) -> int:
        """Rows of most windows of a span: of those that neither grow nor end it."""
        windows = self._windows(span)
        return windows.size if isinstance(windows, GrowingWindows) else windows.largest

    def _windows(self, span: int) -> EqualWindows | GrowingWindows:
        start, stop = self.span(span)
        rows, limit = stop - start, self.window_limit
        count = max(1, rows // max(1, self.window_rows))
        if limit is not None:
            count = max(count, -(-rows // limit))
        count = min(count, rows)
        # A buffer of a single row mixes none.
        if self.grows and not self.stride and count >= 3 and self.window_rows > 1:
            size, last = self.window_rows, 2 * self.window_rows
            if limit is not None and limit < last:
                size, last = max(1, min(size, limit * 6 // 7)), limit
            if min(last, rows - last) >= 2:
                return GrowingWindows(rows, size, last, 2 * span + 1, 2 * self.num_spans)
        return EqualWindows(rows, count)

    def _pieces(self, span: int) -> list[tuple[int, int, int]]:
        """First chunk, first row and batch size of each part of a span between changes."""
        pieces = [(0, 0, self.batch_size)]
        for number, size in self.changes:
            first, row, before = pieces[-1]
            chunk = slots_before(number, span, self.num_spans)
            pieces.append((chunk, row + (chunk - first) * before, size))
        return pieces

    def chunk_row(self, span: int, chunk: int) -> int:
        first, row, size = next(p for p in reversed(self._pieces(span)) if p[0] <= chunk)
        return row + (chunk - first) * size

    def chunks_of(self, span: int, rows: IntArray) -> tuple[IntArray, IntArray]:
        """The chunk of each of some rows, counted as ``chunk_row`` counts them, and the row's place in it."""
        pieces = self._pieces(span)
        chunk = _chunk_at(rows, pieces)
        piece = np.searchsorted([first for _, first, _ in pieces[1:]], rows, side="right")
        first, row, size = np.array(pieces, dtype=np.int64)[piece].T
        return chunk, rows - row - (chunk - first) * size

    def count(self, drop_last: bool) -> int:
        """Batches in an epoch (``by_batches`` only). After a change of their size the epoch ends at the first
        batch that is missing.
        """
        if not self.changes:
            return count_batches(self.rows, self.batch_size, drop_last)
        if self.num_spans == 1:
            first, row, size = self._pieces(0)[-1]
            return first + count_batches(max(0, self.rows - row), size, drop_last)
        ends = []
        for span in range(self.num_spans):
            first, row, size = self._pieces(span)[-1]
            start, stop = self.span(span)
            ends.append(span + self.num_spans * (first + max(0, stop - start - row) // size))
        return min(ends)

    def chunk_rows(self, span: int) -> int:
        if self.whole:
            return self.batch_size
        start, stop = self.span(span)
        return max(1, min(MAX_CHUNK, (stop - start) // (16 * self.sharers)))

    def owned(self, span: int, sharer: int, window: int, rows: int, epoch: int) -> IntArray:
        """Positions in a window's order that belong to shard ``sharer`` of the span, int64,
        ascending. ``epoch``: from the start of the run, if rolling.
        """
        if self.sharers == 1:
            return np.arange(rows, dtype=np.int64)
        if not self.whole:
            turn = (sharer - window) % self.sharers
            return _dealt(rows, 0, self.chunk_rows(span), self.sharers, turn)
        start, stop = self.span(span)
        first = self.window(span, window)[0]
        if self.rolling:
            first += epoch * (stop - start)
        if not self.changes:
            return _dealt(rows, first, self.batch_size, self.sharers, sharer)
        chunk = _chunk_at(first + np.arange(rows, dtype=np.int64), self._pieces(span))
        return np.flatnonzero(chunk % self.sharers == sharer).astype(np.int64, copy=False)


def _dealt(rows: int, first: int, size: int, sharers: int, sharer: int) -> IntArray:
    """Positions of ``rows`` rows whose chunk, of ``size`` rows, is one sharer's; row 0 is the
    ``first`` of all.
    """
    if size > rows:  # as of a batch that is to hold all rows
        chunk = (first + np.arange(rows, dtype=np.int64)) // size
        return np.flatnonzero(chunk % sharers == sharer).astype(np.int64, copy=False)
    low, high = first // size, (first + rows - 1) // size
    chunks = np.arange(low + (sharer - low) % sharers, high + 1, sharers, dtype=np.int64)
    positions: IntArray = (chunks[:, None] * size + np.arange(-first, size - first)).ravel()
    return positions[(positions >= 0) & (positions < rows)]


def _chunk_at(rows: IntArray, pieces: Sequence[tuple[int, int, int]]) -> IntArray:
    chunk: IntArray = rows // pieces[0][2]
    for first, row, size in pieces[1:]:
        chunk = np.where(rows >= row, first + (rows - row) // size, chunk)
    return chunk


@dataclass(frozen=True)
class StreamLayout:
    """How a stream is dealt: as a single span of windows of ``window_rows``. The first two of a shuffled one
    have half as many each, so that its first batch waits for one buffer of rows, and a stream that
    ends within a buffer is a single window.
    """

    batch_size: int
    num_shards: int
    window_rows: int
    whole: bool = True
    shuffled: bool = False

    @property
    def num_spans(self) -> int:
        return 1

    @property
    def sharers(self) -> int:
        return self.num_shards

    def start(self, window: int) -> int:
        """First row of a window.

        >>> [StreamLayout(1, 1, 100, shuffled=True).start(window) for window in range(5)]
        [0, 51, 102, 202, 302]
        """
        if not self.shuffled:
            return window * self.window_rows
        half = self.window_rows // 2 + 1
        return half * min(window, 2) + self.window_rows * max(0, window - 2)

    def owned(self, span: int, sharer: int, window: int, rows: int, epoch: int) -> IntArray:
        position = np.arange(rows, dtype=np.int64)
        if self.sharers == 1:
            return position
        if self.whole:
            chunk = (self.start(window) + position) // self.batch_size
        else:
            chunk = position // max(1, min(MAX_CHUNK, self.window_rows // 16)) + window
        return np.flatnonzero(chunk % self.sharers == sharer).astype(np.int64, copy=False)


def segments(
    starts: IntArray, order: IntArray | None, first: int, stop: int
) -> Sequence[tuple[int, int, int]]:
    """The blocks, and rows within them, that make up rows ``first`` to ``stop`` of an epoch.

    Args:
        starts: rows before each block in the epoch's order, and N: int64 ``[blocks + 1]``.
        order: of the blocks, int64; None for file order.

    >>> segments(np.array([0, 4, 10]), np.array([1, 0]), 2, 7)
    [(1, 2, 4), (0, 0, 3)]
    """
    parts: list[tuple[int, int, int]] = []
    if first >= stop:
        return parts
    place = int(np.searchsorted(starts, first, side="right")) - 1
    while first < stop:
        begin, end = int(starts[place]), int(starts[place + 1])
        if end > first:
            block = place if order is None else int(order[place])
            parts.append((block, first - begin, min(end, stop) - begin))
            first = end
        place += 1
    return parts
