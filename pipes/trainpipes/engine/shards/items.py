"""What gives the items of one consumer: by arithmetic where the pipeline is counted, else shard by shard."""

from __future__ import annotations

from collections.abc import Collection, MutableSequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from trainpipes.columns.block import Pieces
from trainpipes.columns.lazy_batches import LazyBatches
from trainpipes.columns.run import Run
from trainpipes.engine.layout import IntArray
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.pool import Pool
from trainpipes.engine.reading.open_windows import open_windows
from trainpipes.engine.shards.counted_items import CountedItems
from trainpipes.engine.shards.shard_iterator import ShardItems
from trainpipes.engine.shards.turns import Turns
from trainpipes.kinds.source import MixedWindows
from trainpipes.state.format import Position


class ItemRows(NamedTuple):
    """The rows of one item.

    Args:
        ids: number of each in file order over all files, int64 ``[rows]``.
        epochs: in which each is read, int64 ``[rows]``.
        pieces: what they are made of, where they are packed.
    """

    ids: IntArray
    epochs: IntArray
    pieces: Pieces | None


class KnownItem(NamedTuple):
    """An item, and which rows it is made of."""

    item: Any
    rows: ItemRows


def known_items(run: Run) -> MutableSequence[Any]:
    """A run's items as ``Run.unroll`` gives them, each with its rows: what is made when it is taken is so
    here, too."""
    items, block, bounds = run.unroll(), run.block, run.bounds
    count = len(items)
    if bounds is None:
        bounds = np.arange(count + 1, dtype=np.int64)
    epochs = np.broadcast_to(np.asarray(block.epoch, dtype=np.int64), len(block))
    ids, made_of = block.ids, block.made_of

    def known(k: int) -> KnownItem:
        rows = slice(int(bounds[k]), int(bounds[k + 1]))
        pieces = None if made_of is None else made_of.at(rows)
        found = KnownItem(items[k], ItemRows(ids[rows], epochs[rows], pieces))
        items[k] = None  # held once
        return found

    if isinstance(items, LazyBatches):
        return LazyBatches(known, count)
    return [known(k) for k in range(count)]


class Items(Protocol):
    """The items of one consumer. Called by one thread at a time."""

    def take(self, m: int) -> Any:
        """Batch ``m``, the next one of its shard; ENDED if the shard has no more."""
        ...

    def work_ahead(self, m: int) -> None:
        """Have other threads, or workers of a stage, begin with what leads to batch ``m``."""
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
        turns: which batches will be asked for.
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
