"""The stages of a shard, opened at a cursor; called by the thread that makes a shard's next run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from trainpipes.columns.bad_text import naming_bad_text
from trainpipes.columns.run import Run, RunSource, innermost
from trainpipes.engine.layout import WindowKey
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.pool import Pool
from trainpipes.engine.reading.windows import Windows
from trainpipes.engine.shards.shard_rows import ShardRows
from trainpipes.kinds.source import MixedWindows, RowSource
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import OpenChain, RunStage

#: About how many rows and bytes a run has; whole batches where there are any.
RUN_ROWS, RUN_BYTES = 2048, 4 << 20
#: Fewest rows in a run.
LEAST_ROWS = 512
#: About how many rows the runs of all shards of a process have.
ALL_ROWS = 65_536


def rows_at_a_time(plan: Plan, most: int | None = None) -> int:
    """Rows that are made together: whole batches, where counted; few where Python is called for
    each row."""
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


def has_workers(stages: Sequence[Stage]) -> bool:
    return any(isinstance(stage, RunStage) and stage.has_workers for stage in stages)


def stages_to_open(plan: Plan, stage_pool: Pool | None) -> tuple[Stage, ...]:
    """The stages of a shard. With ``stage_pool``, those straight above the last user function become one
    stage, which it runs."""
    stages = plan.chain.after
    if stage_pool is None or has_workers(stages):
        return stages
    called = (n + 1 for n, s in enumerate(stages) if s.runs_user_code or s.in_caller)
    first = max(called, default=0)
    above: list[RunStage] = []
    for stage in stages[first:]:
        if not isinstance(stage, RunStage):
            break
        above.append(stage)
    pooled = (PooledStages(tuple(above), stage_pool),) if above else ()
    return (*stages[:first], *pooled, *stages[first + len(above) :])


class PooledStages(RunStage):
    """Stages that a pool runs while the thread that iterates calls functions for the next rows."""

    stages: tuple[RunStage, ...]
    pool: Pool

    has_workers = True

    def submit_run(self, run: Run) -> Callable[[], Run]:
        return partial(self.pool.result, self.pool.submit(partial(self.process, run)))

    def process(self, run: Run) -> Run:
        for stage in self.stages:
            if len(run):
                with naming_bad_text(run.block, stage):
                    run = stage.process(run)
        return run

    def __repr__(self) -> str:
        return " and ".join(map(str, self.stages))


class ShardOpener:
    """Opens the ``shards`` of one process. ``run_rows``: rows in a run, at most, if a mix asks for
    fewer."""

    def __init__(
        self,
        plan: Plan,
        windows: Windows | MixedWindows,
        shards: int = 1,
        run_rows: int | None = None,
        stage_pool: Pool | None = None,
    ) -> None:
        self.plan = plan
        self._stage_pool = stage_pool
        self.windows = windows
        self._shards = shards
        # A run holds every window that it has rows of: no more than a part of one.
        part = max(LEAST_ROWS, plan.layouts.usual.window_rows // plan.layouts.usual.sharers)
        most = min(RUN_ROWS, part, max(1, ALL_ROWS // shards))
        found = rows_at_a_time(plan, most)
        self.run_rows = found if run_rows is None else min(found, run_rows)

    @cached_property
    def has_workers(self) -> bool:
        return has_workers(stages_to_open(self.plan, self._stage_pool))

    @property
    def divisible(self) -> bool:
        return self.run_rows > self.plan.chain.batch_size

    def expect(self, shard: int, first_epoch: int, cursor: dict[str, Any]) -> None:
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
        chain = self.plan.chain
        # First runs differ in length: one batch in the first shard's, and so on.
        first = chain.batch_size * (1 + shard % max(1, self.run_rows // chain.batch_size))
        rows = self.run_rows, first
        if singly:
            rows = (min(chain.batch_size, self.run_rows),) * 2
        stages = stages_to_open(self.plan, self._stage_pool)
        return OpenChain(stages, partial(self._rows, shard, rows, first_epoch), state)

    def _rows(
        self, shard: int, rows: tuple[int, int], first_epoch: int, state: dict[str, Any]
    ) -> RunSource:
        if isinstance(self.windows, MixedWindows):
            return self.windows.open(shard, state, rows, self._shards, first_epoch)
        return ShardRows(self.plan, self.windows, shard, rows, first_epoch, state, self._shards)
