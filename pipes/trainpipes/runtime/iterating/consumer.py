"""One consumer: the lanes of its shards, advanced in the order of the global sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import finalize

from trainpipes.runtime.iterating.empty_epoch import warn_if_all_empty
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.pool import Pool, default_threads
from trainpipes.runtime.shards.beforehand import Beforehand
from trainpipes.runtime.shards.chains import Chains
from trainpipes.runtime.shards.lane import ENDED, Lane
from trainpipes.state import Position, render
from trainpipes.topology import Topology

__all__ = ["Consumer"]

#: Runs that workers of a stage have at a time, at least.
HANDED_OVER = 3


class Consumer:
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
    """

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        position: Position,
        origin: int,
        stops_at_holes: bool = False,
        threads: int | None = 0,
    ) -> None:
        self._plan = plan = plan.resized(position.sizes)
        self._topology = topology
        self._start = position
        self._origin = origin
        self._stops_at_holes = stops_at_holes
        self._started = False
        self._over = False  # whether it has said that there are no more items
        self._hands_over = False
        self._last = -1  # the shard that gave the last item
        self._passed: list[int] = []  # shards found to have ended on the way to it
        self._num_shards = plan.num_shards
        self._threads = threads
        self._chains: Chains | None = None
        self._pool: Pool | None = None
        self._lanes: dict[int, Lane] = {}
        self._beforehand: Beforehand | None = None
        self._texts: dict[int, str] = {}  # of lanes that have not moved since
        self._m = position.m
        self._stride = topology.world_size * topology.num_workers
        self._next = topology.next_slot(position.m, origin)
        self._end = plan.last_slot(topology.world_size, origin)
        self._own = topology.shards(origin, plan.num_shards)
        self._running = set(self._own)
        #: The shards of which a state says where they stand.
        self._stated: set[int] = set()
        if not plan.seekable:
            self._stated = self._own
            position.require(self._own)

    def __next__(self) -> Any:
        if not self._started:
            self._started = True
            if self._chains is None:
                self._chains = self._begin()
            for stage in self._plan.stages:
                stage.settle(0 if self._pool is None else self._pool.threads)
            for shard in self._in_turn():  # so that none reads again what another has
                lane = self._lane(shard)
                if self._pool is not None:
                    lane.work_ahead(1)
            if self._pool is not None and self._running:
                self._beforehand = Beforehand(self._pool, self._stride)
            assert self._chains is not None
            self._hands_over = self._lanes_alone and self._chains.has_workers
        self._passed.clear()
        if self._beforehand is not None:
            self._beforehand.asked(self._next, self._turn)
        while self._running and self._next < self._end:
            m = self._next
            shard = m % self._num_shards
            lane = self._lane(shard)
            if self._hands_over:
                lane.work_ahead(1)
                if m + self._stride < self._end:  # that workers have what to do at the end of a run
                    self._lane((m + self._stride) % self._num_shards).work_ahead(1)
            item = lane.next()
            self._texts.pop(shard, None)
            if item is ENDED:
                self._running.discard(shard)
                self._passed.append(shard)
                if self._stops_at_holes:
                    self._end = m
                    break
            self._next += self._stride
            if item is not ENDED:
                step = (m - self._origin) // self._topology.world_size
                self._m = self._origin + (step + 1) * self._topology.world_size
                self._last = shard
                if self._beforehand is not None:
                    self._beforehand.given()
                return item
        self._over = True
        self._end_pass()
        if self._last < 0 and self._start.m == 0:
            warn_if_all_empty(self._plan, self._topology)
        raise StopIteration

    def _end_pass(self) -> None:
        """Let threads and windows go."""
        self.close()
        if self._chains is not None:
            self._chains.windows.close()

    def _turn(self) -> tuple[int, list[Lane]]:
        """The next slot, and the lanes as they give items from it on, those at their end too."""
        upcoming = self._next
        slots = range(upcoming, upcoming + self._stride * len(self._own), self._stride)
        return upcoming, [self._lanes[m % self._num_shards] for m in slots]

    def _in_turn(self) -> list[int]:
        """The running shards in the order in which they give their next items."""
        return sorted(self._running, key=lambda shard: (shard - self._next) % self._num_shards)

    def _lane(self, shard: int) -> Lane:
        if shard not in self._lanes:
            if self._chains is None:
                self._chains = self._begin()
            cursor = self._plan.cursor(self._start, shard)
            pool = None if self._lanes_alone else self._pool
            ahead = 0 if pool is None else -(-(pool.threads + 1) // len(self._own))
            if self._lanes_alone and self._chains.has_workers:
                ahead = -(-HANDED_OVER // len(self._own))
            number = self._start.epoch
            self._lanes[shard] = Lane(self._chains, shard, number, cursor, pool, ahead)
        return self._lanes[shard]

    @property
    def _lanes_alone(self) -> bool:
        """Whether the thread that iterates makes the runs, since functions are called that are not ours."""
        return self._threads is None and self._plan.runs_user_code

    def _begin(self) -> Chains:
        plan, number = self._plan, self._start.epoch
        if self._threads != 0:
            threads = default_threads() if self._threads is None else self._threads
            # A function that is not ours is not called by two threads at once.
            ours = not plan.runs_user_code
            if threads:
                self._pool = Pool(threads if ours or not self._threads else 1, shares=ours)
                finalize(self, self._pool.close)
        return Chains(plan, plan.windows(self._pool, number), len(self._own))

    @property
    def epoch(self) -> int:
        """The pass over the data."""
        return self._start.epoch

    @property
    def m(self) -> int:
        """Micro-batches taken over all ranks after the last item given: its step is over."""
        return self._m

    @property
    def upcoming(self) -> int:
        """The micro-batch that this consumer gives next, or would have given."""
        return self._next

    def close(self) -> None:
        """Let the threads go."""
        if self._pool is not None:
            self._pool.close()

    def texts(self) -> dict[int, str]:
        """The cursor of each of this consumer's shards, as JSON; none where the pipeline is counted."""
        for shard in self._stated:
            if shard not in self._texts:
                self._texts[shard] = self._lane(shard).cursor_text()
        return dict(self._texts)

    def moved(self) -> dict[int, str]:
        """The cursors of the shard that gave the last item, and of those that ended on the way to it."""
        moved = (*self._passed, self._last) if self._stated else ()
        return {s: self._lane(s).cursor_text() for s in moved}

    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """The state after the last item given: whole where the pipeline is counted, else with the cursors
        of this consumer's own shards. After the last item of a pass it is that of the next one's start,
        unless ``extra`` is given: a worker, which has more to say, cannot know that the others have come to
        the end too, and a node tells of the end."""
        if extra is None and self._plan.known and (self._over or self._m >= self._end):
            return self.next_pass_state()
        return self.render(self._m, self.texts(), extra)

    def render(self, m: int, texts: dict[int, str], extra: dict[str, Any] | None) -> dict[str, Any]:
        """The state of given cursors."""
        notes = {**self._start.notes, **self._plan.notes}
        position = replace(self._start, m=m, cursors={}, extra=extra or {}, notes=notes)
        return render(position, self._plan.identity, texts)

    def next_pass_state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """The state of the next pass's start."""
        start = Position(self.epoch + 1, 0, self._num_shards, notes=self._start.notes)
        plan = self._plan.resized(None)
        after = Consumer(plan, self._topology, start, 0, self._stops_at_holes)
        return after.render(0, after.texts(), extra)
