"""One source in one shard of a mix, and the positions within a run of mixed rows."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainpipes.errors import TrainpipesError
from trainpipes.order import IntArray
from trainpipes.runtime.rows.block import Block
from trainpipes.runtime.run import Run
from trainpipes.runtime.shards.chains import Chains
from trainpipes.runtime.shards.making import NOTHING, Made, Maker

if TYPE_CHECKING:
    from trainpipes.runtime.mixing.mix_windows import MixWindows

__all__ = ["Drawn", "Part", "Piece", "Stretch", "add_piece", "moved_on"]


class Part:
    """One source in one shard: its rows that are ready, and where the next one stands.

    Args:
        windows: of the mix.
        name: of the source.
        chains: of the source.
        shard: which shard.
        number: epoch of the mix, a pass of the source.
        cursor: of the source's next row; None for the pass's start.
    """

    def __init__(
        self,
        windows: MixWindows,
        name: str,
        chains: Chains,
        shard: int,
        number: int,
        cursor: dict[str, Any] | None,
    ) -> None:
        self.name = name
        self.gone = cursor is not None and bool(cursor.get("gone"))
        self._windows = windows
        self._chains = chains
        self._first_epoch = chains.plan.first_epoch(number)
        self._start = cursor
        self._maker = None if self.gone else Maker(chains, shard, number, cursor)
        self.made: Made | None = None
        self.used = 0  # items of the run at hand, up to the next row
        self.block: Block | None = None  # the rows of that run
        self.lengths: list[int] = []
        self.passes = 0  # times gone through before the next row

    @property
    def left(self) -> int:
        """Rows that are ready."""
        return 0 if self.made is None else self.made.last - self.used

    def fill(self) -> None:
        """Have a row ready, or more."""
        assert self._maker is not None
        try:
            made = self._maker.next()
            assert made.run is not None
            block = self._chains.finish(made.run).block
        except Exception as error:
            self._name(error)
            raise
        block = self._windows.columns.alike(self.name, block.slice(made.first, made.last))
        block.ids = self._windows.ids.of(self.name, block.ids)
        if self._windows.rules.lengths is not None:
            self.lengths = self._windows.rules.lengths(block).tolist()
        # Positions outlive the rows: a run that is delivered keeps none of its sources'.
        self.made = replace(made, run=Run(NOTHING, made.run.cursors))
        self.block, self.used = block, made.first
        self.passes = self._maker.epoch - self._first_epoch

    def _name(self, error: Exception) -> None:
        """Say in an error from below which source it is about."""
        stage, row = getattr(error, "_trainpipes", (None, None))
        if row is not None:
            own = self._windows.ids.of(self.name, np.array([row], dtype=np.int64))
            error._trainpipes = stage, int(own[0])  # type: ignore[attr-defined]
        elif isinstance(error, TrainpipesError):
            error.source = error.source or self.name
            error.message = f"{error.message} (in source {self.name!r} of a mix)"
        else:
            error.add_note(f"in source {self.name!r} of a mix")

    def cursor(self) -> dict[str, Any] | None:
        """Where the next row stands; None where that is the start."""
        return self._start if self.made is None else place(self.made, self.used, self.gone)


def place(made: Made, used: int, gone: bool = False) -> dict[str, Any]:
    """A source's cursor before item ``used`` of a run."""
    found = {**made.place(used), "at": made.at + used - made.first}
    return {**found, "gone": True} if gone else found


@dataclass(frozen=True)
class Stretch:
    """Draws between which no source was read on.

    Args:
        first: of its rows among those of the run.
        order: source of each row, int64.
        lengths: tokens of each row, int64; None where rows are counted.
        ahead: how far each source is ahead before it.
        weights: of the sources.
        tokens: drawn before it.
        before: for each source the run at hand and the items used of it, or a cursor.
    """

    first: int
    order: IntArray
    lengths: IntArray | None
    ahead: tuple[int, ...]
    weights: tuple[int, ...]
    tokens: int
    before: tuple[tuple[Made, int, bool] | dict[str, Any] | None, ...]


class Drawn:
    """The states within a run, each made when it is asked for.

    Args:
        names: of the sources.
        epoch: of the mix.
        row: rows drawn in that epoch before the run.
        stretches: of the run.
    """

    def __init__(
        self, names: tuple[str, ...], epoch: int, row: int, stretches: list[Stretch]
    ) -> None:
        self._names = names
        self._epoch = epoch
        self._row = row
        self._stretches = stretches
        self._firsts = [stretch.first for stretch in stretches]

    def at(self, row: int) -> dict[str, Any]:
        stretch = self._stretches[bisect_right(self._firsts, row) - 1]
        taken = row - stretch.first
        order = stretch.order[:taken]
        counts = np.bincount(order, minlength=len(self._names)).tolist()
        units, tokens = counts, stretch.tokens
        if stretch.lengths is not None:
            sums = np.zeros(len(self._names), dtype=np.int64)
            np.add.at(sums, order, stretch.lengths[:taken])
            units = sums.tolist()
            tokens += sum(units)
        cursors = {}
        for name, count, before in zip(self._names, counts, stretch.before, strict=True):
            if isinstance(before, tuple):
                cursors[name] = place(before[0], before[1] + count, before[2])
            elif before is not None:
                cursors[name] = before
        state: dict[str, Any] = {"epoch": self._epoch, "window": 0, "row": self._row + row}
        if stretch.lengths is not None:
            state["tokens"] = tokens
        state["ahead"] = list(moved_on(stretch.ahead, stretch.weights, units))
        state["sources"] = cursors
        return state


def moved_on(ahead: tuple[int, ...], weights: tuple[int, ...], units: list[int]) -> tuple[int, ...]:
    """How far each source is ahead after it has given so many units."""
    total, given = sum(weights), sum(units)
    return tuple(a + total * u - w * given for a, w, u in zip(ahead, weights, units, strict=True))


@dataclass
class Piece:
    """Rows of one source that follow each other."""

    block: Block
    start: int
    stop: int


def add_piece(pieces: list[Piece], part: Part, count: int) -> None:
    """Add the next rows of a source to those of a run."""
    assert part.block is not None
    assert part.made is not None
    start = part.used - part.made.first
    if pieces and pieces[-1].block is part.block:
        pieces[-1].stop += count
    else:
        pieces.append(Piece(part.block, start, start + count))
