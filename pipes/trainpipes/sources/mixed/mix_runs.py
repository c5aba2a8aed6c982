"""One shard of a mix, in stretches within which no source runs out of ready rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np

from trainpipes.columns.block import Block
from trainpipes.columns.run import Cursors, Run
from trainpipes.engine.layout import IntArray, slots_before
from trainpipes.engine.planning.chain import Chain
from trainpipes.engine.shards.shard_rows import ShardOpener
from trainpipes.engine.shards.shard_runs import PlacedRun, ShardRuns
from trainpipes.errors import DataError, TrainpipesError
from trainpipes.sources.mixed.fair_queue import by_rows, by_tokens, phases_of, whole_weights
from trainpipes.sources.mixed.mix_weights import MixRules

#: A source's cursor before so many more of its rows; None at the start of a pass.
CursorAfter = Callable[[int], "dict[str, Any] | None"]


@dataclass(eq=False)
class MixSource:
    name: str
    opener: ShardOpener
    ids: Callable[[IntArray], IntArray]
    lengths: Callable[[Block], IntArray] | None

    def expect(self, shard: int, epoch: int, cursor: dict[str, Any] | None) -> None:
        if cursor is None or not cursor.get("gone"):
            ShardRuns(self.opener, shard, epoch, cursor)

    def mixed(self, block: Block) -> tuple[Block, list[int]]:
        block.ids = self.ids(block.ids)
        if block.made_of is not None:
            block.made_of = block.made_of._replace(ids=self.ids(block.made_of.ids))
        return block, [] if self.lengths is None else self.lengths(block).tolist()

    def named(self, error: Exception) -> None:
        stage, row = getattr(error, "_trainpipes", (None, None))
        if row is not None:
            own = int(self.ids(np.array([row], dtype=np.int64))[0])
            error._trainpipes = stage, own  # type: ignore[attr-defined]
        elif isinstance(error, TrainpipesError):
            error.source = error.source or self.name
            error.message = f"{error.message} (in source {self.name!r} of a mix)"
        else:
            error.add_note(f"in source {self.name!r} of a mix")


class SourceRows:
    """One source's ready rows in one shard, and where the next stands. Whoever takes some updates
    ``left``.
    """

    def __init__(
        self, source: MixSource, shard: int, epoch: int, cursor: dict[str, Any] | None
    ) -> None:
        self.gone = cursor is not None and bool(cursor.get("gone"))
        self.left = self.passes = 0
        self._source, self._start = source, cursor
        self._first_epoch = source.opener.plan.chain.first_epoch(epoch)
        self._runs = None if self.gone else ShardRuns(source.opener, shard, epoch, cursor)
        self._made: PlacedRun | None = None
        self._block: Block | None = None
        self._lengths: list[int] = []
        self._begin = 0  # of those rows of the block that are taken and not given away yet
        self._pieces: list[Block] = []  # taken from blocks before

    def fill(self) -> None:
        assert self._runs is not None
        self._put_by()
        try:
            found = self._runs.next()
            assert found is not None
        except Exception as error:
            self._source.named(error)
            raise
        made, run = found
        self._block, self._lengths = self._source.mixed(run.block.slice(made.first, made.last))
        self._made = made
        self.left, self._begin = made.last - made.first, 0
        self.passes = self._runs.epoch - self._first_epoch

    @property
    def lengths(self) -> list[int]:
        return self._lengths[len(self._lengths) - self.left :]

    def taken(self) -> list[Block]:
        self._put_by()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _put_by(self) -> None:
        if self._block is not None:
            end = len(self._block) - self.left
            if end > self._begin:
                self._pieces.append(self._block.slice(self._begin, end))
            self._begin = end

    def cursor_after(self) -> CursorAfter:
        made, start, gone = self._made, self._start, {"gone": True} if self.gone else {}
        if made is None:
            return lambda _: start
        used = made.last - self.left
        return lambda count: {**made.cursor(used + count), **gone}


@dataclass(frozen=True)
class Stretch:
    """Draws between which no source was read on."""

    first: int  # of its rows among those of the run
    order: IntArray  # source of each row, int64
    lengths: IntArray | None  # tokens of each row, int64; None where rows are counted
    ahead: tuple[int, ...]  # how far each source is ahead before it
    weights: tuple[int, ...]
    tokens: int  # drawn before it
    cursors: tuple[CursorAfter, ...]  # give for each source that after so many of its rows


@dataclass(frozen=True, eq=False)
class MixCursors:
    """The states within a run that begins after ``row`` rows of an epoch of the mix."""

    names: tuple[str, ...]
    epoch: int
    row: int
    stretches: list[Stretch]

    def at(self, row: int) -> dict[str, Any]:
        stretch = self.stretches[bisect_right(self.stretches, row, key=lambda one: one.first) - 1]
        order = stretch.order[: row - stretch.first]
        counts = np.bincount(order, minlength=len(self.names)).tolist()
        state: dict[str, Any] = {"epoch": self.epoch, "window": 0, "row": self.row + row}
        units = counts
        if stretch.lengths is not None:
            sums = np.zeros(len(self.names), dtype=np.int64)
            np.add.at(sums, order, stretch.lengths[: len(order)])
            units = sums.tolist()
            state["tokens"] = stretch.tokens + sum(units)
        state["ahead"] = list(moved_on(stretch.ahead, stretch.weights, units))
        found = [after(count) for after, count in zip(stretch.cursors, counts, strict=True)]
        named = zip(self.names, found, strict=True)
        state["sources"] = {name: cursor for name, cursor in named if cursor is not None}
        return state


def moved_on(ahead: tuple[int, ...], weights: tuple[int, ...], units: list[int]) -> tuple[int, ...]:
    total, given = sum(weights), sum(units)
    return tuple(a + total * u - w * given for a, w, u in zip(ahead, weights, units, strict=True))


#: Stretches of a run for each source. Where sources are small, runs are short, so that the next one comes
#: soon; with runs of one stretch a row took 1.2 to 1.4 times as long.
STRETCHES = 4


@dataclass(eq=False)
class MixRuns:
    _rules: MixRules
    _sources: Sequence[MixSource]
    _chain: Chain
    _shard: int
    state: InitVar[dict[str, Any]]
    rows: InitVar[tuple[int, int]]
    _first_epoch: int

    def __post_init__(self, state: dict[str, Any], rows: tuple[int, int]) -> None:
        self._run_rows, self._next_rows = rows
        rules, shard, shards = self._rules, self._shard, self._chain.num_shards
        self._phases = phases_of(shard, len(rules.names))
        # Where the steps of the schedule begin, in this shard's own rows or tokens.
        if rules.lengths is None:
            self._starts = [slots_before(start, shard, shards) for start in rules.starts]
        else:
            self._starts = [-(-start // shards) for start in rules.starts]
        self._enter(int(state["epoch"]), state)

    def _enter(self, epoch: int, state: dict[str, Any]) -> None:
        names = self._rules.names
        self._epoch = epoch
        self._row = int(state.get("row", 0))
        self._tokens = int(state.get("tokens", 0))
        self._ahead = tuple(state.get("ahead", (0,) * len(names)))
        cursors = state.get("sources", {})
        self._parts = [
            SourceRows(source, self._shard, epoch, cursors.get(source.name))
            for source in self._sources
        ]

    def next_run(self) -> Run:
        chain = self._chain
        while True:
            run = self._draw()
            if run is not None:
                return run
            if not chain.rolling or not chain.goes_on(self._epoch, self._first_epoch):
                raise StopIteration
            if not self._row:
                raise DataError(
                    f"{self._rules.caller}: an epoch of the mix gave shard {self._shard} nothing, since a "
                    "source has no row there: lower num_shards in sharding_filter(), or "
                    'mix(stop="all_exhausted")'
                )
            self._enter(self._epoch + 1, {})

    # Draws

    def _draw(self) -> Run | None:
        start, drawn = self._row, 0
        stretches: list[Stretch] = []
        while drawn < self._next_rows and len(stretches) < STRETCHES * len(self._parts):
            weights = self._settle()
            if weights is None:
                break
            stretch = self._stretch(weights, drawn, self._next_rows - drawn)
            stretches.append(stretch)
            drawn += len(stretch.order)
        if not stretches:
            return None
        self._next_rows = self._run_rows
        base = MixCursors(self._rules.names, self._epoch, start, stretches)
        order = np.concatenate([stretch.order for stretch in stretches])
        cursors = Cursors.counting(base, np.arange(drawn + 1, dtype=np.int64))
        return Run(self._gather(order), cursors)

    def _stretch(self, weights: tuple[int, ...], first: int, rows: int) -> Stretch:
        """Draws until a source has no row ready, or the schedule's next step."""
        parts, ahead, tokens = self._parts, self._ahead, self._tokens
        cursors = tuple(part.cursor_after() for part in parts)
        later = self._starts[self._step() + 1 :]
        lengths: IntArray | None = None
        if self._rules.lengths is None:
            most = min([rows, *(start - self._row for start in later[:1])])
            order = by_rows(weights, ahead, self._phases, [part.left for part in parts], most)
            counts = np.bincount(order, minlength=len(parts)).tolist()
            self._ahead = moved_on(ahead, weights, counts)
        else:
            ready = [part.lengths for part in parts]
            until = later[0] - tokens if later else None
            found, self._ahead = by_tokens(weights, ahead, self._first(weights), ready, rows, until)
            order = np.array(found, dtype=np.int64)
            counts = np.bincount(order, minlength=len(parts)).tolist()
            lengths = np.empty(len(order), dtype=np.int64)
            for i, (own, count) in enumerate(zip(ready, counts, strict=True)):
                lengths[order == i] = own[:count]
            self._tokens += int(lengths.sum())
        for part, count in zip(parts, counts, strict=True):
            part.left -= count
        self._row += len(order)
        return Stretch(first, order, lengths, ahead, weights, tokens, cursors)

    def _first(self, weights: tuple[int, ...]) -> int | None:
        """The source of the first row of all, another one in other shards."""
        if self._tokens or self._row:
            return None
        place = phases_of(self._shard, 2)[0] * sum(weights)
        return bisect_right(np.cumsum(np.array(weights, dtype=object)).tolist(), place // 1024)

    def _gather(self, order: IntArray) -> Block:
        joined = Block.join([piece for part in self._parts for piece in part.taken()])
        by_source = np.argsort(order, kind="stable")
        joined = self._rules.with_names(joined, order[by_source])
        place = np.empty(len(order), dtype=np.int64)
        place[by_source] = np.arange(len(order))
        return joined.take(place)

    # What is drawn from

    def _step(self) -> int:
        drawn = self._row if self._rules.lengths is None else self._tokens
        return bisect_right(self._starts, drawn) - 1

    def _settle(self) -> tuple[int, ...] | None:
        """Have a row of each source ready; return the next weights, or None at the end of the mix's epoch."""
        rules = self._rules
        while True:
            own = rules.steps[self._step()]
            active = [i for i, w in enumerate(own) if w and not self._parts[i].gone]
            left = False
            for i in active:
                part, most = self._parts[i], rules.max_epochs[i]
                if not part.left:
                    part.fill()
                if rules.stop == "first_exhausted":
                    if part.passes >= (most or 1):
                        return None
                elif most is not None and part.passes >= most:
                    part.gone = left = True
            if left:
                continue
            if not active and rules.stop == "repeat":
                raise DataError(
                    f"{rules.caller}: every source with a weight has reached its limit of "
                    "max_epochs: leave one without a limit"
                )
            if not active or (rules.stop == "all_exhausted" and self._all_exhausted()):
                return None
            if len(active) == sum(w > 0 for w in own):
                return own
            return whole_weights([own[i] if i in active else 0 for i in range(len(own))], sum(own))

    def _all_exhausted(self) -> bool:
        later = self._rules.steps[self._step() :]
        wanted = [i for i, column in enumerate(zip(*later, strict=True)) if any(column)]
        return all(self._parts[i].gone or self._parts[i].passes > 0 for i in wanted)
