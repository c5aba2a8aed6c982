"""The items of one consumer, in global order: the runs of its shards, some made ahead.

Several lanes may take the place of each shard, so that threads make more in parallel: lane
``m % L`` of batch m.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, MutableSequence, Sequence
from functools import partial
from heapq import heappop, heappush
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from trainpipes.columns.block import Pieces
from trainpipes.columns.lazy_batches import LazyBatches
from trainpipes.columns.run import Run, Unroll
from trainpipes.engine.layout import IntArray
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.pool import MOST_WAITING, Pool
from trainpipes.engine.reading.windows import Windows
from trainpipes.engine.shards.shard_rows import (
    ShardOpener,
    has_workers,
    open_windows,
    stages_to_open,
)
from trainpipes.engine.shards.shard_runs import ENDED, ShardIterator
from trainpipes.kinds.source import MixedWindows
from trainpipes.state.format import Position

#: Runs given to workers of a stage ahead of their turn.
SUBMITTED = 3
#: If the program works at least so many seconds between two items, the pool makes so many items ahead that
#: would be made when they are taken.
AT_WORK, MADE_AHEAD = 200e-6, 16


class ItemRows(NamedTuple):
    """The rows of one item: ``ids`` in file order over all files and ``epochs``, int64 ``[rows]``;
    ``pieces`` where they are packed."""

    ids: IntArray
    epochs: IntArray
    pieces: Pieces | None


class KnownItem(NamedTuple):
    """An item with its rows, for ``locate``."""

    item: Any
    rows: ItemRows


def known_items(run: Run) -> MutableSequence[Any]:
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


class ShardItems:
    """The items of several shards of one process, for one thread; ``WorkerReceiver`` has the same
    methods. ``pool`` makes runs ahead; ``stage_pool`` runs the stages above user functions.
    """

    def __init__(
        self,
        plan: Plan,
        position: Position,
        shards: int,
        windows: Windows | MixedWindows,
        pool: Pool | None,
        unroll: Unroll = Run.unroll,
        stage_pool: Pool | None = None,
    ) -> None:
        self._counted = plan.counted
        self._position = position
        self._lanes = plan.counts.num_shards
        self._own = shards * plan.layouts.lanes
        self._opener = ShardOpener(plan, windows, self._own, stage_pool=stage_pool)
        self._pool = pool
        self._unroll = unroll
        self._iterators: dict[int, ShardIterator] = {}
        #: The batch for which each lane needs its next run; the lanes whose next run is in work.
        self._due: list[tuple[int, int]] = []
        self._in_work: set[int] = set()
        self._most = 0 if pool is None else pool.threads + MOST_WAITING
        self._stride = 0  # from one batch to the next
        self._made_to = 0  # the batch up to which the pool makes items
        self._given = math.inf  # when the last item was given

    def begin(self, m: int, stride: int, end: float) -> None:
        """Have other threads, or a stage's workers, begin at batch ``m``."""
        if self._pool is None and self._opener.has_workers:
            self._most = SUBMITTED
        self._stride = stride
        for first in range(m, m + stride * self._own, stride):
            if first < end:
                lane = first % self._lanes
                self._of(lane)
                heappush(self._due, (first, lane))
        self._work_ahead()

    def open(self, numbers: Iterable[int]) -> None:
        """Open the shards of some batches: what they need is fetched in the order in which it is needed."""
        for m in numbers:
            self._of(m % self._lanes)

    def take(self, m: int) -> Any:
        """Batch ``m``, the next one of its shard; ENDED if the shard has no more."""
        lane = m % self._lanes
        found = self._iterators.get(lane) or self._of(lane)
        comes_to_run = not found.left
        if self._pool is not None and perf_counter() - self._given > AT_WORK:
            self._make_ahead(m, self._pool)
        item = found.take()
        if comes_to_run and self._most:
            self._in_work.discard(lane)
            if item is not ENDED:
                heappush(self._due, (m + (found.left + 1) * self._lanes, lane))
            self._work_ahead()
        if self._pool is not None:
            self._given = perf_counter()
        return item

    def _make_ahead(self, m: int, pool: Pool) -> None:
        """Have the pool make items after batch ``m`` that else are made when they are taken."""
        first = max(m + self._stride, self._made_to)
        if not self._stride or first > m + MADE_AHEAD // 2 * self._stride:
            return
        self._made_to = m + (MADE_AHEAD + 1) * self._stride
        coming: list[tuple[LazyBatches, int]] = []
        for number in range(first, self._made_to, self._stride):
            ahead = (number - m) // self._lanes  # items of its lane before it
            coming += self._of(number % self._lanes).late(ahead)
        if coming:
            pool.submit(partial(_make_items, coming))

    def _work_ahead(self) -> None:
        while self._due and len(self._in_work) < self._most:
            _, lane = heappop(self._due)
            self._in_work.add(lane)
            self._of(lane).work_ahead()

    def cursor_text(self, shard: int) -> str:
        """Where a shard's next item starts; empty where that follows from m."""
        return "" if self._counted else self._of(shard).cursor_text()

    def close(self) -> None:
        self._opener.windows.close()

    def _of(self, lane: int) -> ShardIterator:
        found = self._iterators.get(lane)
        if found is None:
            found = ShardIterator(self._opener, lane, self._position, self._pool, self._unroll)
            self._iterators[lane] = found
        return found


def _make_items(coming: Sequence[tuple[LazyBatches, int]]) -> None:
    for items, place in coming:
        items[place]


def items_of(
    plan: Plan,
    position: Position,
    shards: Collection[int],
    pool: Pool | None = None,
    alone: bool = False,
    with_rows: bool = False,
) -> ShardItems:
    """The items of some shards of a pass, from a position on. ``alone``: the thread that iterates
    calls user functions.
    """
    if with_rows:
        _keep_pieces(plan)
    makers, stage_pool = (None, pool) if alone else (pool, None)
    plan = plan.in_lanes(_lanes(plan, len(shards), makers, stage_pool))
    windows = open_windows(plan, pool, position.epoch)
    unroll = known_items if with_rows else Run.unroll
    return ShardItems(plan, position, len(shards), windows, makers, unroll, stage_pool)


def _lanes(plan: Plan, shards: int, pool: Pool | None, stage_pool: Pool | None) -> int:
    """Lanes of each shard: enough that every thread, or worker of a stage, has a run to make."""
    chain = plan.chain
    as_they_stand = chain.shuffle is None and all(s is chain.batch for s in chain.after_on_rows)
    if not plan.counted or as_they_stand or not shards:
        return 1
    if pool is not None:
        wanted = pool.threads + 1
    else:
        wanted = SUBMITTED + 1 if has_workers(stages_to_open(plan, stage_pool)) else 1
    return -(-wanted // shards)


def _keep_pieces(plan: Plan) -> None:
    for stage in plan.chain.stages:
        stage.keep_pieces()
    for part in plan.mixed.values():
        _keep_pieces(part)
