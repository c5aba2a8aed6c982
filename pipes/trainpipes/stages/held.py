"""Rows that wait for others, and where they stand."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any

import numpy as np

from trainpipes.columns.block import Block
from trainpipes.columns.run import Cursors, Run, RunSource, innermost, round_of
from trainpipes.engine.layout import IntArray
from trainpipes.errors import StateError
from trainpipes.kinds.empty_epoch_guard import EmptyRounds

#: Epochs of which rows are packed or sorted together: of a few rows, a window would be of hundreds.
MOST_EPOCHS = 8


def compact(cursors: Cursors) -> Cursors:
    """The same positions without the states that none of them counts from."""
    used, which = np.unique(cursors.which, return_inverse=True)
    if len(used) == len(cursors.bases):
        return cursors
    bases = tuple(cursors.bases[k] for k in used.tolist())
    return Cursors(bases, which.reshape(-1).astype(np.int64), cursors.rows)


def _part(run: Run, first: int, stop: int) -> Run:
    cursors = run.cursors.pick(np.arange(first, stop + 1, dtype=np.int64))
    return Run(run.block.slice(first, stop), compact(cursors))


class Held:
    def __init__(
        self, below: RunSource, epochs: float = math.inf, rounds: float = math.inf, least: int = 1
    ) -> None:
        self._below = below
        self._most = epochs, rounds
        self._least = self._own_least = least
        self._runs: list[Run] = []
        self._after: Run | None = None  # of epochs that may not join those that wait
        self._ended = False
        self._rounds = EmptyRounds()
        self.rows = 0

    @property
    def closed(self) -> bool:
        """Whether nothing joins the rows that wait."""
        return self._ended or self._after is not None

    @property
    def more_follow(self) -> bool:
        return self._after is not None

    @property
    def epoch(self) -> int:
        found: int = innermost(self._runs[0].cursors.state(0)).get("epoch", 0)
        return found

    def fill(self, rows: int, least: int = 0) -> bool:
        self._least = max(self._own_least, least)
        after, self._after = self._after, None
        if after is not None:
            self._take(after)
        while self.rows < rows and not self.closed:
            try:
                run = self._below.next_run()
            except StopIteration:
                self._ended = True
                break
            self._take(run)
        return self.rows > 0

    def _take(self, run: Run) -> None:
        count = self._joining(run)
        if count < len(run):
            self._after = _part(run, count, len(run))
            run = _part(run, 0, count)
        if count:
            self._rounds.saw(run)
            self._runs.append(run)
            self.rows += count

    def _joining(self, run: Run) -> int:
        rows, (epochs, rounds) = len(run), self._most
        least = max(0, self._least - self.rows)
        if rows <= least or epochs == rounds == math.inf:
            return rows
        epoch, turn = round_of((self._runs[0] if self._runs else run).cursors.state(0))

        def is_later(row: int) -> bool:
            its_epoch, its_turn = round_of(run.cursors.state(row))
            return its_epoch >= epoch + epochs or (its_epoch == epoch and its_turn >= turn + rounds)

        if not is_later(rows - 1):
            return rows
        return bisect_left(range(rows), True, least, key=is_later)

    def waiting(self) -> Run:
        if len(self._runs) > 1:
            block = Block.join([run.block for run in self._runs])
            cursors = Cursors.join([run.cursors for run in self._runs])
            self._runs = [Run(block, compact(cursors))]
        return self._runs[0]

    def drop(self, rows: int) -> None:
        if not rows:
            return
        run = self.waiting()
        self._runs = []
        if rows < len(run):
            self._runs = [_part(run, rows, len(run))]
        self.rows -= rows

    def ends(self, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The states before and after the first rows, for ``cursors_in``."""
        cursors = self.waiting().cursors
        return {"below": cursors.state(0)}, {"below": cursors.state(count)}

    def take(self, bounds: IntArray) -> Run:
        """The first rows, as items cut at ``bounds`` int64 ``[items + 1]``, which starts with 0."""
        run = self.waiting()
        stop = int(bounds[-1])
        block = run.block if stop == len(run) else run.block.slice(0, stop)
        taken = Run(block, run.cursors.pick(bounds), bounds)
        self.drop(stop)
        self.gave(True, None)
        return taken

    def gave(self, something: bool, stage: object) -> None:
        """Note whether an epoch's rows gave anything; raise after many that did not."""
        if something:
            self._rounds.gave()
        else:
            self._rounds.check(stage)


def cursors_in(
    states: tuple[dict[str, Any], dict[str, Any]], first: int, stop: int, items: int
) -> Cursors:
    """Positions before item ``first`` of a window, and after each up to ``stop``."""
    rows = np.arange(first, stop + 1, dtype=np.int64)
    which = np.zeros(len(rows), dtype=np.int64)
    if stop == items:
        which[-1], rows[-1] = 1, 0
    return Cursors(states, which, rows)


def misplaced(stage: object, used: int) -> StateError:
    return StateError(
        f"{stage}: the state was saved after {used} rows, batches or tokens of a part of the data that has "
        "fewer; it was edited or is damaged: load it as it was saved"
    )
