"""Windows of a stream, cut as it comes; there is an open pass for each epoch that is needed."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainpipes._internal.activity import doing
from trainpipes._internal.progress import Progress
from trainpipes.columns.block import Block
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.reading.windows import Window, WindowMaker
from trainpipes.interfaces.source import RowStream, StreamReader, read_full
from trainpipes.interfaces.stage_kinds import put_through
from trainpipes.order.layout import StreamLayout, WindowKey


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
        at, skip = state if self._stream.seekable else {}, self._chain.skip_rows
        reader = self._stream.open(epoch, at or None)
        if at and window:
            current = _Pass(reader, window, skip + self._layout.start(window))
        else:
            current = _Pass(reader, 0, 0)
            current.start = self._state(current)  # from before the rows to pass over
        self._passes[epoch] = current
        while current.row < skip and not current.ended:
            data = read_full(reader, min(self._step, skip - current.row))
            current.ended = data is None
            current.row += 0 if data is None else len(data)
        return current

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
