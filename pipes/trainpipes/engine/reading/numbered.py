"""Windows of sources that can be read by row number: they hold numbers, and rows are read by those who
own them, straight to where they go.

The numbers are those of a sampler's order (``shuffle(sampler=...)``, ``shuffle(scope="global")``), of a
shuffle within a buffer, or of file order. Of a sampler's order the epoch is one span: its micro-batches are
the order's, one after the other, whatever the number of shards.

Memory: 8 bytes a row of a window. All threads of a process may ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from trainpipes.columns.block import Block
from trainpipes.engine.layout import IntArray, WindowKey
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.reading.windows import Content, Window, WindowLoader
from trainpipes.kinds.random_access import RandomAccessSource


@dataclass(frozen=True)
class NumberedRows:
    """Rows of a window that are read when they are taken.

    Args:
        source: where.
        numbers: of the rows.
        epoch: in which they are read.
        first: the window's place in the epoch's order, where that may have a row twice.
    """

    source: RandomAccessSource
    numbers: IntArray
    epoch: int
    first: int | None

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, index: IntArray) -> Block:
        numbers = self.numbers[index]
        part = 0 if self.first is None else self.first + index
        return Block(self.source.take(numbers), numbers, epoch=self.epoch, part=part)

    def slice(self, start: int, stop: int) -> Block:
        return self.take(np.arange(start, stop, dtype=np.int64))


class NumberedLoader(WindowLoader):
    """Makes windows of row numbers.

    Args:
        plan: of the rows.
        source: where they are read.
    """

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
            return NumberedRows(self._source, self._buffered(key), key.epoch, None), None
        rows = self._layouts.inputs.blocks.rows
        drawn = chain.drawn.index(key.epoch, places.start, places.stop, rows)
        first = places.start if chain.may_repeat else None
        return NumberedRows(self._source, chain.skip_rows + drawn, key.epoch, first), None

    def _buffered(self, key: WindowKey) -> IntArray:
        """The numbers of a shuffle within a buffer, or of file order: just the rows, in just the order, that
        ``ListedLoader`` would read whole. The source is told which ones will be asked for."""
        blocks, stretches = self._layouts.inputs.blocks, self._layouts.stretches(key)
        numbers = blocks.numbers(stretches)
        order = self._layouts.row_order(key, len(numbers))
        if order is None:  # in file order the system reads ahead by itself
            return numbers
        for block, low, high in stretches:
            first = int(blocks.firsts[block])
            self._source.will_need(first + low, first + high)
        return numbers[order]
