from __future__ import annotations

from dataclasses import KW_ONLY
from functools import cached_property
from typing import Any, Literal

import numpy as np

from trainpipes._internal.checks import ColumnName, Count, wrong
from trainpipes.columns.run import Run, RunSource
from trainpipes.engine.layout import IntArray
from trainpipes.kinds.blame import at_row
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import BatchingStage, OpenBelow
from trainpipes.stages.held import Held
from trainpipes.stages.token_columns import lengths_of

LongRow = Literal["raise", "alone"]
#: What the size of a batch must be where tokens are counted, and the way out.
NOT_BOTH = "left out where max_tokens is given", "for both limits pass max_rows"


class Budget:
    """At most so many cells and rows."""

    def __init__(self, max_tokens: int, max_rows: int | None, overflow: LongRow | None) -> None:
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.alone = overflow == "alone"

    def check(self, lengths: IntArray, ids: IntArray, caller: Stage) -> None:
        longer = lengths > self.max_tokens
        if not self.alone and longer.any():
            place = int(np.argmax(longer))
            message = (
                f"{caller}: no row must be longer than max_tokens, got one of {lengths[place]}; raise "
                'max_tokens, cut rows (tokenize(max_length=...)), or pass overflow="alone" for a batch of '
                "its own"
            )
            raise at_row(message, caller, ids[place])

    def cut(self, lengths: IntArray) -> IntArray:
        """Where rectangles of rows start, and the end: int64 ``[rectangles + 1]``.

        >>> Budget(12, None, None).cut(np.array([3, 4, 4, 6, 6, 1])).tolist()
        [0, 3, 5, 6]
        """
        edges = [0]
        guess = 64
        while edges[-1] < len(lengths):
            rows = self._rows(lengths[edges[-1] : edges[-1] + guess])
            if rows == guess and (self.max_rows is None or rows < self.max_rows):
                guess *= 2
                continue
            edges.append(edges[-1] + rows)
            guess = 2 * rows + 8
        return np.array(edges, dtype=np.int64)

    def _rows(self, lengths: IntArray) -> int:
        cells = np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)
        rows = int(np.searchsorted(cells, self.max_tokens, side="right"))
        return max(1, rows if self.max_rows is None else min(rows, self.max_rows))

    def full(self, lengths: IntArray) -> bool:
        """Whether no row at all could join these."""
        most = int(lengths.max(initial=0)) * (len(lengths) + 1)
        return len(lengths) == self.max_rows or most > self.max_tokens


def budget_of(stage: Any) -> Budget | None:
    if stage.max_tokens is None:
        return None
    return Budget(stage.max_tokens, stage.max_rows, stage.overflow)


class Batch(BatchingStage):
    """Group rows into batches of ``batch_size`` rows, or of at most ``max_tokens`` tokens.

    An epoch has at most one short batch; after a stage that changes the number of rows (``filter``,
    ``pack``), each shard may have one. With ``max_tokens`` a batch takes as many rows in order as
    fit.

    Args:
        batch_size: B, rows in a batch; 1 if left out.
        drop_last: leave out short batches.
        max_tokens: instead of ``batch_size``: the most tokens in a batch, rows x longest row.
        max_rows: with ``max_tokens``: the most rows in a batch.
        column: with ``max_tokens``: gives a row's length, by lists or integers; "input_ids" by
            default.
        overflow: with ``max_tokens``: "raise" (the default) refuses a longer row, "alone" makes it
            a batch.

    Raises:
        DataError: a row is longer than ``max_tokens``.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: "abcde").batch(2))
    [['a', 'b'], ['c', 'd'], ['e']]
    >>> words = tp.from_dataset([{"ids": [1] * n} for n in (2, 3, 1, 1, 5)])
    >>> [[len(row["ids"]) for row in rows] for rows in words.batch(max_tokens=6, column="ids")]
    [[2, 3], [1, 1], [5]]
    """

    batch_size: Count | None = None
    _: KW_ONLY
    drop_last: bool = False
    max_tokens: Count | None = None
    max_rows: Count | None = None
    column: ColumnName | None = None
    overflow: LongRow | None = None

    def check(self) -> None:
        if self.batch_size is None and self.max_tokens is None:
            self._set(batch_size=1)
        given = (self.max_rows, self.column, self.overflow)
        if self.max_tokens is not None:
            self._require(self.batch_size is None, "batch_size", *NOT_BOTH)
        elif given != (None, None, None):
            raise wrong("batch(max_rows, column, overflow)", "given with max_tokens", given)

    @property
    def keeps_rows(self) -> bool:  # type: ignore[override]
        return self.max_tokens is None

    budget = cached_property(budget_of)

    def open(self, below: OpenBelow, at: dict[str, Any]) -> RunSource:
        held = Held(below(at))
        if self.budget is not None:
            return _TokenCutter(self, held, self.budget)
        assert self.batch_size is not None
        return _Cutter(held, self.batch_size, self.drop_last)

    @property
    def counted(self) -> str:
        return self.column or "input_ids"


class _Cutter:
    def __init__(self, held: Held, size: int, drop_last: bool) -> None:
        self._held, self._size, self._drop_last = held, size, drop_last

    def next_run(self) -> Run:
        held = self._held
        if not held.fill(self._size):
            raise StopIteration
        rows = held.rows // self._size * self._size
        if not rows:
            if self._drop_last:
                raise StopIteration
            rows = held.rows
        return held.take(np.array([*range(0, rows, self._size), rows], dtype=np.int64))


class _TokenCutter:
    def __init__(self, stage: Batch, held: Held, budget: Budget) -> None:
        self._stage, self._held, self._budget = stage, held, budget

    def next_run(self) -> Run:
        held, budget = self._held, self._budget
        needed = 1
        while held.fill(needed):
            block = held.waiting().block
            lengths = lengths_of(block, self._stage.counted, self._stage)
            budget.check(lengths, block.ids, self._stage)
            edges = budget.cut(lengths)
            open_ = not budget.full(lengths[edges[-2] :])
            if open_ and (not held.closed or self._stage.drop_last):
                edges = edges[:-1]
            if len(edges) > 1:
                return held.take(edges)
            if held.closed:
                break
            needed = held.rows + 1 + held.rows // 2  # all that wait are counted anew
        raise StopIteration
