"""One shard of a mix, in stretches within which no source runs out of ready rows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from trainpipes._internal.checks import IntArray
from trainpipes._internal.messages import warn_once
from trainpipes.columns.run import Cursors, Run
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.shards.lane import Lane
from trainpipes.engine.shards.shard_rows import Shards
from trainpipes.errors import DataError, TrainpipesError
from trainpipes.interfaces.stage import Stage
from trainpipes.order.layout import slots_before
from trainpipes.sources import fair_queue
from trainpipes.sources.fair_queue import by_tokens

#: A source's cursor before so many more of its rows; None at the start of a pass.
CursorAfter = Callable[[int], "dict[str, Any] | None"]


class Shares(Protocol):
    """The order of the sources' rows; ``Mixture`` has it."""

    mix: Any
    names: tuple[str, ...]
    starts: list[int]
    steps: list[tuple[int, ...]]
    by_tokens: bool
    max_epochs: list[int | None]
    may_be_endless: list[bool]
    ids: Any

    def drawn_from(self, name: str, run: Run, above: Sequence[Stage]) -> tuple[Run, list[int]]: ...

    def with_names(self, run: Run, source: IntArray) -> Run: ...


class OpenedSources(Protocol):
    """The sources of a mix as they are read; ``MixWindows`` has them."""

    plan: Plan
    shards_of: dict[str, Shards]
    above: dict[str, list[Stage]]

    @property
    def mixture(self) -> Shares: ...


class SourceRows:
    """A source's ready items in a shard, and where the next stands. Whoever takes some updates
    ``left``.
    """

    def __init__(
        self,
        windows: OpenedSources,
        name: str,
        shard: int,
        epoch: int,
        cursor: dict[str, Any] | None,
    ) -> None:
        self.gone = bool((cursor or {}).get("gone"))
        self.left = self.passes = 0
        self._counted: int | None = None  # the pass whose rows have counted last
        self._mixture, self._name, self._start = windows.mixture, name, cursor
        self._above = windows.above[name]
        source_shards = windows.shards_of[name]
        self._first_epoch = source_shards.plan.chain.first_epoch(epoch)
        self._lane = None if self.gone else Lane(source_shards, shard, epoch, cursor)
        self._made: tuple[Cursors, int] | None = None  # of the run, and where it ends
        self._run: Run | None = None
        self._lengths: list[int] = []
        self._begin = 0  # of those items of the run that are taken and not given away yet
        self._pieces: list[Run] = []  # taken from runs before

    def fill(self) -> None:
        assert self._lane is not None
        self._put_by()
        try:
            upcoming = self._lane.next_run()
            assert upcoming is not None
            run, first, last = upcoming
            drawn, lengths = self._mixture.drawn_from(
                self._name, run.part(first, last), self._above
            )
        except Exception as error:
            self._tell_source(error)
            raise
        self._made = run.cursors, last
        self._run, self._lengths = drawn, lengths
        self.left, self._begin = last - first, 0
        self.passes = self._lane.epoch - self._first_epoch
        if self._counted is None or not lengths or any(lengths):
            self._counted = self.passes
        elif self.passes > self._counted + 1:
            raise DataError(
                f"{self._mixture.mix}: source {self._name!r} never gets its share, since a stage after the "
                'mix leaves out all of its rows, as pack(overflow="drop") does: leave the source out, or let '
                "longer rows pass"
            )

    @property
    def begins_again(self) -> bool:
        """Whether the next row is the first of the source's second pass."""
        if self._made is None or self._lane is None or self.passes != 1:
            return False
        cursors, last = self._made
        return (cursors.before or 0) + last - self.left <= self._lane.skipped

    def _tell_source(self, error: Exception) -> None:
        _, row = getattr(error, "_trainpipes", (None, None))
        said = f"in source {self._name!r} of a mix"
        if row is not None:
            self._mixture.ids.tell(self._name, error)
        elif isinstance(error, TrainpipesError):
            error.source = error.source or self._name
            error.message = f"{error.message} ({said})"
        else:
            error.add_note(said)

    @property
    def lengths(self) -> list[int]:
        return self._lengths[len(self._lengths) - self.left :]

    def taken(self) -> list[Run]:
        self._put_by()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _put_by(self) -> None:
        if self._run is not None:
            end = len(self._run) - self.left
            if end > self._begin:
                self._pieces.append(self._run.part(self._begin, end))
            self._begin = end

    def cursor_after(self) -> CursorAfter:
        start, gone = self._start, {"gone": True} if self.gone else {}
        if self._made is None:
            return lambda _: start
        cursors, last = self._made
        used = last - self.left
        return lambda count: {**cursors.state(used + count), **gone}


@dataclass(frozen=True, eq=False)
class Stretch:
    """Draws between which no source was read on, and the states within them."""

    names: tuple[str, ...]
    epoch: int
    row: int  # of the epoch: the first row's
    tokens: int  # drawn before it
    order: IntArray  # source of each row, int64
    lengths: IntArray | None  # tokens of each row, int64; None where rows are counted
    ahead: tuple[int, ...]  # how far each source is ahead before it
    weights: tuple[int, ...]
    cursors: list[CursorAfter]  # give for each source that after so many of its rows

    def at(self, row: int) -> dict[str, Any]:
        order, lengths = self.order[:row], None if self.lengths is None else self.lengths[:row]
        counts, units = (amounts(order, by, len(self.names)) for by in (None, lengths))
        state: dict[str, Any] = {"epoch": self.epoch, "window": 0, "row": self.row + row}
        if lengths is not None:
            state["tokens"] = self.tokens + sum(units)
        state["ahead"] = list(moved_on(self.ahead, self.weights, units))
        each = zip(self.names, self.cursors, counts, strict=True)
        cursors = ((name, after(count)) for name, after, count in each)
        state["sources"] = {name: cursor for name, cursor in cursors if cursor is not None}
        return state

    place = at


def moved_on(ahead: tuple[int, ...], weights: tuple[int, ...], units: list[int]) -> tuple[int, ...]:
    total, units_given = sum(weights), sum(units)
    return tuple(
        a + total * u - w * units_given for a, w, u in zip(ahead, weights, units, strict=True)
    )


def amounts(order: IntArray, lengths: IntArray | None, sources: int) -> list[int]:
    """Rows of each source, or the sums of their lengths."""
    totals: list[int] = np.bincount(order, lengths, sources).astype(np.int64).tolist()
    return totals


#: Passes over a source before a warning that another source has not ended.
MANY_PASSES = 100
#: Passes over a tiny source, before a warning that it slows the mix.
TINY_PASSES, FEW_ROWS = 1000, 8
#: Stretches of a run for each source. Where sources are small, runs are short, so that the next run comes
#: soon; with runs of a single stretch a row took 1.2 to 1.4 times as long.
STRETCHES = 4


class MixRuns(Iterator[Run]):
    """Runs of a shard of a mix. ``rows``: most rows in a run, and in the first run. ``weights``: in place
    of the mixture's.
    """

    def __init__(
        self,
        windows: OpenedSources,
        shard: int,
        state: dict[str, Any],
        rows: tuple[int, int],
        first: int,
        weights: tuple[int, ...] | None = None,
    ) -> None:
        self._windows, self._mixture, self._chain = windows, windows.mixture, windows.plan.chain
        self._shard, self._first_epoch = shard, first
        self._run_rows, self._next_rows = rows
        # Where the steps of the schedule begin, in this shard's own rows or tokens.
        shards, starts = self._chain.num_shards, self._mixture.starts
        self._steps = self._mixture.steps
        if weights is not None:
            starts, self._steps = [0], [weights]
        self._starts = [slots_before(start, shard, shards) for start in starts]
        if self._mixture.by_tokens:
            self._starts = [-(-start // shards) for start in starts]
        self._enter(int(state["epoch"]), state)

    def _enter(self, epoch: int, state: dict[str, Any]) -> None:
        self._epoch = epoch
        # Out of phase with other shards, and with this shard in other epochs unless all have the same order.
        turn = epoch if self._mixture.mix.traits.reorders else 0
        number = self._shard + turn * self._chain.num_shards
        self._phases = fair_queue.phases_of(number, len(self._mixture.names))
        self._row = int(state.get("row", 0))
        self._tokens = int(state.get("tokens", 0))
        self._ahead = tuple(state.get("ahead", (0,) * len(self._mixture.names)))
        self._order: fair_queue.RowOrder | None = None
        cursors = state.get("sources", {})
        self._parts = [
            SourceRows(self._windows, name, self._shard, epoch, cursors.get(name))
            for name in self._mixture.names
        ]

    def __next__(self) -> Run:
        chain = self._chain
        while True:
            run = self._draw()
            if run is not None:
                return run
            if not chain.rolling or not chain.goes_on(self._epoch, self._first_epoch):
                raise StopIteration
            if not self._row:
                raise DataError(
                    f"{self._mixture.mix}: an epoch of the mix gave shard {self._shard} nothing, since a "
                    "source has no row there: lower num_shards in sharding_filter(), or "
                    'mix(stop="all_exhausted")'
                )
            self._enter(self._epoch + 1, {"ahead": self._ahead})

    # Draws

    def _draw(self) -> Run | None:
        drawn, stretches = 0, list[Stretch]()
        while drawn < self._next_rows and len(stretches) < STRETCHES * len(self._parts):
            weights, ending = self._settle()
            if weights is None:
                break
            stretch = self._stretch(weights, self._next_rows - drawn, ending)
            if not len(stretch.order):
                break
            stretches.append(stretch)
            drawn += len(stretch.order)
        if not stretches:
            return None
        self._next_rows = self._run_rows
        orders = [stretch.order for stretch in stretches]
        which = np.repeat(np.arange(len(orders)), [len(order) for order in orders])
        rows = np.concatenate([*map(np.arange, map(len, orders)), [len(orders[-1])]])
        cursors = Cursors(tuple(stretches), np.append(which, len(orders) - 1), rows)
        return self._gather(np.concatenate(orders), cursors)

    def _stretch(self, weights: tuple[int, ...], rows: int, ending: Sequence[int]) -> Stretch:
        """Draws until a source has no row ready, the schedule's next step, or the end of an epoch that the
        sources ``ending`` end.
        """
        parts, place = self._parts, (self._epoch, self._row, self._tokens)
        ahead, cursors = self._ahead, [part.cursor_after() for part in parts]
        later = self._starts[self._step() + 1 :]
        lengths: IntArray | None = None
        if not self._mixture.by_tokens:
            most = min([rows, *(start - self._row for start in later[:1])])
            if self._order is None or self._order.of != weights:
                self._order = fair_queue.RowOrder(weights, ahead, self._phases)
            order = self._order.take([part.left for part in parts], most)
        else:
            ready = [part.lengths for part in parts]
            until = later[0] - self._tokens if later else None
            order = by_tokens(weights, ahead, self._first(weights), ready, rows, until)
            lengths = np.empty(len(order), dtype=np.int64)
            for i, source_lengths in enumerate(ready):
                places = np.flatnonzero(order == i)
                lengths[places] = source_lengths[: len(places)]
        if ending:
            count = self._until_complete(order, lengths, weights, ending)
            order, lengths = order[:count], None if lengths is None else lengths[:count]
            self._order = None
        if lengths is not None:
            self._tokens += int(lengths.sum())
        for part, count in zip(parts, amounts(order, None, len(parts)), strict=True):
            part.left -= count
        self._row += len(order)
        self._ahead = moved_on(ahead, weights, amounts(order, lengths, len(parts)))
        return Stretch(self._mixture.names, *place, order, lengths, ahead, weights, cursors)

    def _owed(self, source: int, weights: tuple[int, ...]) -> Fraction:
        """Rows or tokens of all sources that are owed, beside those given here."""
        return Fraction(self._ahead[source], weights[source])

    def _until_complete(
        self,
        order: IntArray,
        lengths: IntArray | None,
        weights: tuple[int, ...],
        ending: Sequence[int],
    ) -> int:
        """How many draws until others have their shares beside all rows of the sources that end the epoch. A
        draw that is due in part comes in such a part of shards and epochs: where these sources are late.
        """
        left, phase = min((self._owed(i, weights), self._phases[i]) for i in ending)
        for number, source in enumerate(order.tolist()):
            length = 1 if lengths is None else int(lengths[number])
            if source in ending or left * fair_queue.PLACES < length * phase:
                return number
            left -= length
        return len(order)

    def _first(self, weights: tuple[int, ...]) -> int | None:
        """The source of the first row of all; it differs between shards."""
        if self._tokens or self._row or any(self._ahead):
            return None
        place = self._phases[0] * sum(weights) // fair_queue.PLACES
        return bisect_right(list(accumulate(weights)), place)

    def _gather(self, order: IntArray, cursors: Cursors) -> Run:
        joined = Run.join([piece for part in self._parts for piece in part.taken()])
        by_source = np.argsort(order, kind="stable")
        joined = self._mixture.with_names(joined, order[by_source])
        return joined.moved(np.argsort(by_source, kind="stable"), cursors)

    # What is drawn from

    def _step(self) -> int:
        drawn = self._tokens if self._mixture.by_tokens else self._row
        return bisect_right(self._starts, drawn) - 1

    def _settle(self) -> tuple[tuple[int, ...] | None, Sequence[int]]:
        """Have a row of each source ready; return the next weights, or None at the end of the mix's epoch;
        and the sources whose next row ends it.
        """
        mixture, parts = self._mixture, self._parts
        while True:
            later = self._steps[self._step() :]
            # Where all sources of a step have left, the next step begins before its time.
            step_weights = next((step for step in later if self._active(step)), later[0])
            active = self._active(step_weights)
            for i in active:
                if not parts[i].left:
                    parts[i].fill()
                    if parts[i].passes >= TINY_PASSES and self._row < FEW_ROWS * parts[i].passes:
                        self._warn_of_tiny(i)
            ending: Sequence[int] = ()
            if mixture.mix.stop == "first_exhausted":
                ending = [i for i in active if parts[i].passes >= (mixture.max_epochs[i] or 1)]
            else:
                if mixture.mix.stop == "all_exhausted" and self._all_exhausted():
                    owed = {i: self._owed(i, step_weights) for i in active if parts[i].begins_again}
                    if not owed:
                        return None, ()
                    ending = [i for i in owed if owed[i] == max(owed.values())]
                if self._let_go([i for i in active if i not in ending]):
                    continue
            if not active and mixture.mix.stop == "repeat":
                raise DataError(
                    f"{mixture.mix}: every source with a weight has reached its limit of "
                    "max_epochs: leave one without a limit"
                )
            if not active:
                return None, ()
            if mixture.mix.stop == "all_exhausted" and any(mixture.may_be_endless):
                self._warn_of_endless(active)
            if len(active) == sum(w > 0 for w in step_weights):
                return step_weights, ending
            weights = [w if i in active else 0 for i, w in enumerate(step_weights)]
            return fair_queue.whole_weights(weights, sum(step_weights)), ending

    def _active(self, weights: Sequence[int]) -> list[int]:
        return [i for i, w in enumerate(weights) if w and not self._parts[i].gone]

    def _let_go(self, active: Sequence[int]) -> bool:
        """Whether sources have reached their ``max_epochs``, and leave."""
        limits = self._mixture.max_epochs
        leaving = [i for i in active if self._parts[i].passes >= (limits[i] or math.inf)]
        for i in leaving:
            self._parts[i].gone = True
        return bool(leaving)

    def _warn_of_tiny(self, i: int) -> None:
        name = self._mixture.names[i]
        warn_once(
            f"{self._mixture.mix}: source {name!r} was read {self._parts[i].passes:,} times for "
            f"{self._row:,} rows of the mix, and to begin it again takes longer than to read it: lower its "
            f"weight or num_shards, limit max_epochs, or write its rows many times over, such as by "
            "concat([source] * 100).write_parquet(folder)",
            key=("tiny", name),
        )

    def _warn_of_endless(self, active: list[int]) -> None:
        most = max(active, key=lambda i: self._parts[i].passes)
        if self._parts[most].passes < MANY_PASSES:
            return
        for i in active:
            if self._mixture.may_be_endless[i] and not self._parts[i].passes:
                name, other = self._mixture.names[i], self._mixture.names[most]
                warn_once(
                    f'mix(stop="all_exhausted"): source {name!r} has not ended while {other!r} was read '
                    f"{MANY_PASSES} times; if it has no end, nor has the epoch: write "
                    f'mix(stop="repeat"), or stop="first_exhausted"',
                    key=("mix", name),
                )

    def _all_exhausted(self) -> bool:
        later = self._steps[self._step() :]
        wanted = [i for i, column in enumerate(zip(*later, strict=True)) if any(column)]
        return all(self._parts[i].gone or self._parts[i].passes > 0 for i in wanted)
