"""Windows of sources that can be read by row number: they hold numbers, and rows are read by those who
own them, straight to where they go.

The numbers are those of a sampler's order (``draw``, ``shuffle(scope="global")``), of a shuffle within a
buffer, or of file order. Of a sampler's order the epoch is one span: its micro-batches are the order's,
one after the other, whatever the number of shards.

Memory: 8 bytes a row of a window. All threads of a process may ask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from trainpipes.order import IntArray
from trainpipes.rows.block import Block, Each
from trainpipes.runtime.reading.random_access import RandomAccessSource
from trainpipes.runtime.reading.window_cuts import WindowCuts
from trainpipes.runtime.reading.windows import Content, Window, WindowKey, WindowLoader

__all__ = [
    "DRAWN_ROWS",
    "Numbers",
    "NumberedLoader",
    "RowOrder",
    "buffered_numbers",
    "drawn_numbers",
]

#: Positions in a window of a sampler's order: 512 KiB of row numbers.
DRAWN_ROWS = 1 << 16

#: The numbers of a window's rows, in the order in which they come out, int64.
Numbers = Callable[[WindowKey], IntArray]


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


class NumberedRows:
    """Rows of a window that are read when they are taken.

    Args:
        source: where.
        numbers: of the rows.
        epoch: in which they are read.
        first: the window's place in the epoch's order, where that may have a row twice.
    """

    def __init__(
        self, source: RandomAccessSource, numbers: IntArray, epoch: int, first: int | None
    ) -> None:
        self._source = source
        self._numbers = numbers
        self._epoch = epoch
        self._first = first
        self.nbytes = numbers.nbytes

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, index: IntArray) -> Block:
        part = 0 if self._first is None else self._first + index
        return self._read(self._numbers[index], part)

    def slice(self, start: int, stop: int) -> Block:
        first = self._first
        part = 0 if first is None else np.arange(first + start, first + stop, dtype=np.int64)
        return self._read(self._numbers[start:stop], part)

    def _read(self, numbers: IntArray, part: Each) -> Block:
        return Block(self._source.take(numbers), numbers, epoch=self._epoch, part=part)


class NumberedLoader(WindowLoader):
    """Makes windows of row numbers.

    Args:
        source: where rows are read.
        cuts: how many a window has.
        numbers: which ones.
        repeats: whether an epoch may have a row twice.
    """

    def __init__(
        self, source: RandomAccessSource, cuts: WindowCuts, numbers: Numbers, repeats: bool = False
    ) -> None:
        self._source = source
        self._cuts = cuts
        self._numbers = numbers
        self._repeats = repeats

    def planned(self, key: WindowKey) -> int:
        return len(self._cuts.places(key))

    def window(self, key: WindowKey, state: dict[str, Any], first: int = 0) -> Window | None:
        rows = self.planned(key)
        return Window(rows, partial(self._read, key)) if rows else None

    def close(self) -> None:
        """Nothing is open."""

    def _read(self, key: WindowKey) -> Content:
        first = self._cuts.places(key).start if self._repeats else None
        return NumberedRows(self._source, self._numbers(key), key.epoch, first), None


def drawn_numbers(order: RowOrder, cuts: WindowCuts, first: int) -> Numbers:
    """The numbers of a sampler's order over the rows from ``first`` on."""

    def numbers(key: WindowKey) -> IntArray:
        places = cuts.places(key)
        return first + order.index(key.epoch, places.start, places.stop, cuts.blocks.rows)

    return numbers


def buffered_numbers(source: RandomAccessSource, cuts: WindowCuts) -> Numbers:
    """The numbers of a shuffle within a buffer, or of file order: just the rows, in just the order, that
    ``ListedLoader`` would read whole. The source is told which ones will be asked for."""

    def numbers(key: WindowKey) -> IntArray:
        rows = cuts.ids(cuts.stretches(key))
        order = cuts.order(key, len(rows))
        if order is None:  # in file order the system reads ahead by itself
            return rows
        for block, low, high in cuts.stretches(key):
            first = int(cuts.blocks.firsts[block])
            source.will_need(first + low, first + high)
        return rows[order]

    return numbers
