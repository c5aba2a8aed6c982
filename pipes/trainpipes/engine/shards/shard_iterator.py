"""One shard, one item at a time, with its cursor: the general way, for pipelines that are not counted.

Called by the thread that iterates; a thread pool makes the next run while the one at hand is used.
"""

from __future__ import annotations

from collections.abc import Collection, MutableSequence
from functools import partial
from typing import Any

from trainpipes.columns.run import Run, Unroll
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.pool import Pool, Ticket
from trainpipes.engine.reading.windows import Windows
from trainpipes.engine.shards.opener import ShardOpener
from trainpipes.engine.shards.shard_runs import PlacedRun, ShardRuns, is_about_a_row, raise_placed
from trainpipes.errors import DataError
from trainpipes.kinds.source import MixedWindows
from trainpipes.state.cursor import cursor_text
from trainpipes.state.format import Position


class _Ended:
    def __repr__(self) -> str:
        return "ENDED"


#: What a shard gives past its last item.
ENDED: Any = _Ended()


class ShardIterator:
    """Items of one shard.

    Args:
        opener: of the process.
        shard: which shard.
        position: where the shards start.
        pool: makes the next run ahead of its use; None to make it when it is asked for.
        unroll: gives the items of a run.
    """

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
        self._ticket: Ticket | None = None

    def take(self) -> Any:
        """The shard's next item; ENDED if there is none, and then ever after."""
        while self._run is None or self._k >= self._run.last:
            if self._ended:
                return ENDED
            self._next_run()
        try:
            item = self._items[self._k]
        except BaseException as error:
            raise_placed(error, self._opener.plan)
        self._items[self._k] = None  # the run does not keep what was handed over
        self._k += 1
        self._delivered += 1
        return item

    def _next_run(self) -> None:
        self.work_ahead()
        ticket, self._ticket = self._ticket, None
        assert ticket is not None
        try:
            found = ticket.result() if self._pool is None else self._pool.result(ticket)
        except BaseException as error:
            self._start_again(error)
            return
        if found is None:
            self._start, self._run, self._ended = self._runs.cursor(), None, True
            return
        self._run, self._items = found
        self._k = self._run.first
        if self._pool is not None:
            self.work_ahead()

    def work_ahead(self) -> None:
        """Have the next run in work, or ready, beside the one at hand."""
        if self._ticket is None and not self._ended:
            make = partial(_next_run, self._runs, self._unroll)  # a method would make a cycle
            self._ticket = Ticket(make) if self._pool is None else self._pool.submit(make)

    def _start_again(self, error: BaseException) -> None:
        """Go back to where the items that were given end, and raise, unless smaller runs may put the error
        where it is due. Asked again, it fails again, and no row is lost."""
        ours = is_about_a_row(error) and not self._opener.plan.runs_user_code
        again = ours and not self._runs.singly and self._opener.divisible
        self._runs = ShardRuns(
            self._opener, self._shard, self._number, self._position(), singly=again
        )
        if again:
            return
        raise_placed(error, self._opener.plan)

    def _position(self) -> dict[str, Any]:
        return dict(self._start) if self._run is None else self._run.cursor(self._k)

    def cursor(self) -> dict[str, Any]:
        """Where the next item starts, as plain JSON types."""
        position = self._position()
        at = position.pop("at")
        cursor = {**position, "delivered": self._delivered, "at": at}
        if self._ended:
            cursor["ended"] = True
        return cursor

    def cursor_text(self) -> str:
        """``cursor`` as it stands in a state."""
        try:
            return cursor_text(self.cursor(), self._shard, self._opener.plan.tag, self._number)
        except TypeError as error:
            raise DataError(
                f"a position is kept as JSON, and a node below gave a state that JSON cannot hold: {error}"
            ) from error


def _next_run(runs: ShardRuns, unroll: Unroll) -> tuple[PlacedRun, MutableSequence[Any]] | None:
    """The next run's items, and where they stand; its rows are let go. None at the end."""
    found = runs.next()
    return None if found is None else (found[0], unroll(found[1]))


class ShardItems:
    """The items of several shards of one process.

    Args:
        plan: the pipeline's.
        position: where they start.
        shards: which they are.
        windows: shared by them.
        pool: makes runs ahead of their use; None to make them when they are asked for.
        unroll: gives the items of a run.
    """

    def __init__(
        self,
        plan: Plan,
        position: Position,
        shards: Collection[int],
        windows: Windows | MixedWindows,
        pool: Pool | None,
        unroll: Unroll = Run.unroll,
    ) -> None:
        self._plan = plan
        self._position = position
        self._opener = ShardOpener(plan, windows, len(shards))
        self._pool = pool
        self._unroll = unroll
        self._iterators: dict[int, ShardIterator] = {}

    def take(self, m: int) -> Any:
        """Batch ``m``, or ENDED if its shard has no more."""
        return self._of(m % self._plan.chain.num_shards).take()

    def work_ahead(self, m: int) -> None:
        """Have a shard's next run in work: that of batch ``m``."""
        found = self._of(m % self._plan.chain.num_shards)
        if self._pool is not None:
            found.work_ahead()

    def close(self) -> None:
        """Let the windows go."""
        self._opener.windows.close()

    def make_ahead(self) -> None:
        """Nothing: items are made with their run."""

    def cursor_text(self, shard: int) -> str:
        """Where a shard's next item starts, as it stands in a state."""
        return self._of(shard).cursor_text()

    def _of(self, shard: int) -> ShardIterator:
        found = self._iterators.get(shard)
        if found is None:
            found = self._iterators[shard] = ShardIterator(
                self._opener, shard, self._position, self._pool, self._unroll
            )
        return found
