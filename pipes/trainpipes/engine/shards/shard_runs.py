"""The runs of one shard, epoch after epoch, and the items of them, with the shard's cursor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from trainpipes._internal.pool import Pool
from trainpipes.columns.lazy_batches import LazyBatches
from trainpipes.columns.run import Cursors, Run, Unroll, innermost
from trainpipes.engine.planning.error_places import say_where
from trainpipes.engine.planning.open_stages import RAISED_STOP, Submitted
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.shards.shard_rows import ShardOpener, end_epoch
from trainpipes.errors import DataError
from trainpipes.interfaces.blame import is_about_a_row
from trainpipes.interfaces.empty_epoch_guard import EmptyEpochGuard
from trainpipes.state.cursor import cursor_text
from trainpipes.state.format import Position

#: What a shard gives past its last item.
ENDED: Any = object()


@dataclass(frozen=True)
class PlacedRun:
    """Items ``first`` to ``last`` of a run, with the shard's position at each. ``at``: batches of the
    epoch's slot before ``first``.
    """

    cursors: Cursors
    first: int
    last: int
    at: int

    def cursor(self, k: int) -> dict[str, Any]:
        return {**self.cursors.state(k), "at": self.at + k - self.first}


class ShardRuns:
    """The runs of one shard, epoch after epoch; as small as can be if ``singly``. For one thread at
    a time.
    """

    def __init__(
        self,
        opener: ShardOpener,
        shard: int,
        number: int,
        cursor: dict[str, Any] | None,
        singly: bool = False,
    ) -> None:
        self._opener = opener
        self._plan = plan = opener.plan
        self._shard = shard
        self.singly = singly
        self._first_epoch = first = plan.chain.first_epoch(number)
        endless = plan.chain.endless and not plan.counts.known
        self._guard = EmptyEpochGuard(endless, gave=cursor is not None)
        starts = cursor is None or plan.chain.rolling
        self._enter(first if starts else innermost(cursor or {})["epoch"], cursor)

    def _enter(self, epoch: int, cursor: dict[str, Any] | None = None) -> None:
        plan, self.epoch = self._plan, epoch
        slot = plan.counts.slot(self._shard, epoch, self._first_epoch)
        self._skip, self._until = plan.counts.chunks(slot)
        if cursor is None:
            # Without counts, items to skip are made and dropped.
            at = self._skip if plan.counted else 0
            cursor = {**plan.counts.start(slot, at), "at": at}
            stream = self._opener.windows.start(epoch)
            if stream:
                cursor["stream"] = stream
        self._start = cursor
        self._at = int(cursor["at"])  # batches of the slot before the next run
        self._placed: PlacedRun | None = None  # the last run of the epoch
        self._opened: tuple[Iterator[Run], Submitted | None] | None = None
        # Keeps the windows that this shard needs.
        self._opener.expect(self._shard, self._first_epoch, cursor)

    def cursor(self) -> dict[str, Any]:
        return dict(self._start) if self._placed is None else self._placed.cursor(self._placed.last)

    def next(self) -> tuple[PlacedRun, Run] | None:
        """The next run with something to give, and its place; None at the end."""
        chain = self._plan.chain
        while True:
            run = self._next_run()
            if run is not None:
                before = self._at
                first = min(max(0, self._skip - before), len(run))
                last = len(run) if self._until is None else min(len(run), self._until - before)
                self._at = before + last
                self._placed = PlacedRun(run.cursors, first, last, before + first)
                if first < last:
                    self._guard.gave()
                    return self._placed, run
            elif chain.rolling or not chain.goes_on(self.epoch, self._first_epoch):
                return None
            else:
                layout = self._plan.layouts.of(self.epoch)
                end_epoch(self._guard, layout, self._shard, self.epoch)
                self._enter(self.epoch + 1)

    def begin(self) -> None:
        if self._opener.has_workers and not self._is_over:
            _, submitted = self._open()
            if submitted is not None:
                submitted.begin()

    @property
    def _is_over(self) -> bool:
        return self._until is not None and self._at >= self._until

    def _next_run(self) -> Run | None:
        if self._is_over:
            return None
        runs, _ = self._open()
        return next(runs, None)

    def _open(self) -> tuple[Iterator[Run], Submitted | None]:
        if self._opened is None:
            state = {key: value for key, value in self._start.items() if key != "at"}
            self._opened = self._opener.open(self._shard, state, self._first_epoch, self.singly)
        return self._opened


class ShardIterator:
    """Items of one shard, or of a lane of it. ``pool`` makes the next run ahead."""

    def __init__(
        self,
        opener: ShardOpener,
        shard: int,
        position: Position,
        pool: Pool | None,
        unroll: Unroll,
    ) -> None:
        self._opener = opener
        self._shard = shard
        self._number = position.epoch
        self._pool = pool
        self._unroll = unroll
        below = dict(opener.plan.counts.cursor(position, shard) or {})
        self._delivered = int(below.pop("delivered", 0))
        self._ended = bool(below.pop("ended", False))
        self._runs = ShardRuns(opener, shard, position.epoch, below or None)
        self._start = self._runs.cursor()  # where it stands while it has no run
        self._run: PlacedRun | None = None
        self._items: MutableSequence[Any] = []
        self._k = 0
        #: Items left of the run.
        self.left = 0
        #: Gives the next run once it is in work.
        self._result: Callable[[], tuple[PlacedRun, MutableSequence[Any]] | None] | None = None

    def late(self, ahead: int) -> list[tuple[LazyBatches, int]]:
        """The item after so many others, if it is made only when it is taken."""
        if ahead < self.left and isinstance(self._items, LazyBatches):
            return [(self._items, self._k + ahead)]
        return []

    def take(self) -> Any:
        """The next item; ENDED if there is none, and then ever after."""
        while not self.left:
            if self._ended:
                return ENDED
            self._next_run()
        try:
            item = self._items[self._k]
        except BaseException as error:
            raise_placed(error, self._opener.plan)
        self._items[self._k] = None  # free its memory
        self._k += 1
        self.left -= 1
        self._delivered += 1
        return item

    def _next_run(self) -> None:
        self.work_ahead()
        result, self._result = self._result, None
        assert result is not None
        try:
            found = result()
        except BaseException as error:
            self._start_again(error)
            return
        if found is None:
            self._start, self._run, self._ended = self._runs.cursor(), None, True
            return
        self._run, self._items = found
        self._k = self._run.first
        self.left = self._run.last - self._k

    def work_ahead(self) -> None:
        if self._result is None and not self._ended:
            # A method would make a cycle.
            self._result = partial(_next_run, self._runs, self._unroll)
            if self._pool is None:
                self._runs.begin()
            else:
                self._result = partial(self._pool.result, self._pool.submit(self._result))

    def _start_again(self, error: BaseException) -> None:
        """Go back to the last item given, and raise, unless smaller runs may put the error where it
        is due. No row is lost.
        """
        ours = is_about_a_row(error) and not self._opener.plan.runs_user_code
        again = ours and not self._runs.singly and self._opener.divisible
        start = self._position()
        self._runs = ShardRuns(self._opener, self._shard, self._number, start, singly=again)
        if again:
            return
        raise_placed(error, self._opener.plan)

    def _position(self) -> dict[str, Any]:
        return dict(self._start) if self._run is None else self._run.cursor(self._k)

    def cursor(self) -> dict[str, Any]:
        position = self._position()
        at = position.pop("at")
        cursor = {**position, "delivered": self._delivered, "at": at}
        if self._ended:
            cursor["ended"] = True
        return cursor

    def cursor_text(self) -> str:
        try:
            return cursor_text(self.cursor(), self._shard, self._opener.plan.tag, self._number)
        except TypeError as error:
            raise DataError(
                f"a position is kept as JSON, and a node below gave a state that JSON cannot hold: {error}"
            ) from error


def _next_run(runs: ShardRuns, unroll: Unroll) -> tuple[PlacedRun, MutableSequence[Any]] | None:
    found = runs.next()
    return None if found is None else (found[0], unroll(found[1]))


def raise_placed(error: BaseException, plan: Plan) -> NoReturn:
    if isinstance(error, StopIteration):
        raise RuntimeError(RAISED_STOP) from error
    if isinstance(error, Exception):
        say_where(error, plan)
    raise error
