"""Rows of windows that are not read before somebody looks at the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainpipes.order import IntArray
from trainpipes.runtime.reading.windows import Window
from trainpipes.runtime.rows.block import Block, Payload

__all__ = ["WaitingRows"]


class WaitingRows(Block):
    """A block that knows where its rows will be found.

    It can be cut and joined before anything is read, so that positions are settled at once and in
    order, and the work is left to any thread.

    Args:
        parts: windows, and positions in their order, int64.
    """

    __slots__ = ("_length", "_parts")

    def __init__(self, parts: list[tuple[Window, IntArray]]) -> None:
        self._parts = parts
        self._length = sum(len(positions) for _, positions in parts)

    def __len__(self) -> int:
        return self._length

    def ready(self) -> Block:
        """The rows, of windows that have been read."""
        parts, self._parts = self._parts, []
        blocks: list[Block] = []
        while parts:
            window, positions = parts.pop(0)
            block = window.take(positions)
            if parts or blocks:  # let go of one window before the next is read
                block = block.with_data(block.data)
            blocks.append(block)
            del window
        return Block.join(blocks)

    def slice(self, start: int, stop: int) -> Block:
        parts, first = [], 0
        for window, positions in self._parts:
            low, high = max(0, start - first), min(len(positions), stop - first)
            if low < high:
                parts.append((window, positions[low:high]))
            first += len(positions)
        return WaitingRows(parts)

    def _followed_by(self, others: Sequence[Block]) -> Block:
        parts = list(self._parts)
        for block in others:
            assert isinstance(block, WaitingRows)
            parts.extend(block._parts)
        return WaitingRows(parts)

    def take(self, index: IntArray) -> Block:
        raise TypeError("these rows are not there yet: ready() first")

    @property
    def data(self) -> Payload:
        raise TypeError("these rows are not there yet: ready() first")

    @property
    def ids(self) -> Any:  # type: ignore[override]
        raise TypeError("these rows are not there yet: ready() first")
