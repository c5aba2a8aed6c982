from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeGuard

from trainpipes.columns.run import Cursors, Run, innermost
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.shards.shard_opener import ShardOpener
from trainpipes.engine.shards.shard_rows import end_epoch
from trainpipes.errors import TrainpipesError
from trainpipes.kinds.empty_epoch_guard import EmptyEpochGuard
from trainpipes.kinds.source import Place
from trainpipes.kinds.stage_kinds import RAISED_STOP, OpenChain


@dataclass(frozen=True)
class PlacedRun:
    """Items ``first`` to ``last`` of a run, with the shard's position at each, without the rows.
    ``at``: batches of the epoch's slot before ``first``."""

    cursors: Cursors
    first: int
    last: int
    at: int

    def cursor(self, k: int) -> dict[str, Any]:
        return {**self.cursors.state(k), "at": self.at + k - self.first}


class ShardRuns:
    """The runs of one shard, epoch after epoch; as small as can be if ``singly``. Called by one
    thread at a time."""

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
        self._skip, self._until = plan.counts.chunks(slot, epoch)
        if cursor is None:
            # Without counts, items to skip are made and dropped.
            at = self._skip if plan.counted else 0
            cursor = {**plan.counts.start(slot, epoch, at), "at": at}
            stream = self._opener.windows.start(epoch)
            if stream:
                cursor["stream"] = stream
        self._start = cursor
        self._at = int(cursor["at"])  # batches of the slot before the next run
        self._placed: PlacedRun | None = None  # the last run of the epoch
        self._opened: OpenChain | None = None
        # Keeps the windows that this shard needs.
        self._opener.expect(self._shard, self._first_epoch, cursor)

    def cursor(self) -> dict[str, Any]:
        return dict(self._start) if self._placed is None else self._placed.cursor(self._placed.last)

    def next(self) -> tuple[PlacedRun, Run] | None:
        """The next run with something to give, and its place; None at the end, and then ever
        after."""
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
            self._open().begin()

    @property
    def _is_over(self) -> bool:
        return self._until is not None and self._at >= self._until

    def _next_run(self) -> Run | None:
        if self._is_over:
            return None
        try:
            return self._open().next_run()
        except StopIteration:
            return None

    def _open(self) -> OpenChain:
        if self._opened is None:
            state = {key: value for key, value in self._start.items() if key != "at"}
            self._opened = self._opener.open(self._shard, state, self._first_epoch, self.singly)
        return self._opened


def is_about_a_row(error: BaseException) -> TypeGuard[Exception]:
    """Whether a stage said which row an error is about: earlier rows may still come before it."""
    return getattr(error, "_trainpipes", (None, None))[1] is not None


def raise_placed(error: BaseException, plan: Plan) -> NoReturn:
    if isinstance(error, StopIteration):
        raise RuntimeError(RAISED_STOP) from error
    if isinstance(error, Exception):
        say_where(error, plan)
    raise error


def say_where(error: Exception, plan: Plan) -> None:
    if not hasattr(error, "_trainpipes"):
        return
    stage, row = error._trainpipes
    place = Place() if row is None else _own_place(error, plan.inputs.place_of(row))
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


def _own_place(error: Exception, place: Place) -> Place:
    """The place that the error gives: of a row in its own pipeline, where several are read as
    one."""
    own: Place | None = getattr(error, "_place", None)
    return place if own is None else replace(own, source=place.source)
