"""The path for counted pipelines: a consumer's batches, in order, straight from the windows.

Where a batch's rows stand follows from its number, so that nothing has a position of its own, and a
group of batches is made by itself, in any thread: its rows are looked up in the windows of their
spans, and put through the stages above. Groups are small at first, so that the first batch comes soon.

Owned by one consumer and called by the thread that iterates; windows and groups are handed to its pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableSequence, Sequence
from functools import cached_property, partial
from typing import Any
from weakref import ref

import numpy as np

from trainpipes.columns.lazy_batches import LazyBatches
from trainpipes.columns.run import Run, Unroll
from trainpipes.engine.layout import IntArray, Layout, WindowKey
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.pool import Pool, Ticket, Urgency
from trainpipes.engine.reading.windows import Window, Windows
from trainpipes.engine.shards.groups import Group, GroupMaker, fail
from trainpipes.engine.shards.opener import RUN_ROWS, rows_at_a_time
from trainpipes.engine.shards.shard_runs import is_about_a_row, raise_placed
from trainpipes.engine.shards.turns import Turns
from trainpipes.state.format import Position

#: Batches of the first group; each later one has twice as many as the one before it.
FIRST = 1
#: Groups that workers of a stage have at a time, at least.
SUBMITTED = 3
#: Items made while the one that trains is at work, and how few of them are left when more are.
MADE_AHEAD, LEAST_AHEAD = 16, 8
#: Seconds up to which a group is made by whoever takes it, if nobody is at work in between: to have it made
#: by another thread, and to wait for that, takes longer.
LIGHT = 1e-3


class CountedItems:
    """The items of one consumer of a counted pipeline.

    Args:
        plan: the pipeline's.
        position: where they start.
        turns: which batches they are.
        windows: where rows are.
        pool: reads windows and makes groups; None for none but the thread that iterates.
        alone: whether the thread that iterates makes the groups, since functions are called that are not
            ours.
        unroll: gives the items of a run.
    """

    def __init__(
        self,
        plan: Plan,
        position: Position,
        turns: Turns,
        windows: Windows,
        pool: Pool | None,
        alone: bool,
        unroll: Unroll = Run.unroll,
    ) -> None:
        self._plan = plan
        self._first_epoch = plan.chain.first_epoch(position.epoch)
        self._turns = turns
        self._windows = windows
        self._readers = None if plan.reads_user_code else pool
        self._pool = None if alone else pool
        self._maker = GroupMaker(plan.chain, unroll)
        #: Whether any thread may make a group.
        self._shares = not plan.runs_user_code
        self._count = FIRST  # batches of the next group
        self._singly = 0  # batches that are made one by one, to find the one that fails
        self._failed: Exception | None = None  # what they failed with together
        self._tickets: deque[tuple[Group, Ticket]] = deque()
        self._beginning: Ticket | None = None  # the pool's work on the group after those
        self._upcoming: int | None = None  # the batch after the last group in work
        self._items: MutableSequence[Any] = []
        self._places: Sequence[int] = ()
        self._k = 0
        self._ahead_to = 0  # items of the group that are made ahead
        # Whether somebody was at work between two items of the group at hand, and of the one before.
        self._at_work = self._was_at_work = False

    # What depends on workers of stages is asked first when these are settled.

    @cached_property
    def _in_work(self) -> int:
        """Groups that are in work at a time."""
        if self._pool is not None:
            return self._pool.threads + 1
        return SUBMITTED if self._maker.has_workers else 0

    @cached_property
    def _when_taken(self) -> bool:
        """Whether each batch is made by itself, when it is taken: where Python is called for rows."""
        chain = self._plan.chain
        calls_rows = chain.batch is not None and any(stage.per_row for stage in chain.after)
        return calls_rows and self._pool is None and not self._maker.has_workers

    @cached_property
    def _most(self) -> int:
        """Batches in a group."""
        rows = RUN_ROWS if self._when_taken else rows_at_a_time(self._plan)
        return max(1, rows // self._plan.chain.batch_size)

    # One item after the other

    def take(self, m: int) -> Any:
        """Batch ``m``, which is the first one or the one after that given last. Asked again after an
        error, it is made again."""
        while self._k == len(self._places):
            self._next_group(m)
        k = self._places[self._k]
        try:
            item = self._items[k]
        except BaseException as error:
            raise_placed(error, self._plan)
        self._items[k] = None  # the group does not keep what was given
        self._k += 1
        return item

    def close(self) -> None:
        """Let the windows go."""
        self._windows.close()

    def make_ahead(self) -> None:
        """Have the next items made, where they would else be made when they are taken."""
        self._at_work = True
        first = max(self._ahead_to, self._k)
        if self._pool is None or first - self._k > LEAST_AHEAD:
            return
        self._ahead_to = first + MADE_AHEAD
        self._make(self._items, self._places[first : self._ahead_to])
        count = len(self._places)
        if self._ahead_to > count:  # on into the next group, if it is there
            if not self._tickets or self._tickets[0][1].value is None:
                self._ahead_to = count
                return
            group, ticket = self._tickets[0]
            places = group.places[max(0, first - count) : self._ahead_to - count]
            self._make(ticket.value, places)

    def _make(self, items: MutableSequence[Any], places: Sequence[int]) -> None:
        """Have the pool make items that wait for that."""
        if places and self._pool is not None and isinstance(items, LazyBatches):
            self._pool.submit(partial(_make_items, items, places), Urgency.ITEMS)

    def cursor_text(self, shard: int) -> str:
        """Nothing: where a shard stands follows from m."""
        return ""

    # Groups

    def _next_group(self, m: int) -> None:
        self.work_ahead(m)
        group, ticket = self._tickets[0]
        try:
            items = ticket.result() if self._pool is None else self._pool.result(ticket)
        except BaseException as error:
            self._start_again()
            if len(group.ms) > 1 and is_about_a_row(error):
                # Made one by one, the one that fails is raised when it is due.
                self._singly, self._failed = len(group.ms), error
                return
            self._failed = None
            raise_placed(error, self._plan)
        if self._singly == 1 and self._failed is not None:
            # It did not come again, and is raised all the same.
            failed, self._failed = self._failed, None
            self._start_again()
            raise_placed(failed, self._plan)
        self._singly = max(0, self._singly - 1)
        self._tickets.popleft()
        self._was_at_work, self._at_work = self._at_work, False
        self._ahead_to = max(0, self._ahead_to - len(self._places))
        self._items, self._places, self._k = items, group.places, 0
        self.work_ahead(m)

    def _start_again(self) -> None:
        """Forget what is in work: asked again, it is made again, and no row is lost."""
        self._join_beginning()
        self._tickets.clear()
        self._upcoming = None

    def work_ahead(self, m: int) -> None:
        """Have the next groups in work, from batch ``m`` on if none is."""
        most = 1 if self._singly else max(1, self._in_work)
        while len(self._tickets) < most:
            if self._beginning is not None:
                if self._tickets and not self._beginning.done:
                    return  # there is something to go on with
                self._join_beginning()
                continue
            if self._upcoming is None:
                self._upcoming = m
            if self._upcoming >= self._turns.end:
                return
            if self._pool is None or not self._was_at_work or not self._tickets:
                self._tickets.append(self._begin(self._upcoming))
                continue
            # A reference to these items would be a cycle.
            begin = partial(_begin_of, ref(self), self._upcoming)
            self._beginning = self._pool.submit(begin, Urgency.ITEMS)

    def _join_beginning(self) -> None:
        """Wait until the pool has begun with the group that it begins with."""
        if self._beginning is not None and self._pool is not None:
            ticket, self._beginning = self._beginning, None
            self._tickets.append(self._pool.result(ticket))

    def _begin(self, m: int) -> tuple[Group, Ticket]:
        """The next group, and what makes its items."""
        count = 1 if self._singly else self._count
        try:
            group = self._group(self._turns.after(m, count))
        except Exception as error:  # raised when it is due
            self._upcoming = m + self._turns.stride
            return Group(np.array([m]), [], [], np.array([0])), Ticket(partial(fail, error))
        self._upcoming = int(group.ms[-1]) + self._turns.stride
        if not self._singly:
            self._count = min(2 * count, self._most)
        # The maker's methods: what waits in a ticket must not hold these items, which hold the ticket.
        make = partial(self._maker.lazy_items if self._when_taken else self._maker.items, group)
        light = self._shares and not self._was_at_work and self._maker.seconds < LIGHT
        if self._pool is not None and not light:
            # Where windows are not read by the pool, they are read with the group.
            is_ready = None if self._readers is None else group.is_ready
            return group, self._pool.submit(make, is_ready=is_ready)
        return group, Ticket(self._maker.submit(group) if self._maker.has_workers else make)

    # Where rows stand

    def _group(self, ms: IntArray) -> Group:
        """The rows of some batches, those of the first one's epoch."""
        plan = self._plan
        first = self._first_epoch
        epoch = plan.counts.epoch_of(int(ms[0]), first)
        shift = plan.counts.shift(epoch, first)
        if plan.chain.goes_on(epoch, first) and not plan.chain.rolling:
            ms = ms[ms < plan.counts.epoch_start(epoch + 1, first)]
        layout = plan.layouts.of(epoch)
        assert isinstance(layout, Layout)
        numbers = ms + shift
        spans, chunks = numbers % layout.num_spans, numbers // layout.num_spans
        order = np.argsort(spans, kind="stable")
        places = np.empty(len(ms), dtype=np.int64)
        places[order] = np.arange(len(ms))
        parts: list[tuple[Window, IntArray]] = []
        sizes: list[IntArray] = []
        for span in np.unique(spans).tolist():
            rows, lengths = self._rows(layout, span, chunks[spans == span])
            sizes.append(lengths)
            user = (span - shift) % layout.num_spans  # which it is in all epochs
            parts += self._parts(layout, user, epoch, span, rows)
        bounds = np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)
        return Group(ms, places.tolist(), parts, bounds)

    def _rows(self, layout: Layout, span: int, chunks: IntArray) -> tuple[IntArray, IntArray]:
        """Rows of a span, counted from its first, that some batches of it have, and how many each."""
        start, stop = layout.span(span)
        rows = stop - start
        if self._plan.chain.rolling:
            rows *= self._plan.chain.times or 1 << 40
        firsts = layout.chunk_rows_of(span, chunks)
        ends = np.minimum(layout.chunk_rows_of(span, chunks + 1), rows)
        if (firsts[1:] == ends[:-1]).all():
            return np.arange(firsts[0], ends[-1], dtype=np.int64), ends - firsts
        each = [np.arange(a, b, dtype=np.int64) for a, b in zip(firsts, ends, strict=True)]
        return np.concatenate(each), ends - firsts

    def _parts(
        self, layout: Layout, user: int, epoch: int, span: int, rows: IntArray
    ) -> list[tuple[Window, IntArray]]:
        """The windows that hold rows of a span, ascending, and their positions in them."""
        start, stop = layout.span(span)
        parts = []
        while len(rows):
            passed = int(rows[0]) // (stop - start)  # epochs, where rows roll on
            base = passed * (stop - start)
            number = layout.window_of(span, int(rows[0]) - base)
            low, high = layout.window(span, number)
            count = int(np.searchsorted(rows, base + high))
            needed = int(rows[0]) - base - low
            key = WindowKey(epoch + passed, span, number)
            window = self._windows.get(user, key, {}, needed)
            assert window is not None
            if self._readers is not None:
                window.read_in(self._readers)
            parts.append((window, rows[:count] - (base + low)))
            rows = rows[count:]
        return parts


def _begin_of(items: ref[CountedItems], m: int) -> tuple[Group, Ticket]:
    """Begin with a group, in the pool."""
    found = items()
    if found is None:
        raise RuntimeError("a group was asked for whose pass is over")
    return found._begin(m)


def _make_items(items: MutableSequence[Any], places: Sequence[int]) -> None:
    """Make items that wait for that; those that have been taken are passed over."""
    for place in places:
        items[place]
