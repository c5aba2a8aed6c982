"""One shard: its chain of stages, epoch after epoch, one item at a time, and its cursor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableSequence
from functools import partial
from typing import Any, NoReturn

from trainpipes.cursor import cursor_text
from trainpipes.errors import DataError, TrainpipesError
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.pool import Pool, Ticket
from trainpipes.runtime.rows.late_items import LateItems
from trainpipes.runtime.shards.chains import Chains
from trainpipes.runtime.shards.making import Made, Maker, finish, hand_over, make
from trainpipes.runtime.source import Place

__all__ = ["ENDED", "Lane"]


class _Ended:
    def __repr__(self) -> str:
        return "ENDED"


#: What a lane gives past its last item.
ENDED: Any = _Ended()


class Lane:
    """Items of one shard.

    Args:
        chains: of the process.
        shard: which shard.
        number: of the pass.
        cursor: where to start, as ``cursor`` gave it; None for the pass's start.
        pool: works ahead; None to do all when it is asked for, but for what a stage's workers do.
        ahead: runs to be made ahead.
    """

    def __init__(
        self,
        chains: Chains,
        shard: int,
        number: int,
        cursor: dict[str, Any] | None,
        pool: Pool | None = None,
        ahead: int = 0,
    ) -> None:
        self._chains = chains
        self._shard = shard
        self._number = number
        self._pool = pool
        # Runs that are not settled beforehand must be made one after the other.
        self._ahead = ahead if chains.lazy else min(1, ahead)
        below = dict(cursor or {})
        self.delivered = int(below.pop("delivered", 0))
        self.ended = bool(below.pop("ended", False))
        self._maker = Maker(chains, shard, number, None if cursor is None else below)
        self._made = Made(None, 0, 0, self._maker.at, self._maker.state)
        self._items: MutableSequence[Any] = []
        self._k = 0
        self._tickets: deque[Ticket] = deque()
        self._settled = False  # that there are no more runs

    def next(self) -> Any:
        """The next item, or ENDED, and then ever after."""
        while self._k >= self._made.last:
            if self.ended:
                return ENDED
            self._next_run()
        item = self._items[self._k]
        self._items[self._k] = None  # the run does not keep what was handed over
        self._k += 1
        self.delivered += 1
        return item

    def upcoming(self, turn: int) -> tuple[LateItems, int] | None:
        """Where the item after so many others lies, if it is there and is made when it is taken."""
        items, k = self._items, self._k + turn
        if k >= self._made.last and self._tickets and self._tickets[0].done:
            over = k - self._made.last
            made, items = self._tickets[0].value or (self._made, [])
            k = made.first + over if over < made.last - made.first else len(items)
        return (items, k) if isinstance(items, LateItems) and k < len(items) else None

    def _next_run(self) -> None:
        self.work_ahead(1)
        ticket = self._tickets[0]
        try:
            made, items = ticket.result() if self._pool is None else self._pool.result(ticket)
        except BaseException as error:
            self._start_again()  # asked again, it fails again, and no row is lost
            if isinstance(error, StopIteration):
                raise RuntimeError(
                    "a function that was called for rows raised StopIteration"
                ) from error
            if isinstance(error, Exception):
                say_where(error, self._chains.plan)
            raise
        self._tickets.popleft()
        self._made, self._items = made, items
        self._k = self._made.first
        self.ended = self._made.run is None
        self._settled = self._settled or self.ended
        self.work_ahead(self._ahead)

    def work_ahead(self, runs: int) -> None:
        """Have as many runs in work, or ready, beside the one at hand."""
        while len(self._tickets) < runs and not self._settled:
            self._tickets.append(self._order())

    def _order(self) -> Ticket:
        """The next run, ordered."""
        # In the order in which they are asked for, or a window is held for a shard that lags behind.
        if not self._chains.lazy:
            return self._submit(partial(make, self._maker))
        try:
            made = self._maker.next()
            if self._pool is None and self._ahead and self._chains.has_workers:
                work = hand_over(self._chains, made)
            else:
                work = partial(finish, self._chains, made)
        except Exception as error:
            self._settled = True
            return Ticket(partial(fail, error))
        self._settled = made.run is None
        return self._submit(work)

    def _submit(self, work: Callable[[], Any]) -> Ticket:
        return Ticket(work) if self._pool is None else self._pool.submit(work)

    def _start_again(self) -> None:
        """Go back to where the items that were given end."""
        self._tickets.clear()
        self._settled = False
        place = {**self._place(), "at": self._at()}
        self._maker = Maker(self._chains, self._shard, self._number, place)

    def _place(self) -> dict[str, Any]:
        return self._made.place(self._k)

    def _at(self) -> int:
        return self._made.at + self._k - self._made.first

    def cursor(self) -> dict[str, Any]:
        """Where the next item starts, as plain JSON types."""
        cursor = {**self._place(), "delivered": self.delivered, "at": self._at()}
        if self.ended:
            cursor["ended"] = True
        return cursor

    def cursor_text(self) -> str:
        """``cursor`` as it stands in a state; empty where the pipeline is counted, and none does."""
        if self._chains.plan.seekable:
            return ""
        try:
            return cursor_text(self.cursor(), self._shard, self._chains.plan.tag)
        except TypeError as error:
            raise DataError(
                f"a position is kept as JSON, and a node below gave a state that JSON cannot hold: {error}"
            ) from error


def fail(error: BaseException) -> NoReturn:
    """Raise what was raised when the next run was to be settled, now that it is due."""
    raise error


def say_where(error: Exception, plan: Plan) -> None:
    """Add to an error that a stage marked with a row: which stage, and where the row stands."""
    if not hasattr(error, "_trainpipes"):
        return
    stage, row = error._trainpipes
    place = Place() if row is None else plan.place_of(row)
    if isinstance(error, TrainpipesError):
        error.path = error.path or place.path
        error.row_group = place.row_group if error.row_group is None else error.row_group
        error.row = place.row if error.row is None else error.row
        error.stage = error.stage or stage
        error.source = error.source or place.source
        if row is not None:
            error.message = f"{error.message} (at {place})"
    else:
        error.add_note(f"raised in {stage}" + ("" if row is None else f" at {place}"))
    del error._trainpipes
