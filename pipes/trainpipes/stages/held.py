"""Rows that wait for others, and where they stand."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from trainpipes.columns.block import Block
from trainpipes.columns.run import Cursors, Run, RunSource, innermost, round_of
from trainpipes.engine.layout import IntArray, permutation
from trainpipes.errors import StateError
from trainpipes.kinds.empty_epoch_guard import EmptyRounds

#: Epochs of which rows are packed or sorted together: of a few rows, a window would be of hundreds.
MOST_EPOCHS = 8
#: Positions before an item of a window, and after each up to another.
CursorsOf = Callable[[int, int], Cursors]


class Runs:
    """Runs of a generator with an item; raises after many epochs without. Whoever meets an error opens
    the rows anew. No run that was given is held: its memory is free for the next one.
    """

    def __init__(self, runs: Iterator[Run], stage: object) -> None:
        self._runs, self._stage, self._rounds = runs, stage, EmptyRounds()

    def next_run(self) -> Run:
        while not len(run := next(self._runs)):
            self._rounds.saw(run)
            self._rounds.check(self._stage)
        self._rounds.gave()
        return run


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
    """Rows of at most so many epochs, and of so many rounds of a mix's sources."""

    def __init__(
        self, stage: Any, below: RunSource, epochs: float = math.inf, rounds: float = math.inf
    ) -> None:
        self._stage, self._below = stage, below
        self._most = epochs, rounds
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

    def fill(self, rows: int, least: int = 0) -> bool:
        """Wait for so many rows, of which ``least`` may be of any epochs."""
        after, self._after = self._after, None
        if after is not None:
            self._take(after, least)
        while self.rows < rows and not self.closed:
            try:
                run = self._below.next_run()
            except StopIteration:
                self._ended = True
                break
            self._take(run, least)
        return self.rows > 0

    def _take(self, run: Run, least: int) -> None:
        count = self._joining(run, max(0, least - self.rows))
        if count < len(run):
            self._after = _part(run, count, len(run))
            run = _part(run, 0, count)
        if count:
            self._rounds.saw(run)
            self._runs.append(run)
            self.rows += count

    def _joining(self, run: Run, least: int) -> int:
        rows, (epochs, rounds) = len(run), self._most
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

    def drop(self, rows: int, gave: bool = True) -> None:
        """Let the first rows go; raises after many epochs whose rows gave nothing."""
        if gave:
            self._rounds.gave()
        else:
            self._rounds.check(self._stage)
        if rows:
            run = self.waiting()
            self._runs = [_part(run, rows, len(run))] if rows < len(run) else []
            self.rows -= rows

    def take(self, bounds: IntArray) -> Run:
        """The first rows, as items cut at ``bounds`` int64 ``[items + 1]``, which starts with 0."""
        run = self.waiting()
        stop = int(bounds[-1])
        block = run.block if stop == len(run) else run.block.slice(0, stop)
        self.drop(stop)
        return Run(block, run.cursors.pick(bounds), bounds)

    def window(
        self, items: int, count: int, used: int, salt: str, reorders: bool
    ) -> tuple[IntArray, CursorsOf]:
        """Items that the first ``count`` rows make, in the order drawn, and their positions. The
        rows are let go; ``used`` items were given before.
        """
        self.check_used(used, items)
        run = self.waiting()
        epoch = innermost(run.cursors.state(0)).get("epoch", 0) if reorders else 0
        order = permutation(items, self._stage.seed, salt, epoch, int(run.block.ids[0]))
        ends = tuple({"below": run.cursors.state(k)} for k in (0, count))
        self.drop(count, items > 0)
        return order, partial(_within, ends, items)

    def check_used(self, used: int, most: int) -> None:
        if used and used >= most:
            said = f"saved after {used} rows, batches or tokens of data that has fewer"
            way = "it was edited or is damaged: load it as it was saved"
            raise StateError(f"{self._stage}: the state was {said}; {way}")


def _within(ends: tuple[dict[str, Any], ...], items: int, first: int, stop: int) -> Cursors:
    rows = np.arange(first, stop + 1, dtype=np.int64)
    which = np.zeros(len(rows), dtype=np.int64)
    if stop == items:
        which[-1], rows[-1] = 1, 0
    return Cursors(ends, which, rows)


def opened(at: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """A state as that of the rows below, and what is used of theirs."""
    return (at["below"], at["row"]) if "below" in at else (at, 0)
