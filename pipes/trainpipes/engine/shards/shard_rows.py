from __future__ import annotations

from typing import Any

import numpy as np

from trainpipes.columns.run import Cursors, Run
from trainpipes.engine.layout import IntArray, Layout, StreamLayout, WindowKey
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.reading.windows import Windows
from trainpipes.errors import DataError
from trainpipes.kinds.empty_epoch_guard import EmptyEpochGuard

#: Rows after those of a run that all shards of a process name to a source that fetches rows one by one.
ROWS_AHEAD = 128


class ShardRows:
    """Runs of rows of one shard, below all stages. ``rows``: most rows in a run, and in the first
    one, which differs between shards. ``shards`` of this process share what is fetched ahead."""

    def __init__(
        self,
        plan: Plan,
        windows: Windows,
        shard: int,
        rows: tuple[int, int],
        first_epoch: int,
        state: dict[str, Any],
        shards: int = 1,
    ) -> None:
        self._later = max(1, ROWS_AHEAD // shards)
        self._plan = plan
        self._windows = windows
        self._shard = shard
        self._run_rows, self._next_rows = rows
        self._first_epoch = first_epoch
        epoch = int(state["epoch"])
        self._layout = layout = plan.layouts.of(epoch)
        slot = plan.counts.slot(shard, epoch, first_epoch)
        self._sharer = slot // layout.num_spans
        self._key = WindowKey(epoch, slot % layout.num_spans, int(state["window"]))
        self._row = int(state["row"])
        self._stream: dict[str, Any] = state.get("stream", {})
        # Sharers take turns at whole batches: one may get none of a small epoch.
        shares_turn = isinstance(layout, Layout) and layout.whole
        gave = self._key.window > 0 or self._row > 0
        self._guard = EmptyEpochGuard(plan.chain.endless and not shares_turn, gave)
        self._ended = False
        self._positions: IntArray | None = None  # of this shard in the window's order
        self._first = 0  # of these, the next one

    def next_run(self) -> Run:
        while not self._ended:
            run = self._advance()
            if run is not None:
                self._guard.gave()
                return run
        raise StopIteration

    def _advance(self) -> Run | None:
        if self._positions is None:  # pass over a window without a row of this shard
            planned = self._windows.planned(self._key)
            if planned is not None and planned > 0:
                self._take_positions(own := self._own(planned))
                if self._first == len(own):
                    self._next_window({})
                    return None
        window = self._windows.get(self._shard, self._key, self._stream, self._row)
        if window is None:
            self._end_epoch()
            return None
        if self._positions is None:
            self._take_positions(self._own(len(window)))
        assert self._positions is not None
        start, self._first = self._first, self._first + self._next_rows
        self._next_rows = self._run_rows
        positions = self._positions[start : self._first]
        if not len(positions):
            self._next_window(window.after)
            return None
        base, later = self._state(), self._positions[self._first : self._first + self._later]
        # After each row, the position of this shard's next one.
        if self._first < len(self._positions):
            rows = self._positions[start : self._first + 1]
            self._row = int(rows[-1])
            return Run(window.take(positions, later), Cursors.counting(base, rows))
        self._next_window(window.after)
        rows = np.append(positions, 0)
        which = np.zeros(len(rows), dtype=np.int64)
        which[-1] = 1
        return Run(window.take(positions, later), Cursors((base, self._state()), which, rows))

    def _take_positions(self, positions: IntArray) -> None:
        self._positions, self._first = positions, int(np.searchsorted(positions, self._row))

    def _own(self, rows: int) -> IntArray:
        epoch, span, window = self._key
        return self._layout.owned(span, self._sharer, window, rows, epoch - self._first_epoch)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self._key.epoch, "window": self._key.window}
        if self._stream:
            state["stream"] = self._stream
        return state

    def _next_window(self, stream: dict[str, Any]) -> None:
        self._go_to(self._key._replace(window=self._key.window + 1), stream)

    def _go_to(self, key: WindowKey, stream: dict[str, Any]) -> None:
        self._key, self._row, self._stream, self._positions = key, 0, stream, None

    def _end_epoch(self) -> None:
        chain, epoch = self._plan.chain, self._key.epoch
        if not chain.rolling or not chain.goes_on(epoch, self._first_epoch):
            self._ended = True
            return
        end_epoch(self._guard, self._layout, self._shard, epoch)
        self._layout = self._plan.layouts.of(epoch + 1)
        self._go_to(WindowKey(epoch + 1, self._key.span, 0), self._windows.start(epoch + 1))


def end_epoch(
    guard: EmptyEpochGuard, layout: Layout | StreamLayout, shard: int, epoch: int
) -> None:
    if guard.next_epoch(layout):
        raise DataError(
            f"repeat() would wait forever: shard {shard} of {layout.num_shards} got no rows up to epoch "
            f"{epoch}; lower num_shards in sharding_filter(), or check the filter"
        )
