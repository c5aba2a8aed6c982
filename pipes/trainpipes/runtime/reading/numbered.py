"""Windows of sources that can be read by row number: they hold numbers, and rows are read by those who
own them, straight to where they go.

The numbers are those of a sampler's order (``draw``, ``shuffle(scope="global")``), of a shuffle within a
buffer, or of file order. Of a sampler's order the epoch is one span: its micro-batches are the order's,
one after the other, whatever the number of shards.

Memory: 8 bytes a row of a window, and of the one before it. All threads of a process may ask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from trainpipes.order import IntArray, Layout, StreamLayout, permutation, segments
from trainpipes.runtime.pool import Pool
from trainpipes.runtime.reading.block_table import BlockTable
from trainpipes.runtime.reading.random_access import RandomAccessSource
from trainpipes.runtime.reading.windows import Window
from trainpipes.runtime.rows.block import Block

__all__ = [
    "DRAWN_ROWS",
    "NumberedWindows",
    "RowOrder",
    "buffered_numbers",
    "drawn_numbers",
    "drawn_rows",
]

#: Positions in a window of a sampler's order: 512 KiB of row numbers.
DRAWN_ROWS = 1 << 16
#: Windows of one span held at once: its shards may stand on both sides of a window's end.
MOST_HELD = 2

#: The row numbers of a window: of an epoch, span and window, with its first row in the epoch's order and
#: the row after its last.
Numbers = Callable[[int, int, int, int, int], IntArray]


class RowOrder(Protocol):
    """Which rows an epoch has, and in which order: a pure function."""

    def check(self, rows: int) -> None:
        """Raise unless ``rows`` rows are what it was made for."""
        ...

    def length(self, rows: int) -> int:
        """Positions in an epoch over ``rows`` rows."""
        ...

    def index(self, epoch: int, start: int, stop: int, rows: int) -> IntArray:
        """The rows at positions ``start`` to ``stop``, int64."""
        ...


class NumberedWindow(Window):
    """A stretch of an epoch's order.

    Args:
        source: where rows are read.
        rows: how many.
        numbers: makes their numbers, when rows are first asked for.
        epoch: in which they are read.
        first: its place in the order, where the order may have a row twice.
    """

    def __init__(
        self,
        source: RandomAccessSource,
        rows: int,
        numbers: Callable[[], IntArray],
        epoch: int,
        first: int | None = None,
    ) -> None:
        super().__init__(rows, self._all)
        self._source = source
        self._make = numbers
        self._numbers: IntArray | None = None
        self._epoch = epoch
        self._first = first
        self._making = threading.Lock()

    def take(self, positions: IntArray) -> Block:
        if self._numbers is None:
            with self._making:
                self._numbers = self._make() if self._numbers is None else self._numbers
        index = self._numbers[positions]
        part = 0 if self._first is None else self._first + positions
        return Block(self._source.take(index), index, epoch=self._epoch, part=part)

    def read_in(self, pool: Pool) -> None:
        """Nothing: rows are read by those who take them."""

    def _all(self) -> tuple[Block, IntArray | None]:
        return self.take(np.arange(len(self), dtype=np.int64)), None


class NumberedWindows:
    """Windows of row numbers.

    Args:
        source: where rows are read.
        layout_of: how an epoch is cut.
        numbers: which rows a window has.
        repeats: whether an epoch may have a row twice.
    """

    def __init__(
        self,
        source: RandomAccessSource,
        layout_of: Callable[[int], Layout | StreamLayout],
        numbers: Numbers,
        repeats: bool = False,
    ) -> None:
        self._source = source
        self._layout_of = layout_of
        self._numbers = numbers
        self._repeats = repeats
        self._held: dict[int, dict[tuple[int, int], Window]] = {}  # of each span, the latest last
        self._lock = threading.Lock()

    def planned(self, epoch: int, span: int, window: int) -> int | None:
        layout = self._layout(epoch)
        if window >= layout.num_windows(span):
            return 0
        start, stop = layout.window(span, window)
        return stop - start

    def _layout(self, epoch: int) -> Layout:
        layout = self._layout_of(epoch)
        assert isinstance(layout, Layout)
        return layout

    def start(self, epoch: int) -> dict[str, Any]:
        return {}

    def expect(self, user: int, epoch: int, span: int, window: int) -> None:
        """Nothing: numbers that were let go are made again."""

    def close(self) -> None:
        with self._lock:
            self._held.clear()

    def get(
        self, user: int, epoch: int, span: int, window: int, state: dict[str, Any]
    ) -> Window | None:
        if not self.planned(epoch, span, window):
            return None
        with self._lock:
            held = self._held.setdefault(span, {})
            key = epoch, window
            held[key] = found = held.pop(key, None) or self._window(epoch, span, window)
            if len(held) > MOST_HELD:
                del held[next(iter(held))]
        return found

    def _window(self, epoch: int, span: int, window: int) -> Window:
        layout = self._layout(epoch)
        first = layout.span(span)[0]
        start, stop = (first + row for row in layout.window(span, window))
        make = partial(self._numbers, epoch, span, window, start, stop)
        place = start if self._repeats else None
        return NumberedWindow(self._source, stop - start, make, epoch, place)


def drawn_numbers(order: RowOrder, first: int, rows: int) -> Numbers:
    """The numbers of a sampler's order.

    Args:
        order: says which rows.
        first: the first row to choose from.
        rows: how many there are to choose from.
    """

    def numbers(epoch: int, _span: int, _window: int, start: int, stop: int) -> IntArray:
        return first + order.index(epoch, start, stop, rows)

    return numbers


def buffered_numbers(
    source: RandomAccessSource,
    blocks: BlockTable,
    block_order: Callable[[int], IntArray | None],
    seed: int | None,
) -> Numbers:
    """The numbers of a shuffle within a buffer, or of file order: just the rows, in just the order, that
    ``ListedWindows`` would read whole.

    Args:
        source: is told which rows will be asked for.
        blocks: its blocks.
        block_order: order of the blocks in an epoch, or None for file order.
        seed: of the shuffle; None where nothing is shuffled.
    """
    lock = threading.Lock()

    def numbers(epoch: int, span: int, window: int, start: int, stop: int) -> IntArray:
        with lock:
            starts, order = blocks.order((epoch,), lambda: block_order(epoch))
        parts = []
        for block, low, high in segments(starts, order, start, stop):
            first = int(blocks.firsts[block] + blocks.begins[block])
            parts.append(np.arange(first + low, first + high, dtype=np.int64))
            if seed is not None:  # in file order the system reads ahead by itself
                source.will_need(first + low, first + high)
        rows = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        if seed is None:
            return rows
        return rows[permutation(len(rows), seed, "window", epoch, span, window)]

    return numbers


def drawn_rows(order: RowOrder, rows: int) -> int:
    """Positions in an epoch over ``rows`` rows, which are found to be what the order is for."""
    order.check(rows)
    return order.length(rows)
