"""The items of one worker of one rank, in global order, and the threads that work ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import finalize

from trainpipes._internal.pool import Pool, default_threads
from trainpipes.engine.iterating.epoch_end import say_uneven, warn_if_all_empty
from trainpipes.engine.iterating.loader_workers import LoaderWorkers, WorkerReceiver
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.shards.shard_items import ItemRows, ShardItems, items_of
from trainpipes.engine.shards.shard_runs import ENDED
from trainpipes.order.topology import Topology
from trainpipes.state.format import Position


@dataclass(frozen=True)
class RunOptions:
    """How items are made; they are the same with any of these.

    Args:
        threads: that work ahead; None for one per core, without user functions.
        workers: of a ``Loader``, which make the items.
        with_rows: whether each item comes with its rows.
        places: whether stages place batches on a device.
    """

    threads: int | None = 0
    workers: LoaderWorkers | None = None
    with_rows: bool = False
    places: bool = False


#: In the thread that iterates.
SERIAL = RunOptions()


class ConsumerPosition(NamedTuple):
    """Where a consumer stands after the last item that it gave.

    Args:
        m: batches of the pass that all ranks together have taken.
        upcoming: number of the next batch; at the end, of the first missing one.
        over: whether the pass is over.
        moved: JSON cursors of the shards that moved since the last call; first all.
    """

    m: int
    upcoming: int
    over: bool
    moved: dict[int, str]


class WorkerIterator:
    """What one worker of one rank gets, in order. Workers took turns from batch ``origin``."""

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        position: Position,
        origin: int,
        options: RunOptions = SERIAL,
    ) -> None:
        self._plan = plan = plan.resized(position.sizes, position.m)
        self._topology = topology
        self._first = position
        self._origin = origin
        self._started: ShardItems | WorkerReceiver | None = None
        self._over = False
        self._num_shards = plan.chain.num_shards
        self._options = options
        self._items: ShardItems | WorkerReceiver | None = None
        self._pool: Pool | None = None
        self._stride = topology.world_size * topology.num_workers
        self._next = topology.next_slot(position.m, origin)
        #: Whether it ends at the first missing batch, with all ranks; else it gives what is left.
        self.may_end_together = plan.counts.ends_unevenly and not plan.chain.ragged
        self.ends_together = self.may_end_together and topology.world_size > 1
        #: The batch at which it ends; inf if unknown.
        self.end = plan.counts.end(topology.world_size, origin)
        self._own = topology.shards(origin, plan.chain.num_shards)
        ended = {shard for shard, cursor in position.cursors.items() if "ended" in cursor}
        self._running = set(self._own) - ended
        #: Of the item given last, with ``with_rows``.
        self.rows: ItemRows | None = None
        #: The batch number of the item given last.
        self.m: int | None = None
        #: Whether a state has cursors, and which shards moved since the last state.
        self._has_cursors = not plan.counted
        self._moved = set(self._own) if self._has_cursors else set()
        if self._has_cursors:
            position.require(self._own)

    def __next__(self) -> Any:
        items = self._started or self._start_work()
        while self._running and self._next < self.end:
            m = self._next
            shard = m % self._num_shards
            item = items.take(m) if shard in self._running else ENDED
            if self._has_cursors:
                self._moved.add(shard)
            if item is ENDED:
                self._running.discard(shard)
                if self.ends_together:
                    self.end = m
                    break
            self._next += self._stride
            if item is not ENDED:
                self.m = m
                if self._options.with_rows:
                    item, self.rows = item
                return item
        self._over = True
        if not self.ends_together:  # else it may be asked what is left
            self.close()
            if self.m is None and self._first.m == 0:
                warn_if_all_empty(self._plan, self._topology)
        raise StopIteration

    def rest(self, most: int) -> int:
        """Make at most so many batches of shards that have not ended; returns how many there were."""
        count = 0
        while self._running and count < most:
            shard = self._next % self._num_shards
            if shard in self._running:
                if self.items.take(self._next) is ENDED:
                    self._running.discard(shard)
                else:
                    count += 1
            self._next += self._stride
        return count

    def say_end(self, end: int, left: int, first: int) -> None:
        """Say where all ranks ended together, at batch ``first``, and what they leave out."""
        if left:
            shard = first % self._num_shards if first < self._num_shards else None
            say_uneven(self._plan, self._first.epoch, end, left, shard)
        elif not end:
            warn_if_all_empty(self._plan, self._topology)

    def _start_work(self) -> ShardItems | WorkerReceiver:
        self._started = items = self.items
        if self._options.workers is None:
            self._plan.settle(0 if self._pool is None else self._pool.threads)
        items.begin(self._next, self._stride, self.end)
        return items

    @property
    def items(self) -> ShardItems | WorkerReceiver:
        # A cached_property would make each item 0.1 us slower.
        if self._items is None:
            self._items = self._open_items()
        return self._items

    def _open_items(self) -> ShardItems | WorkerReceiver:
        plan, options = self._plan, self._options
        if options.workers is not None:
            return WorkerReceiver(options.workers, plan, self._topology, self._first)
        ours = not plan.runs_user_code
        threads = default_threads() if options.threads is None else options.threads
        # The thread that iterates calls user functions, unless threads were asked for.
        alone = not ours and (options.threads is None or plan.in_caller)
        if threads:
            # Two threads never call a user function at once.
            self._pool = Pool(threads if ours or alone else 1, shares=ours or alone)
            finalize(self, self._pool.close)
        return items_of(plan, self._first, self._own, self._pool, alone, options.with_rows)

    def state(self) -> ConsumerPosition:
        moved = {shard: self.items.cursor_text(shard) for shard in self._moved}
        self._moved.clear()
        m, world = self._first.m, self._topology.world_size
        if self.m is not None:  # all ranks' batches of its step are given
            m = self._origin + ((self.m - self._origin) // world + 1) * world
        over = self._plan.counts.known and (self._over or m >= self.end)
        return ConsumerPosition(m, self._next, over, moved)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._items is not None:
            self._items.close()
