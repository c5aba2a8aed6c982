"""The windows of a source that cannot list its blocks: cut from the stream as it comes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trainpipes.order import permutation
from trainpipes.runtime.reading.windows import Before, Held, Window
from trainpipes.runtime.rows.block import Block
from trainpipes.runtime.source import RowStream, StreamReader, read_full

__all__ = ["StreamWindows"]


class _Pass:
    """One pass over a stream, and the windows that are still needed of it."""

    def __init__(self, reader: StreamReader) -> None:
        self.reader = reader
        self.start: dict[str, Any] | None = (
            None  # the state of the epoch's start, where it is known
        )
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
        self._held = Held()
        self._passes: dict[int, _Pass] = {}

    def expect(self, user: int, epoch: int, span: int, window: int) -> None:
        with self._held.lock:
            self._held.needs.setdefault(user, (epoch, window))

    def start(self, epoch: int) -> dict[str, Any]:
        if not self._stream.seekable:
            return {}
        with self._held.lock:
            current = self._passes.get(epoch)
            if current is None or current.start is None:
                current = self._open(epoch, 0, {})
            assert current.start is not None
            return current.start

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
                try:
                    found = self._cut(epoch, current)
                except BaseException:  # asked again, it reads again, and no row is lost
                    self._passes.pop(epoch).reader.close()
                    raise
                if found is None:
                    return None
                if current.next > window:
                    held.windows[key] = found
                    return found
            return None

    def close(self) -> None:
        with self._held.lock:
            self._held.windows.clear()
            for number in list(self._passes):
                self._passes.pop(number).reader.close()

    def _open(self, epoch: int, window: int, state: dict[str, Any]) -> _Pass:
        if epoch in self._passes:
            self._passes.pop(epoch).reader.close()
        at = state if self._stream.seekable else {}
        current = _Pass(self._stream.open(epoch, at or None))
        if not window:
            current.start = self._state(current)
        if at and window:  # the state of an epoch's start is from before the rows to pass over
            current.next, current.row = window, self._skip + window * self._rows
        while current.row < self._skip and not current.ended:
            data = read_full(current.reader, min(self._rows, self._skip - current.row))
            current.ended = data is None
            current.row += 0 if data is None else len(data)
        self._passes[epoch] = current
        return current

    def _state(self, current: _Pass) -> dict[str, Any]:
        return current.reader.state() if self._stream.seekable else {}

    def _cut(self, epoch: int, current: _Pass) -> Window | None:
        wanted = 1 if self._seed is None else 2
        while not current.ended and len(current.ahead) < wanted:
            left = math.inf if self._stop is None else max(0, self._stop - current.row)
            data = read_full(current.reader, int(min(self._rows, left))) if left else None
            if data is None or len(data) < self._rows:
                current.ended = True
            if data is not None and len(data):
                ids = np.arange(current.row, current.row + len(data), dtype=np.int64)
                current.row += len(data)
                current.ahead.append((Block(data, ids, epoch=epoch), self._state(current)))
        if not current.ahead:
            return None
        rows, after = current.ahead.pop(0)
        short = self._seed is not None and current.ended and len(current.ahead) == 1
        if short and len(current.ahead[0][0]) < self._rows:
            rest, after = current.ahead.pop(0)
            rows = Block.join([rows, rest])
        number, current.next = current.next, current.next + 1
        rows = self._before(rows)
        order = None
        if self._seed is not None:
            order = permutation(len(rows), self._seed, "window", epoch, 0, number)
        return Window(len(rows), lambda: (rows, order), after)
