"""One consumer: the items of its shards in the order of the global sequence, and where they then stand.

Owns the threads that work ahead. Used by the thread that iterates.
"""

from __future__ import annotations

import math
from time import perf_counter
from typing import Any
from weakref import finalize

from trainpipes.left_out_batches import LeftOutBatches
from trainpipes.runtime.iterating.delivered_state import ConsumerState
from trainpipes.runtime.iterating.empty_epoch import warn_if_all_empty
from trainpipes.runtime.iterating.loader_workers import LoaderWorkers
from trainpipes.runtime.iterating.numbered_items import NumberedItems
from trainpipes.runtime.iterating.worker_receiver import WorkerReceiver
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.pool import Pool, default_threads
from trainpipes.runtime.shards.items import Items, items_of
from trainpipes.runtime.shards.shard_iterator import ENDED
from trainpipes.runtime.shards.turns import Turns
from trainpipes.state import Position
from trainpipes.topology import Topology

__all__ = ["ConsumerIterator"]

#: Seconds between two items from which somebody is at work in between, and how often in a row.
AT_WORK, TIMES = 200e-6, 4


class ConsumerIterator:
    """What one worker of one rank gets, in order, from a position on.

    Args:
        plan: the pipeline's.
        topology: which consumer this is.
        position: where to start; its cursors, if it needs any, may be those of all shards or of its own.
        origin: the micro-batch from which workers took turns; where the run (re)started.
        stops_at_holes: whether it ends before the first micro-batch that is missing; else it passes
            over shards that have ended, and gives all.
        threads: that work ahead: 0 for none; None for as many as there are cores, and none for functions
            that are not ours.
        workers: of a ``Loader``, which make the items; None to make them in this process.
        with_rows: whether each item is given as a ``NumberedItem``, with its rows.
    """

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        position: Position,
        origin: int,
        stops_at_holes: bool = False,
        threads: int | None = 0,
        workers: LoaderWorkers | None = None,
        with_rows: bool = False,
    ) -> None:
        self._plan = plan = plan.resized(position.sizes)
        self._topology = topology
        self._first = position
        self._origin = origin
        self._stops_at_holes = stops_at_holes
        self._started = False
        self._over = False  # whether it has said that there are no more items
        self._num_shards = plan.chain.num_shards
        self._threads = threads
        self._workers = workers
        self._with_rows = with_rows
        self._items: Items | None = None
        self._pool: Pool | None = None
        self._m = position.m
        self._stride = topology.world_size * topology.num_workers
        self._next = topology.next_slot(position.m, origin)
        left_out = LeftOutBatches.of(position)
        self._end = plan.counts.end(topology.world_size, origin, left_out)
        self._own = topology.shards(origin, plan.chain.num_shards)
        self._running = set(self._own)
        self._given = math.inf  # when the last item was given
        self._busy = 0  # how often in a row somebody was at work between two items
        #: Whether a state has cursors, and those of which shards moved since it was asked for.
        self._has_cursors = not plan.counted
        self._moved = set(self._own) if self._has_cursors else set()
        if self._has_cursors:
            position.require(self._own)

    def __next__(self) -> Any:
        if not self._started:
            self._start_work()
        elif self._pool is not None:
            self._look_ahead()
        items = self.items
        while self._running and self._next < self._end:
            m = self._next
            shard = m % self._num_shards
            item = items.take(m)
            if self._has_cursors:
                self._moved.add(shard)
            if item is ENDED:
                self._running.discard(shard)
                if self._stops_at_holes:
                    self._end = m
                    break
            self._next += self._stride
            if item is not ENDED:
                step = (m - self._origin) // self._topology.world_size
                self._m = self._origin + (step + 1) * self._topology.world_size
                self._given = perf_counter()
                return item
        self._over = True
        self.close()
        items.close()
        if self._given == math.inf and self._first.m == 0:
            warn_if_all_empty(self._plan, self._topology)
        raise StopIteration

    def _start_work(self) -> None:
        """Have the windows of all shards known, so that none reads again what another has."""
        self._started = True
        items = self.items
        if self._workers is None:
            for stage in self._plan.chain.stages:
                stage.settle(0 if self._pool is None else self._pool.threads)
        for m in range(self._next, self._next + self._stride * len(self._own), self._stride):
            if m < self._end:
                items.work_ahead(m)

    def _look_ahead(self) -> None:
        """Where somebody is at work between two items, have other threads make the next ones; who only
        collects them makes them as fast alone."""
        self._busy = self._busy + 1 if perf_counter() - self._given > AT_WORK else 0
        if self._busy >= TIMES:
            self.items.make_ahead()

    @property
    def items(self) -> Items:
        """What gives the items."""
        if self._items is None:
            self._items = self._begin()
            if self._with_rows:
                self._items = NumberedItems(self._items, self._first)
        return self._items

    def _begin(self) -> Items:
        plan = self._plan
        if self._workers is not None:
            return WorkerReceiver(self._workers, plan, self._topology, self._first)
        if self._threads != 0:
            threads = default_threads() if self._threads is None else self._threads
            # A function that is not ours is not called by two threads at once.
            ours = not plan.runs_user_code
            if threads:
                self._pool = Pool(threads if ours or not self._threads else 1, shares=ours)
                finalize(self, self._pool.close)
        # The thread that iterates calls functions that are not ours.
        alone = (self._threads is None or plan.in_caller) and plan.runs_user_code
        turns = Turns(self._stride, self._end)
        return items_of(plan, self._first, turns, self._own, self._pool, alone, self._with_rows)

    def state(self) -> ConsumerState:
        """Where this consumer stands after the last item given."""
        moved = {shard: self.items.cursor_text(shard) for shard in self._moved}
        self._moved.clear()
        over = self._plan.counts.known and (self._over or self._m >= self._end)
        return ConsumerState(self._m, self._next, over, moved)

    def close(self) -> None:
        """Let threads and workers go. The state stays."""
        if self._pool is not None:
            self._pool.close()
        if self._workers is not None:
            self.items.close()
