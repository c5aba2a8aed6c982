"""What gives the items of one consumer: by arithmetic where the pipeline is counted, else shard by shard."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from trainpipes.columns.run import Run
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.pool import Pool
from trainpipes.engine.reading.open_windows import open_windows
from trainpipes.engine.shards.counted_items import CountedItems
from trainpipes.engine.shards.known_items import known_items
from trainpipes.engine.shards.shard_iterator import ShardItems
from trainpipes.engine.shards.turns import Turns
from trainpipes.kinds.source import MixedWindows
from trainpipes.state.format import Position


class Items(Protocol):
    """The items of one consumer. Called by one thread at a time."""

    def take(self, m: int) -> Any:
        """Micro-batch ``m``, the next one of its shard; ENDED if the shard has no more."""
        ...

    def work_ahead(self, m: int) -> None:
        """Have other threads, or workers of a stage, begin with what leads to micro-batch ``m``."""
        ...

    def make_ahead(self) -> None:
        """Have other threads make the items that come next."""
        ...

    def cursor_text(self, shard: int) -> str:
        """Where a shard's next item starts, as it stands in a state; empty where that follows from m."""
        ...

    def close(self) -> None:
        """Let the windows go."""
        ...


def items_of(
    plan: Plan,
    position: Position,
    turns: Turns,
    shards: Collection[int],
    pool: Pool | None = None,
    alone: bool = False,
    with_rows: bool = False,
) -> Items:
    """The items of some shards of a pass, from a position on.

    Args:
        plan: the pipeline's.
        position: where to start.
        turns: which micro-batches will be asked for.
        shards: those that they are of.
        pool: works ahead; None for no other thread.
        alone: whether the pool only reads windows.
        with_rows: whether each item is given with its rows, as a ``KnownItem``.
    """
    if with_rows:
        _keep_pieces(plan)
    windows = open_windows(plan, pool, position.epoch)
    unroll = known_items if with_rows else Run.unroll
    if plan.counted and not isinstance(windows, MixedWindows):
        return CountedItems(plan, position, turns, windows, pool, alone, unroll)
    own = None if alone else pool
    return ShardItems(plan, position, shards, windows, own, unroll)


def _keep_pieces(plan: Plan) -> None:
    for stage in plan.chain.stages:
        stage.keep_pieces()
    for part in plan.mixed.values():
        _keep_pieces(part)
