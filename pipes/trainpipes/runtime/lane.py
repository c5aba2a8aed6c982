"""One shard: its chain of stages, epoch after epoch, one item at a time, and its cursor."""

from __future__ import annotations

import json
from typing import Any

from trainpipes.errors import DataError, StateError, TrainpipesError
from trainpipes.order import Layout
from trainpipes.runtime.drought import Drought
from trainpipes.runtime.plan import Plan
from trainpipes.runtime.run import Run, RunSource, innermost
from trainpipes.runtime.source import Place
from trainpipes.runtime.windows import Windows
from trainpipes.state import Position, shard_key

__all__ = ["ENDED", "Lane", "check_places"]


class _Ended:
    def __repr__(self) -> str:
        return "ENDED"


#: What a lane gives past its last item.
ENDED: Any = _Ended()


class Lane:
    """Items of one shard.

    Args:
        plan: the pipeline's.
        windows: shared by the lanes of one process.
        shard: which shard.
        number: of the pass.
        cursor: where to start, as ``cursor`` gave it; None for the pass's start.
    """

    def __init__(
        self, plan: Plan, windows: Windows, shard: int, number: int, cursor: dict[str, Any] | None
    ) -> None:
        self._plan = plan
        self._windows = windows
        self._shard = shard
        self._first_epoch = plan.first_epoch(number)
        self._epoch = self._first_epoch
        self._chain: RunSource | None = None
        self._run: Run | None = None
        self._items: list[Any] = []
        self._k = 0
        self._at = 0  # micro-batches of this epoch's slot passed
        self._until: int | None = None
        self._slot = 0
        self.delivered = 0
        self.ended = False
        self._drought = Drought(plan.endless and not plan.known, wet=cursor is not None)
        if cursor is None:
            self._enter(self._epoch)
            return
        below = dict(cursor)
        self.delivered = int(below.pop("delivered"))
        self.ended = bool(below.pop("ended", False))
        at = int(below.pop("at"))
        self._epoch = self._first_epoch if plan.rolling else innermost(below)["epoch"]
        self._slot = plan.slot(shard, self._epoch, self._first_epoch)
        self._until = plan.chunks(self._slot)[1]
        self._at = at
        self._state: dict[str, Any] = below
        self._expect()

    def _enter(self, epoch: int) -> None:
        """Stand before the first item of an epoch."""
        plan = self._plan
        self._epoch = epoch
        self._slot = plan.slot(self._shard, epoch, self._first_epoch)
        skip, self._until = plan.chunks(self._slot)
        self._chain = self._run = None
        if skip and plan.seekable:
            self._state, self._at = plan.start(self._slot, epoch, skip), skip
            self._expect()
            return
        self._state, self._at = plan.start(self._slot, epoch, 0), 0
        stream = self._windows.start(epoch)
        if stream:
            self._state["stream"] = stream
        self._expect()
        for _ in range(skip):  # counts are not known: pass over items as they come
            if self._pull() is ENDED:
                break

    def _expect(self) -> None:
        """Keep the windows that this shard needs until it comes to them."""
        place = innermost(self._state)
        span = self._slot % self._plan.layout.num_spans
        self._windows.expect(self._shard, place["epoch"], span, place["window"])

    def next(self) -> Any:
        """The next item, or ENDED, and then ever after."""
        while not self.ended:
            item = self._pull()
            if item is not ENDED:
                self.delivered += 1
                self._drought.broken()
                return item
            plan = self._plan
            if plan.rolling or plan.repeat is None or self._epoch_is_last():
                self.ended = True
                break
            if self._drought.next_epoch(plan.layout_of(self._epoch)):
                raise DataError(
                    f"repeat() goes on for ever only where each shard gets rows: shard "
                    f"{self._shard} of {plan.num_shards} got none up to epoch {self._epoch}; lower "
                    "num_shards in sharding_filter(), or check the filter"
                )
            self._enter(self._epoch + 1)
        return ENDED

    def _epoch_is_last(self) -> bool:
        times = self._plan.times
        return times is not None and self._epoch == self._first_epoch + times - 1

    def _pull(self) -> Any:
        if self._until is not None and self._at >= self._until:
            return ENDED
        if self._run is None or self._k == len(self._run):
            if self._chain is None:
                self._chain = self._plan.chain(
                    self._windows, self._shard, self._slot, self._state, self._first_epoch
                )
            try:
                self._run = self._chain.next_run()
            except StopIteration:
                return ENDED
            except Exception as error:
                self._state = self._place()  # asked again, it fails again, and no row is lost
                self._chain = self._run = None
                say_where(error, self._plan)
                raise
            self._items = self._run.unroll()
            self._k = 0
        item = self._items[self._k]
        self._items[self._k] = None  # the run does not keep what was handed over
        self._k += 1
        self._at += 1
        return item

    def _place(self) -> dict[str, Any]:
        return self._state if self._run is None else self._run.cursors.state(self._k)

    def cursor(self) -> dict[str, Any]:
        """Where the next item starts, as plain JSON types."""
        cursor = {**self._place(), "delivered": self.delivered, "at": self._at}
        if self.ended:
            cursor["ended"] = True
        return cursor

    def cursor_text(self) -> str:
        """``cursor`` as compact JSON."""
        try:
            return json.dumps(self.cursor(), separators=(",", ":"))
        except TypeError as error:
            raise DataError(
                f"a position is kept as JSON, and a node below gave a state that JSON cannot hold: {error}"
            ) from error


def say_where(error: Exception, plan: Plan) -> None:
    """Add to an error that a stage marked with a row: which stage, and where the row stands."""
    stage, row = getattr(error, "_trainpipes", (None, None))
    if stage is None:
        return
    place = Place() if row is None else plan.place_of(row)
    if isinstance(error, TrainpipesError):
        error.path = error.path or place.path
        error.row_group = place.row_group if error.row_group is None else error.row_group
        error.row = place.row if error.row is None else error.row
        error.stage = error.stage or stage
        if row is not None:
            error.message = f"{error.message} (at {place})"
    else:
        error.add_note(f"raised in {stage}" + ("" if row is None else f" at {place}"))
    del error._trainpipes  # type: ignore[attr-defined]


def check_places(plan: Plan, position: Position) -> None:
    """Raise unless the cursors of a state point to where its micro-batches have led, as far as that
    can be told.

    Raises:
        StateError: one does not; it was edited or is damaged.
    """
    first = plan.first_epoch(position.epoch)
    for shard, cursor in position.cursors.items():
        below = innermost(cursor)
        good = below["epoch"] >= first
        if plan.times is not None:
            good = good and below["epoch"] < first + plan.times
        layout = plan.layout_of(below["epoch"]) if good else plan.layout
        if plan.seekable:
            led = (
                plan.cursor_at(position.m, shard, position.epoch, onward)
                for onward in (False, True)
            )
            good = any(place.items() <= cursor.items() for place in led)
        elif isinstance(layout, Layout):
            span = plan.slot(shard, first, first) % layout.num_spans
            windows = layout.num_windows(span)
            good = good and below["window"] <= max(windows, 1)
        if not good:
            raise StateError(
                f"{shard_key(shard)}: {json.dumps(cursor)} is not where {cursor['delivered']} micro-batches "
                f"of pass {position.epoch} have led; the state was edited or is damaged: load it as "
                "it was saved"
            )
