"""The rows of one shard, in its order: the bottom of each shard's chain.

Its cursor is the epoch, the window, and the row within that window's order. Opening one reads the
window that holds the next row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trainpipes.errors import DataError
from trainpipes.kinds.empty_epoch_guard import EmptyEpochGuard
from trainpipes.order import IntArray, Layout, StreamLayout
from trainpipes.rows.run import Cursors, Run
from trainpipes.runtime.reading.windows import Windows

__all__ = ["ShardRows"]


class ShardRows:
    """Runs of rows of one shard.

    Args:
        windows: where rows are read.
        layout_of: how an epoch is cut and dealt.
        slot: the shard, as the epoch at hand numbers them.
        run_rows: most rows in a run.
        first_rows: most rows in the first one: shards that start together then come to the ends of their
            runs one after the other, the first batch comes soon, and fewer finished ones wait.
        state: where to start: ``epoch``, ``window``, ``row``, and ``stream`` for a stream that
            can go where it says.
        user: who asks for windows: the same number for the same shard in a process.
        first_epoch: the epoch in which the run started.
        last_epoch: for rows that roll on, the last epoch; None for no end. Else the one at hand.
        rolling: whether rows roll on into the next epoch.
    """

    def __init__(
        self,
        windows: Windows,
        layout_of: Callable[[int], Layout | StreamLayout],
        slot: int,
        run_rows: int,
        first_rows: int,
        state: dict[str, Any],
        user: int,
        first_epoch: int = 0,
        last_epoch: int | None = None,
        rolling: bool = False,
    ) -> None:
        self._windows = windows
        self._layout_of = layout_of
        self._layout = layout = layout_of(int(state["epoch"]))
        self._span, self._sharer = slot % layout.num_spans, slot // layout.num_spans
        self._run_rows = run_rows
        self._next_rows = first_rows
        self._user = user
        self._first_epoch = first_epoch
        self._last_epoch = last_epoch
        self._rolling = rolling
        self._epoch = int(state["epoch"])
        self._window = int(state["window"])
        self._row = int(state["row"])
        self._stream: dict[str, Any] = state.get("stream", {})
        # Those who share few whole rows take turns at them.
        shares_turn = isinstance(layout, Layout) and layout.whole
        gave = self._window > 0 or self._row > 0
        self._guard = EmptyEpochGuard(last_epoch is None and not shares_turn, gave)
        self._ended = False
        self._positions: IntArray | None = None  # of this shard in the window's order

    def next_run(self) -> Run:
        while not self._ended:
            run = self._advance()
            if run is not None:
                self._guard.gave()
                return run
        raise StopIteration

    def _advance(self) -> Run | None:
        if self._positions is None:  # pass over a window without a row of this shard
            planned = self._windows.planned(self._epoch, self._span, self._window)
            if planned is not None and planned > 0:
                self._positions = self._own(planned)
                if not len(self._positions) or self._positions[-1] < self._row:
                    self._next_window({})
                    return None
        window = self._windows.get(
            self._user, self._epoch, self._span, self._window, self._stream, self._row
        )
        if window is None:
            self._end_epoch()
            return None
        if self._positions is None:
            self._positions = self._own(len(window))
        start = int(np.searchsorted(self._positions, self._row))
        positions = self._positions[start : start + self._next_rows]
        if not len(positions):
            self._next_window(window.after)
            return None
        base = self._state()
        self._next_rows = self._run_rows
        # After each row the place of the next one of this shard.
        rows = np.append(positions, 0)
        if start + len(positions) < len(self._positions):
            rows[-1] = self._row = int(self._positions[start + len(positions)])
            return Run(window.take(positions), Cursors.counting(base, rows))
        self._next_window(window.after)
        which = np.zeros(len(rows), dtype=np.int64)
        which[-1] = 1
        return Run(window.take(positions), Cursors((base, self._state()), which, rows))

    def _own(self, rows: int) -> IntArray:
        epoch = self._epoch - self._first_epoch
        return self._layout.owned(self._span, self._sharer, self._window, rows, epoch)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self._epoch, "window": self._window}
        if self._stream:
            state["stream"] = self._stream
        return state

    def _next_window(self, stream: dict[str, Any]) -> None:
        self._window += 1
        self._row = 0
        self._stream = stream
        self._positions = None

    def _end_epoch(self) -> None:
        if not self._rolling or self._epoch == self._last_epoch:
            self._ended = True
            return
        if self._guard.next_epoch(self._layout):
            raise DataError(
                f"repeat() would wait forever: one of {self._layout.num_shards} shards got no rows "
                f"up to epoch {self._epoch}; lower num_shards in "
                "sharding_filter(), or check the filter"
            )
        self._epoch += 1
        self._layout = self._layout_of(self._epoch)
        self._window = self._row = 0
        self._stream = self._windows.start(self._epoch)
        self._positions = None
