"""What is needed of a source whose rows can be had one by one, in any order, at little cost."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from trainpipes.columns.payload import Payload
from trainpipes.engine.layout import IntArray
from trainpipes.kinds.source import RowSource


class RandomAccessSource(RowSource):
    """Rows that can be read by number: what samplers and a global shuffle stand on.

    Attributes:
        by_number: whether reading rows by number is as good as reading blocks, so that windows need hold
            numbers only.
        holds_numbers: whether the bytes of a window are then told as that; where windows have long
            been made smaller by the rows' own bytes, they stay so, since that shapes the order.
    """

    by_number: bool = False
    holds_numbers: bool = False

    @abstractmethod
    def take(self, index: IntArray) -> Payload:
        """The rows at ``index``, numbered in file order over all blocks; int64, any order, repeats
        allowed. May be called by several threads."""

    def will_need(self, start: int, stop: int) -> None:
        """Rows ``start`` to ``stop`` will soon be asked for."""


def even_blocks(rows: int, block_rows: int) -> IntArray:
    """First row of each block of ``block_rows`` rows, and the number of rows: int64 ``[blocks + 1]``.

    >>> even_blocks(10, 4).tolist(), even_blocks(0, 4).tolist()
    ([0, 4, 8, 10], [0, 0])
    """
    starts = np.arange(0, max(1, rows), block_rows, dtype=np.int64)
    return np.append(starts, rows)
