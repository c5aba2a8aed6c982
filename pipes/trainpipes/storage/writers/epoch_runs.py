"""The runs of one epoch of a pipeline, in order, from any place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainpipes.columns.payload import Payload, slice_payload
from trainpipes.engine.layout import WindowKey
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.pool import Pool, default_threads
from trainpipes.engine.shards.shard_rows import ShardOpener, open_windows
from trainpipes.engine.shards.shard_runs import PlacedRun, ShardRuns
from trainpipes.errors import ConfigError
from trainpipes.kinds.blame import say_where
from trainpipes.kinds.source import RowSource, RowStream
from trainpipes.kinds.stage import Stage, is_ours

if TYPE_CHECKING:
    from trainpipes.pipeline import Pipeline


class EpochRuns:
    """The runs of one epoch of a pipeline."""

    def __init__(
        self,
        pipeline: Pipeline,
        caller: str,
        source: RowSource | RowStream | None = None,
        dealt: bool = False,
    ) -> None:
        chain = pipeline._iteration.plan.chain
        finishing = [stage for stage in chain.after if stage.role == "finish"]
        in_the_way = chain.batch or chain.repeat or (finishing[0] if finishing else None)
        opener: Any = chain.stages[0]
        if in_the_way is None and (getattr(opener, "makes_batches", False) or chain.endless):
            in_the_way = opener
        if in_the_way is not None:
            raise ConfigError(
                f"{caller}() writes the rows of one epoch: call it before batch(), collate() and repeat(), "
                f"got {in_the_way}"
            )
        left = ("place",) if dealt else ("shard", "place")
        rows = [stage for stage in pipeline.stages if stage.role not in left]
        self._begin(caller, [*rows, *self._last_stages(caller)], source)

    def _last_stages(self, caller: str) -> Sequence[Stage]:
        return ()

    def _begin(
        self, caller: str, stages: Sequence[Stage], source: RowSource | RowStream | None = None
    ) -> None:
        self.caller = caller
        self.plan = Plan.of([stage.fresh() for stage in stages], source)
        self.used = 0
        self._stages = stages
        self._pool: Pool | None = None
        self._runs: ShardRuns | None = None
        self._placed: PlacedRun | None = None

    def __getstate__(self) -> dict[str, Any]:
        source = self.plan.inputs.source
        # One of the user's may hold what does not pickle; several put together open theirs again.
        goes = isinstance(source, RowSource) and is_ours(type(source)) and not source.joined_inputs
        return {
            "caller": self.caller,
            "stages": self._stages,
            "source": source if goes else None,
            "schemas": self.plan.inputs.schemas.known(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(state["caller"], state["stages"], state["source"])
        self.plan.inputs.schemas.adopt(state["schemas"])

    @property
    def schema(self) -> Any:
        raise NotImplementedError

    def know_columns(self) -> Any:
        raise NotImplementedError

    @property
    def count(self) -> int | None:
        return int(self.plan.counts.end(1)) if self.plan.counts.known else None

    def open(
        self,
        cursor: dict[str, Any] | None = None,
        epoch: int = 0,
        shard: int = 0,
        row: int = 0,
        last: WindowKey | None = None,
    ) -> None:
        """Begin at a cursor, or at the first row of an epoch, or of a shard in it, and read no further ahead
        than the last window, if given; ``row`` is the first row's number, for messages.
        """
        threads = default_threads()
        self._pool = Pool(threads) if threads and not self.plan.runs_user_code else None
        opener = ShardOpener(self.plan, open_windows(self.plan, self._pool, epoch, last))
        self._runs = ShardRuns(opener, shard, epoch, cursor)
        self._begin_at(row)

    def open_part(self, start: int, stop: int, epoch: int = 0) -> None:
        """Begin at a row, where positions follow by arithmetic (``plan.counted``), for those before
        ``stop``."""
        last = self.cursor_at(max(start, stop - 1), epoch)
        key = WindowKey(last["epoch"], 0, last["window"])
        self.open(self.cursor_at(start, epoch), epoch, 0, start, key)

    def _begin_at(self, row: int) -> None:
        """Called when the rows from one on can be read."""

    def close(self) -> None:
        self._runs = self._placed = None
        if self._pool is not None:
            self._pool.close()

    @property
    def cursor(self) -> dict[str, Any]:
        placed = self._placed
        assert placed is not None
        return placed.cursor(placed.first + self.used)

    def cursor_at(self, row: int, epoch: int = 0) -> dict[str, Any]:
        """The position before a row, where positions follow by arithmetic (``plan.counted``)."""
        found = self.plan.counts.cursor_at(row, 0, epoch)
        del found["delivered"]
        return found

    def next_run(self) -> Payload | None:
        assert self._runs is not None
        try:
            found = self._runs.next()
        except Exception as error:
            say_where(error, self.plan)
            raise
        if found is None:
            return None
        self._placed, run = found
        self.used = 0
        return slice_payload(run.block.data, self._placed.first, self._placed.last)
