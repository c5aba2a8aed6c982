from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY
from typing import Any, Literal

import numpy as np

from trainpipes._internal.checks import ColumnName, Count
from trainpipes._internal.types import IntArray
from trainpipes.columns.block import Block
from trainpipes.columns.run import Run
from trainpipes.interfaces.held import Held
from trainpipes.interfaces.read_columns import at_row, lengths_of
from trainpipes.interfaces.stage_kinds import BatchingStage, OpenBelow


def cut(lengths: IntArray, max_tokens: int, max_rows: int | None) -> IntArray:
    """Where batches of at most so many cells and rows start, and the end: int64 ``[batches + 1]``.

    >>> cut(np.array([3, 4, 4, 6, 6, 1]), 12, None).tolist()
    [0, 3, 5, 6]
    """
    edges = [0]
    guess = 64
    while edges[-1] < len(lengths):
        coming = lengths[edges[-1] : edges[-1] + guess]
        cells = np.maximum.accumulate(coming) * np.arange(1, len(coming) + 1)
        rows = int(np.searchsorted(cells, max_tokens, side="right"))
        rows = max(1, min(rows, max_rows or rows))
        if rows == guess and (max_rows is None or rows < max_rows):
            guess *= 2
            continue
        edges.append(edges[-1] + rows)
        guess = 2 * rows + 8
    return np.array(edges, dtype=np.int64)


class Budgeted(BatchingStage):
    """Batches of as many rows each, or of at most so many tokens and rows."""

    @property
    def max_tokens(self) -> int | None:
        return None

    def check(self) -> None:
        tokens = self.max_tokens is not None
        if self.batch_size is None and not tokens:
            self._set(batch_size=1)
        way = "for both limits pass max_rows"
        good = self.batch_size is None or not tokens
        self._require(good, "batch_size", "left out where max_tokens is given", way)
        for name in ("max_rows", "overflow"):
            self._require(tokens or self.options[name] is None, name, "given with max_tokens")

    def _lengths(self, block: Block, column: str) -> IntArray:
        """How long rows are, none too long."""
        lengths, most = lengths_of(block, column, self), self.max_tokens
        if most is not None and self.options["overflow"] != "alone" and (lengths > most).any():
            place = int(np.argmax(lengths > most))
            rule = f"no row may be longer than max_tokens, got one of {lengths[place]}"
            way = 'raise max_tokens, cut rows (tokenize(max_length=...)), or pass overflow="alone"'
            raise at_row(f"{self}: {rule}; {way} for a batch of its own", self, block.ids[place])
        return lengths

    def _edges(self, lengths: IntArray, open_too: bool) -> IntArray:
        """Where batches start, and the end; one with room for more rows is left out or last."""
        rows, most = len(lengths), self.max_tokens
        if most is None:
            size = self.batch_size or 1
            full = rows // size * size
            end = [rows] if open_too and full < rows else []
            return np.array([*range(0, full, size), full, *end], dtype=np.int64)
        max_rows = self.options["max_rows"]
        lengths = np.maximum(lengths, 1)  # of empty rows any number would fit
        edges = cut(lengths, most, max_rows)
        last = lengths[edges[-2:][0] :]
        room = len(last) != max_rows and int(last.max(initial=0)) * (len(last) + 1) <= most
        return edges[:-1] if len(last) and room and not open_too else edges


class Batch(Budgeted):
    """Group rows into batches of ``batch_size`` rows, or of at most ``max_tokens`` tokens.

    An epoch has at most one short batch; after a stage that changes the number of rows (``filter``,
    ``pack``), each shard may have one. With ``max_tokens`` a batch takes as many rows in order as
    fit.

    Args:
        batch_size: B, rows in a batch; 1 if left out.
        drop_last: leave out short batches.
        max_tokens: instead of ``batch_size``: the most tokens in a batch, rows x longest row. A row without
            tokens counts as one of one token.
        max_rows: with ``max_tokens``: the most rows in a batch.
        column: with ``max_tokens``: gives a row's length, by lists or integers; "input_ids" by
            default.
        overflow: with ``max_tokens``: "raise" (the default) refuses a longer row, "alone" makes it
            a batch.

    After another ``batch``, as in ``.batch(8).pad_collate().batch(4)``, items are lists of ``batch_size``
    batches, such as those of one step of the optimizer. Each shard may have one short list in an epoch.

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
    overflow: Literal["raise", "alone"] | None = None

    def check(self) -> None:
        super().check()
        good = self.max_tokens is not None or self.column is None
        self._require(good, "column", "given with max_tokens")

    def _traits(self) -> dict[str, Any]:
        return {"keeps_rows": self.max_tokens is None and not self.nested}

    def open(self, below: OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
        return self._cut(Held(self, below(at)))

    def _cut(self, held: Held) -> Iterator[Run]:
        needed, column = self.batch_size or 1, self.column or "input_ids"
        lengths = np.empty(0, dtype=np.int64)
        while held.fill(needed):
            if self.max_tokens is None:
                lengths = np.empty(held.rows, dtype=np.int64)
            else:
                lengths = self._lengths(held.waiting().block, column)
            edges = self._edges(lengths, held.ended and not self.drop_last)
            needed = self.batch_size or 1
            if len(edges) > 1:
                yield held.take(edges)
            elif held.ended:
                return
            else:
                needed = held.rows + 1 + held.rows // 2  # all that wait are counted anew
