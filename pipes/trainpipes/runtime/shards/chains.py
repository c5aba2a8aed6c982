"""The stages above one shard's rows, put together so that as much as can be is left to any thread.

Stages with a place of their own (``batch``, ``pack``), and those that drop rows, must see the runs of a shard
one after the other: they are *opened*, each above the one below. What is above the last of them
only turns one run into another, and *finishes* runs in any order, in any thread. Where ``batch`` is
the only one of the first kind, stages below it finish too: micro-batches are cut from positions
alone, and a shard's runs are settled before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from trainpipes.runtime.kinds import CutStage, open_stage
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.reading.feed import Feed
from trainpipes.runtime.reading.waiting import WaitingRows
from trainpipes.runtime.reading.windows import Windows
from trainpipes.runtime.rows.block import Block
from trainpipes.runtime.rows.utf8 import naming_bad_text
from trainpipes.runtime.run import Cursors, Run, RunSource, innermost
from trainpipes.runtime.source import RowMixture, RowSource

__all__ = ["Chains"]

#: Rows and bytes of rows in a run, about; whole micro-batches where there are any.
RUN_ROWS, RUN_BYTES = 2048, 4 << 20
#: Rows in a run, at least, however small a shard's part of a window is.
LEAST_ROWS = 512
#: Rows in the runs of all shards of a process, about.
ALL_ROWS = 65_536


class Chains:
    """Makes the runs of the shards of one process.

    Args:
        plan: the pipeline's.
        windows: shared by the shards.
        shards: how many there are in this process.
    """

    def __init__(self, plan: Plan, windows: Windows, shards: int = 1) -> None:
        self.plan = plan
        self.windows = windows
        self._shards = shards
        rows = plan.after_rows
        keep = isinstance(plan.source, RowSource) and all(s.keeps_rows for s in plan.before)
        #: Whether runs are settled without reading anything.
        self.lazy = keep and all(
            _is_free(s) or (s is plan.batch and s.keeps_rows) for s in plan.after
        )
        self._on_rows: list[Any] = []
        opened: list[Any] = list(plan.after)
        if self.lazy and plan.batch is not None:
            self._on_rows = rows
            opened = opened[len(rows) :]
        last = max((n for n, stage in enumerate(opened) if not _is_free(stage)), default=-1)
        self._opened, self._finishing = opened[: last + 1], opened[last + 1 :]
        self.run_rows = self._run_rows()

    def _run_rows(self) -> int:
        """Rows in a run: few where Python is called for each, so that the first one comes soon."""
        plan = self.plan
        if any(stage.per_row for stage in plan.after):
            counted = plan.batch is not None and plan.batch.keeps_rows
            return plan.batch_size if counted else max(plan.batch_size, 8)
        # A run of many windows would hold them all; of large ones a shard's part is many runs.
        part = max(LEAST_ROWS, plan.layout.window_rows // plan.layout.sharers)
        rows = min(RUN_ROWS, part, max(1, ALL_ROWS // self._shards))
        row_bytes = plan.source.row_bytes if isinstance(plan.source, RowSource) else None
        if row_bytes:
            rows = min(rows, max(1, int(RUN_BYTES // row_bytes)))
        if plan.batch is None:
            return max(1, rows // 2)
        return plan.batch_size * max(1, rows // plan.batch_size)

    def _first_rows(self, shard: int) -> int:
        """Rows in a shard's first run: one micro-batch for the first shard, and on from there."""
        size = self.plan.batch_size
        return size * (1 + shard % max(1, self.run_rows // size))

    def expect(self, shard: int, slot: int, state: dict[str, Any]) -> None:
        """Keep what a shard will need from ``state`` on."""
        place = innermost(state)
        if isinstance(self.plan.source, RowMixture):
            mixed: Any = self.windows
            mixed.expect_parts(shard, place, self._shards)
            return
        span = slot % self.plan.layout.num_spans
        self.windows.expect(shard, place["epoch"], span, place["window"])

    def open(self, shard: int, slot: int, state: dict[str, Any], first_epoch: int) -> RunSource:
        """The runs of one shard, opened at ``state``; to be finished."""
        return self._open_at(len(self._opened), shard, slot, first_epoch, state)

    def _open_at(
        self, level: int, shard: int, slot: int, first_epoch: int, state: dict[str, Any]
    ) -> RunSource:
        if level:
            below = partial(self._open_at, level - 1, shard, slot, first_epoch)
            return open_stage(self._opened[level - 1], below, state)
        plan = self.plan
        last_epoch = None if plan.times is None else first_epoch + plan.times - 1
        if isinstance(plan.source, RowMixture):
            mixed: Any = self.windows
            rows = self.run_rows, self._first_rows(shard)
            feed: RunSource = mixed.feed(shard, state, rows, self._shards, last_epoch, plan.rolling)
            return feed
        return Feed(
            self.windows, plan.layout_of, slot, self.run_rows, self._first_rows(shard), state,
            shard, first_epoch, last_epoch, plan.rolling, self.lazy,
        )  # fmt: skip

    def finish(self, run: Run) -> Run:
        """What becomes of a run in the stages that need no order."""
        return self._through(_ready(run), self._on_rows, self._finishing)

    @property
    def has_workers(self) -> bool:
        """Whether workers of a stage can be given a run before its turn."""
        return self.lazy and any(s.has_workers for s in self._on_rows + self._finishing)

    def hand_over(self, run: Run) -> Callable[[], Run]:
        """Put a run through the stages up to the first with workers, and have these begin; what is returned
        waits for them, and does the rest."""
        run = _ready(run)
        for number, stage in enumerate(self._on_rows):
            with naming_bad_text(run.block, stage):
                rest = stage.hand_over(_rows(run.block))
            if rest is not None:
                return partial(self._rest_of_rows, run, rest, self._on_rows[number + 1 :])
            run = self._through(run, [stage], [])
        for number, stage in enumerate(self._finishing):
            with naming_bad_text(run.block, stage):
                rest = stage.hand_over(run)
            if rest is not None:
                return partial(self._rest_of_items, rest, self._finishing[number + 1 :])
            run = self._through(run, [], [stage])
        return lambda: run

    def _rest_of_rows(self, run: Run, rest: Callable[[], Run], later: Sequence[Any]) -> Run:
        return self._through(run.with_block(rest().block), later, self._finishing)

    def _rest_of_items(self, rest: Callable[[], Run], later: Sequence[Any]) -> Run:
        return self._through(rest(), [], later)

    def _through(self, run: Run, on_rows: Sequence[Any], on_items: Sequence[Any]) -> Run:
        if on_rows:
            block = run.block
            for stage in on_rows:
                with naming_bad_text(block, stage):
                    block = stage.process(_rows(block)).block
            run = run.with_block(block)
        for stage in on_items:
            with naming_bad_text(run.block, stage):
                run = stage.process(run)
        return run


def _ready(run: Run) -> Run:
    """A run whose rows are there."""
    return run.with_block(run.block.ready()) if isinstance(run.block, WaitingRows) else run


def _is_free(stage: Any) -> bool:
    """Whether a stage turns runs into runs of as many items, and knows no place."""
    return stage.keeps_rows and not isinstance(stage, CutStage)


def _rows(block: Block) -> Run:
    """A run of rows whose positions nobody asks for."""
    return Run(block, Cursors.counting({}, np.zeros(len(block) + 1, dtype=np.int64)))
