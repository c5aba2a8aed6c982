"""The items of a consumer, in global order: the runs of its shards, some made ahead.

Several lanes may take the place of each shard, so that threads make more in parallel: lane
``m % L`` of batch m.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from time import perf_counter
from typing import Any, NoReturn

from trainpipes._internal.pool import MOST_WAITING, Future, Pool
from trainpipes.columns.run import Run, Unroll
from trainpipes.columns.tensor_rows import LazyBatches
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.reading.windows import MixedWindows, Windows
from trainpipes.engine.shards.lane import ENDED, PASSED, Lane, RunItems, raise_placed
from trainpipes.engine.shards.shard_rows import (
    Shards,
    has_workers,
    open_windows,
    stages_to_open,
)
from trainpipes.state.format import Position

#: Runs given to workers of a stage ahead of their turn.
SUBMITTED = 3
#: If the program works at least so many seconds between two items, the pool makes so many items ahead that
#: would be made when they are taken.
AT_WORK, MADE_AHEAD = 200e-6, 16


class ShardItems:
    """The items of several shards of a process, for a single thread; ``WorkerReceiver`` has the same
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
        sharers: int = 1,
        is_own: Callable[[int], bool] | None = None,
    ) -> None:
        # Set once: the plan, the position of the start, how many lanes there are, and how many are here.
        self._plan = plan
        self._position = position
        self._num_lanes = plan.counts.num_shards
        self._own = shards * plan.layouts.lanes // sharers
        self._shards = Shards(plan, windows, self._own, None, stage_pool, is_own)
        self._pool = pool
        self._unroll = unroll
        #: Lanes by their numbers; ``_of`` opens them, ``_at_next_run`` replaces them after an error.
        self._lanes: dict[int, Lane] = {}
        #: Heap of (batch, lane) that need a run; pending runs by lane. ``_begin`` moves them on.
        self._due: list[tuple[int, int]] = []
        self._in_work: dict[int, Callable[[], RunItems | None]] = {}
        #: Most runs in work, and the distance of consecutive batches; set by ``begin``.
        self._most = 0 if pool is None else pool.threads + MOST_WAITING
        self._stride = 0
        #: The batch up to which the pool makes items; ``_make_ahead`` moves it on.
        self._made_to = 0
        #: When the last item was given, and whether the program worked since; set by ``take``.
        self._given = math.inf
        self._is_at_work = False

    def begin(self, m: int, stride: int, end: float) -> None:
        """Have other threads, or a stage's workers, begin at batch ``m``."""
        if self._pool is None and (self._shards.has_workers or self._shards.begins_all):
            self._most = SUBMITTED if self._plan.workers is None else self._plan.workers.ahead
        self._stride = stride
        for first in range(m, m + stride * self._own, stride):
            if first < end:
                number = first % self._num_lanes
                self._of(number)
                heappush(self._due, (first, number))
        self._work_ahead()

    def open(self, numbers: Iterable[int]) -> None:
        """Open the shards of some batches: their blocks are fetched in the order in which they are needed."""
        for m in numbers:
            self._of(m % self._num_lanes)

    def take(self, m: int) -> Any:
        """Batch ``m``, the next of its shard; ENDED if the shard has no more."""
        number = m % self._num_lanes
        lane = self._lanes.get(number) or self._of(number)
        comes_to_run = not lane.left
        self._is_at_work = self._pool is not None and perf_counter() - self._given > AT_WORK
        if comes_to_run:
            lane = self._at_next_run(m, lane)
            self._made_to = 0  # items of this run could not be made before
        if self._is_at_work:
            self._make_ahead(m)
        item = lane.made()
        if self._pool is not None:
            self._given = perf_counter()
        if item is not ENDED:
            lane.advance()  # last: Ctrl-C may come at any call, and the caller only counts
        return item

    def pass_over(self, m: int) -> Any:
        """As ``take``, of a batch that is another consumer's: it is not made. Says whether the shard has
        ended."""
        number = m % self._num_lanes
        lane = self._of(number)
        if not lane.left:
            lane = self._at_next_run(m, lane)
        if not lane.left:
            return ENDED
        lane.advance()
        return PASSED

    def _at_next_run(self, m: int, lane: Lane) -> Lane:
        """The lane of batch ``m`` with the items of its next run; others are begun ahead. After an error it
        goes on from the last item taken; the error is raised, unless smaller runs may put it where it is due.
        """
        number = m % self._num_lanes
        while not (lane.left or lane.ended):
            try:
                self._begin(number)
                lane.go_to(self._in_work.pop(number)())
            except BaseException as error:
                self._in_work.pop(number, None)
                lane = self._lanes[number] = lane.again(error)
                if not lane.singly:
                    raise_placed(error, self._plan)
        if self._most:
            if lane.left:
                heappush(self._due, (m + lane.left * self._num_lanes, number))
            self._work_ahead()
        return lane

    def _make_ahead(self, m: int) -> None:
        """Have the pool make items after batch ``m`` that else are made when they are taken."""
        first = max(m + self._stride, self._made_to)
        if not self._stride or first > m + MADE_AHEAD // 2 * self._stride:
            return
        self._made_to = m + (MADE_AHEAD + 1) * self._stride
        coming: list[tuple[LazyBatches, int]] = []
        for number in range(first, self._made_to, self._stride):
            ahead = (number - m) // self._num_lanes  # items of its lane before it
            coming += self._of(number % self._num_lanes).late(ahead)
        if coming and self._pool is not None:
            self._pool.submit(partial(_make_items, coming))

    def _work_ahead(self) -> None:
        while self._due and len(self._in_work) < self._most:
            self._begin(self._due[0][1])
            heappop(self._due)  # last: Ctrl-C may come

    def _begin(self, number: int) -> None:
        """Have the next run of a lane made, by the pool or when it is taken."""
        lane = self._of(number)
        if number in self._in_work or lane.ended:
            return
        if self._pool is None:
            try:
                if self._shards.begins_all:
                    self._in_work[number] = _made_now(lane.make)
                else:
                    lane.begin()
                    self._in_work[number] = lane.make
            except BaseException as error:  # Ctrl-C: what was opened has ended
                self._in_work.pop(number, None)
                self._lanes[number] = lane.again(error)
                raise
        else:
            future = Future(partial(_with_first, lane.make) if self._is_at_work else lane.make)
            self._in_work[number] = partial(self._pool.result, future)  # first: Ctrl-C may come
            self._pool.begin(future)

    def cursor_text(self, shard: int) -> str:
        """Where a shard's next item starts; empty where that follows from m."""
        return "" if self._plan.counted else self._of(shard).cursor_text()

    def close(self) -> None:
        self._shards.windows.close()

    def let_go(self) -> None:
        """Let go of all rows: nobody takes items any more. Any thread may be at work."""
        self._in_work, self._due = {}, []
        for lane in list(self._lanes.values()):
            lane.let_go()
        self._shards.windows.let_go()

    def _of(self, number: int) -> Lane:
        lane = self._lanes.get(number)
        if lane is None:
            position = self._position
            cursor = self._plan.counts.cursor(position, number)
            lane = Lane(self._shards, number, position.pass_number, cursor, self._unroll)
            self._lanes[number] = lane
        return lane


def _made_now(make: Callable[[], RunItems | None]) -> Callable[[], RunItems | None]:
    """What gives a run that is made at once, or raises in its turn."""
    try:
        items = make()
    except Exception as error:
        raised = error

        def fail() -> NoReturn:
            raise raised

        return fail
    return lambda: items


def _with_first(make: Callable[[], RunItems | None]) -> RunItems | None:
    """A run whose first item is made, too."""
    run_items = make()
    if run_items is not None and isinstance(run_items.items, LazyBatches):
        with suppress(Exception):  # it is raised where the item is due
            run_items.items[run_items.first]
    return run_items


def _make_items(coming: Sequence[tuple[LazyBatches, int]]) -> None:
    for items, place in coming:
        items[place]


def items_of(
    plan: Plan,
    position: Position,
    shards: Collection[int],
    pool: Pool | None = None,
    alone: bool = False,
    unroll: Unroll = Run.unroll,
    sharers: int = 1,
    is_own: Callable[[int], bool] | None = None,
) -> ShardItems:
    """The items of some shards of a pass, from a position on.

    Args:
        alone: whether the thread that iterates calls user functions.
        sharers: how many consumers take turns at these shards. Where batches are counted, each has lanes
            of its own; else it passes over the batches of the others.
        is_own: of one that passes over batches: says which it makes.
    """
    makers, stage_pool = (None, pool) if alone else (pool, None)
    is_own = None if plan.counted else is_own
    sharers = sharers if plan.counted else 1
    lanes = -(-_lanes(plan, len(shards), makers, stage_pool) // sharers) * sharers
    plan = plan.in_lanes(lanes)
    windows = open_windows(plan, pool, position.pass_number)
    return ShardItems(
        plan, position, len(shards), windows, makers, unroll, stage_pool, sharers, is_own
    )


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
