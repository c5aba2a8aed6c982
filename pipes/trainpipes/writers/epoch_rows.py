"""The rows of one epoch of a pipeline, in order, from any place."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa

from trainpipes._internal.pool import Pool, default_threads
from trainpipes.columns.payload import Payload, slice_payload
from trainpipes.columns.run import Cursors, Run
from trainpipes.engine.iterating.iteration_state import plan_of
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.record import Record
from trainpipes.engine.shards.lane import Lane
from trainpipes.engine.shards.shard_rows import Shards, open_windows
from trainpipes.errors import ConfigError
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.blame import say_where
from trainpipes.interfaces.source import RowSource
from trainpipes.interfaces.stage import Stage, is_ours
from trainpipes.order.layout import WindowKey
from trainpipes.writers.table_groups import TableGroups


class WrittenColumns(kinds.RunStage, takes="columns"):
    """The last stage of rows that are written: below it the plan makes columns of one schema, whose text it
    checks.
    """

    free = frozenset({"caller", "ragged"})

    caller: str
    ragged: Collection[str] | None = None

    @property
    def name(self) -> str:
        return str(vars(self).get("caller", "write"))  # asked for before the options are there

    def _traits(self) -> dict[str, Any]:
        return {"ragged": self.ragged}

    def process(self, run: Run) -> Run:
        if isinstance(run.block.data, pa.Table):
            run.block.data.validate(full=True)
        return run

    def __repr__(self) -> str:
        return f"{self.caller}()"


class EpochRows(TableGroups):
    """The rows of one epoch of a pipeline. A copy reads by itself; it pickles. ``ragged``: see
    ``SchemaFinder``.
    """

    def __init__(
        self,
        pipeline: Record,
        caller: str,
        dealt: bool = False,
        ragged: Collection[str] | None = None,
    ) -> None:
        chain = plan_of(pipeline).chain
        finishing = kinds.first_of(chain.after, kinds.FinishingStage)
        opener = chain.stages[0]
        itself = opener if opener.traits.makes_batches or chain.endless else None
        if in_the_way := chain.batch or chain.repeat or finishing or itself:
            raise ConfigError(
                f"{caller}() writes the rows of one epoch: call it before batch(), collate() and repeat(), "
                f"got {in_the_way}"
            )
        left: Any = kinds.DeviceStage if dealt else kinds.ShardStage | kinds.DeviceStage
        rows = kinds.without(pipeline.stages, left)
        self._begin([*rows, WrittenColumns(caller, ragged)], caller, None)

    def _begin(self, stages: list[Stage], caller: str, source: RowSource | None) -> None:
        self.caller, self._stages = caller, stages
        self.plan = Plan.of([stage._fresh() for stage in stages], source)
        self._pool: Pool | None = None
        self._lane: Lane | None = None
        self._made: tuple[Cursors, int] | None = None  # of the run at hand, and its first row

    def __reduce__(self) -> Any:
        source = self.plan.inputs.source
        # One of the user's may hold what does not pickle; several put together open theirs again.
        goes = isinstance(source, RowSource) and is_ours(type(source)) and not source.joined_inputs
        schemas = self.plan.inputs.schemas.known()
        return _copy, (self._stages, self.caller, source if goes else None, schemas)

    def know_columns(self) -> pa.Schema | None:
        """Find the columns before any but the first rows are read."""
        return self.plan.types.of_rows(self.caller)

    @property
    def count(self) -> int | None:
        return int(self.plan.counts.end(1)) if self.plan.counts.known else None

    def open(
        self,
        cursor: dict[str, Any] | None = None,
        row: int = 0,
        epoch: int = 0,
        shard: int = 0,
        last: WindowKey | None = None,
    ) -> None:
        """Begin at a cursor, or at the first row of an epoch or of a shard in it, and read no further ahead
        than the last window, if given; ``row`` is the first row's number.
        """
        self.close()
        if cursor is None and row:
            cursor = self._cursor_at(row, epoch)
        threads = default_threads()
        self._pool = Pool(threads) if threads and not self.plan.runs_user_code else None
        shards = Shards(self.plan, open_windows(self.plan, self._pool, epoch, last))
        self._lane = Lane(shards, shard, epoch, cursor)

    def open_part(self, start: int, stop: int, epoch: int = 0) -> None:
        """Begin at a row, where positions follow by arithmetic (``plan.counted``), for those before
        ``stop``."""
        last = self._cursor_at(max(start, stop - 1), epoch)
        self.open(None, start, epoch, 0, WindowKey(last["epoch"], 0, last["window"]))

    def tables(self, start: int, stop: int, epoch: int = 0) -> Iterator[pa.Table]:
        """Rows from one to before another, as they come, where positions follow by arithmetic."""
        self.open_part(start, stop, epoch)
        with closing(self):
            while start < stop and (table := self.some(stop - start)) is not None:
                start += len(table)
                yield table
                del table  # before the next rows are read

    def close(self) -> None:
        super().close()
        self._lane = self._made = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def cursor(self) -> dict[str, Any]:
        assert self._made is not None
        cursors, first = self._made
        return cursors.state(first + self.used)

    def _cursor_at(self, row: int, epoch: int) -> dict[str, Any]:
        cursor = self.plan.counts.cursor_at(row, 0, epoch)
        del cursor["delivered"]
        return cursor

    def next_run(self) -> Payload | None:
        assert self._lane is not None
        try:
            upcoming = self._lane.next_run()
        except Exception as error:
            say_where(error, self.plan.inputs.place_of)
            raise
        if upcoming is None:
            return None
        run, first, last = upcoming
        self._made = run.cursors, first
        return slice_payload(run.block.data, first, last)


def _copy(
    stages: list[Stage], caller: str, source: RowSource | None, schemas: dict[str, Any]
) -> EpochRows:
    rows = EpochRows.__new__(EpochRows)
    rows._begin(stages, caller, source)
    rows.plan.inputs.schemas.adopt(schemas)
    return rows
