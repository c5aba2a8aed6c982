from __future__ import annotations

from collections.abc import Callable, MutableSequence
from functools import partial
from typing import Any

from trainpipes.columns.lazy_batches import LazyBatches
from trainpipes.columns.run import Unroll
from trainpipes.engine.pool import Pool
from trainpipes.engine.shards.shard_opener import ShardOpener
from trainpipes.engine.shards.shard_runs import PlacedRun, ShardRuns, is_about_a_row, raise_placed
from trainpipes.errors import DataError
from trainpipes.state.cursor import cursor_text
from trainpipes.state.format import Position


class _Ended:
    def __repr__(self) -> str:
        return "ENDED"


#: What a shard gives past its last item.
ENDED: Any = _Ended()


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
        #: Gives the next run once it is in work.
        self._result: Callable[[], tuple[PlacedRun, MutableSequence[Any]] | None] | None = None

    @property
    def left(self) -> int:
        return 0 if self._run is None else self._run.last - self._k

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

    def work_ahead(self) -> None:
        if self._result is None and not self._ended:
            self._result = partial(
                _next_run, self._runs, self._unroll
            )  # a method would make a cycle
            if self._pool is None:
                self._runs.begin()
            else:
                self._result = partial(self._pool.result, self._pool.submit(self._result))

    def _start_again(self, error: BaseException) -> None:
        """Go back to the last item given, and raise, unless smaller runs may put the error where it
        is due: no row is lost."""
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
