"""Rows that wait for others before they are cut into something larger, and where they stand.

What batch, bucket_by_length and pack share: rows come in runs of any length, and leave in numbers that do
not depend on those.
"""

from __future__ import annotations

import numpy as np

from trainpipes.errors import DataError
from trainpipes.kinds.empty_epoch_guard import MOST_EMPTY_EPOCHS
from trainpipes.order import IntArray
from trainpipes.rows.block import Block
from trainpipes.rows.run import Cursors, Run, RunSource, innermost, round_of

__all__ = ["Held", "compact"]


def compact(cursors: Cursors) -> Cursors:
    """The same positions without the states that none of them counts from."""
    used, which = np.unique(cursors.which, return_inverse=True)
    if len(used) == len(cursors.bases):
        return cursors
    bases = tuple(cursors.bases[k] for k in used.tolist())
    return Cursors(bases, which.reshape(-1).astype(np.int64), cursors.rows)


class Held:
    """Rows of one shard that wait.

    Args:
        below: where they come from.
        crosses: whether rows of one epoch wait for those of the next; else an epoch's end closes what
            waits, and rows of the next are kept apart.
    """

    def __init__(self, below: RunSource, crosses: bool = True) -> None:
        self._below = below
        self._crosses = crosses
        self._runs: list[Run] = []
        self._epoch: int | None = None
        self._after: Run | None = None  # of the next epoch
        self._ended = False
        self._seen: set[tuple[int, int]] = set()  # rounds, since something came of one
        self.rows = 0

    @property
    def closed(self) -> bool:
        """Whether nothing joins the rows that wait."""
        return self._ended or self._after is not None

    @property
    def epoch(self) -> int:
        """The epoch of the first row that waits."""
        found: int = innermost(self._runs[0].cursors.state(0)).get("epoch", 0)
        return found

    def fill(self, rows: int) -> bool:
        """Read until so many rows wait, or nothing joins them. False where none waits, and ever after."""
        if not self._runs and self._after is not None:
            self._take(self._after)
            self._after = None
        while self.rows < rows and not self.closed:
            try:
                run = self._below.next_run()
            except StopIteration:
                self._ended = True
                break
            epoch = innermost(run.cursors.state(0)).get("epoch", 0)
            if self._runs and not self._crosses and epoch != self._epoch:
                self._after = run
            else:
                self._take(run)
        return self.rows > 0

    def _take(self, run: Run) -> None:
        state = run.cursors.state(0)
        self._epoch = innermost(state).get("epoch", 0)
        self._seen.add(round_of(state))
        self._runs.append(run)
        self.rows += len(run)

    def waiting(self) -> Run:
        """All rows that wait."""
        if len(self._runs) > 1:
            block = Block.join([run.block for run in self._runs])
            cursors = Cursors.join([run.cursors for run in self._runs])
            self._runs = [Run(block, compact(cursors))]
        return self._runs[0]

    def drop(self, rows: int) -> None:
        """Let the first rows go."""
        if not rows:
            return
        run = self.waiting()
        self._runs = []
        if rows < len(run):
            left = np.arange(rows, len(run) + 1, dtype=np.int64)
            cursors = compact(run.cursors.pick(left))
            self._runs = [Run(run.block.slice(rows, len(run)), cursors)]
        self.rows -= rows

    def take(self, bounds: IntArray) -> Run:
        """The first rows, as items cut at ``bounds`` int64 ``[items + 1]``, which starts with 0."""
        run = self.waiting()
        stop = int(bounds[-1])
        taken = Run(run.block.slice(0, stop), run.cursors.pick(bounds), bounds)
        self.drop(stop)
        self._seen.clear()
        return taken

    def gave(self, something: bool, stage: object) -> None:
        """Say whether rows of an epoch came to something; where none do for many, nothing ever may.

        Raises:
            DataError: too many epochs came to nothing.
        """
        if something:
            self._seen.clear()
        elif len(self._seen) > MOST_EMPTY_EPOCHS + 1:
            raise DataError(
                f"{stage} made nothing of the rows of {MOST_EMPTY_EPOCHS} epochs, so that repeat() "
                "would wait forever: they hold no tokens, or all of them are dropped",
                stage=str(stage),
            )
