"""The stages of a shard, opened at a cursor.

Owned by one consumer, or by a mix for each of its sources; called by the thread that makes a shard's next
run.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

from trainpipes.columns.run import RunSource, innermost
from trainpipes.engine.layout import WindowKey
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.reading.windows import Windows
from trainpipes.engine.shards.shard_rows import ShardRows
from trainpipes.kinds.source import MixedWindows, RowSource
from trainpipes.kinds.stage_kinds import OpenChain, RunStage

#: Rows and bytes of rows in a run, about; whole batches where there are any.
RUN_ROWS, RUN_BYTES = 2048, 4 << 20
#: Rows in a run, at least, however small a shard's part of a window is.
LEAST_ROWS = 512
#: Rows in the runs of all shards of a process, about.
ALL_ROWS = 65_536


def rows_at_a_time(plan: Plan, most: int | None = None) -> int:
    """Rows that are made together: whole batches, where they are counted; few where Python is called
    for each row, so that the first one comes soon."""
    rows = RUN_ROWS if most is None else most
    if any(stage.per_row for stage in plan.chain.after):
        counted = plan.chain.batch is not None and plan.chain.batch.keeps_rows
        return plan.chain.batch_size if counted else max(plan.chain.batch_size, 8)
    row_bytes = plan.inputs.source.row_bytes if isinstance(plan.inputs.source, RowSource) else None
    if row_bytes:
        rows = min(rows, max(1, int(RUN_BYTES // row_bytes)))
    if plan.chain.batch is None:
        return max(1, rows // 2)
    return plan.chain.batch_size * max(1, rows // plan.chain.batch_size)


class ShardOpener:
    """Opens the shards of one process.

    Args:
        plan: the pipeline's.
        windows: shared by the shards.
        shards: how many there are in this process.
        run_rows: rows in a run, at most, if a mix asks for fewer.
    """

    def __init__(
        self,
        plan: Plan,
        windows: Windows | MixedWindows,
        shards: int = 1,
        run_rows: int | None = None,
    ) -> None:
        self.plan = plan
        self.windows = windows
        self._shards = shards
        # A run of many windows would hold them all; of large ones a shard's part is many runs.
        part = max(LEAST_ROWS, plan.layouts.usual.window_rows // plan.layouts.usual.sharers)
        most = min(RUN_ROWS, part, max(1, ALL_ROWS // shards))
        found = rows_at_a_time(plan, most)
        self.run_rows = found if run_rows is None else min(found, run_rows)

    @cached_property
    def has_workers(self) -> bool:
        """Whether workers of a stage can be given a run before its turn; asked when these are settled."""
        return any(isinstance(s, RunStage) and s.has_workers for s in self.plan.chain.after)

    @property
    def divisible(self) -> bool:
        """Whether there can be smaller runs."""
        return self.run_rows > self.plan.chain.batch_size

    def expect(self, shard: int, first_epoch: int, cursor: dict[str, Any]) -> None:
        """Keep what a shard will need from a cursor on, in the pass that starts with ``first_epoch``."""
        place = innermost(cursor)
        if isinstance(self.windows, MixedWindows):
            self.windows.expect(shard, place, self._shards)
            return
        span = self.plan.counts.span(shard, place["epoch"], first_epoch)
        key = WindowKey(place["epoch"], span, place["window"])
        self.windows.expect(shard, key, int(place["row"]))

    def open(
        self, shard: int, state: dict[str, Any], first_epoch: int, singly: bool = False
    ) -> OpenChain:
        """The runs of one shard.

        Args:
            shard: which shard.
            state: where to start.
            first_epoch: of the pass.
            singly: whether runs are as small as can be.
        """
        chain = self.plan.chain
        # One batch in the first run of the first shard, and on from there.
        first = chain.batch_size * (1 + shard % max(1, self.run_rows // chain.batch_size))
        rows = self.run_rows, first
        if singly:
            rows = (min(chain.batch_size, self.run_rows),) * 2
        return OpenChain(chain.after, partial(self._rows, shard, rows, first_epoch), state)

    def _rows(
        self, shard: int, rows: tuple[int, int], first_epoch: int, state: dict[str, Any]
    ) -> RunSource:
        """The rows of a shard, below all stages."""
        if isinstance(self.windows, MixedWindows):
            return self.windows.open(shard, state, rows, self._shards, first_epoch)
        return ShardRows(self.plan, self.windows, shard, rows, first_epoch, state)
