from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np

from trainpipes._internal.checks import ColumnName, Count, Each, Ge, Seed
from trainpipes.columns.arrays import stretches
from trainpipes.columns.block import Block
from trainpipes.columns.run import Run, RunSource
from trainpipes.engine.layout import IntArray
from trainpipes.kinds.blame import at_row
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import BatchingStage, OpenBelow
from trainpipes.stages.held import MOST_EPOCHS, Held, Runs, opened
from trainpipes.stages.read_columns import lengths_of

#: Buckets where nothing is said.
NUM_BUCKETS = 32
#: Rows of buckets in a run, about; whole batches.
RUN_ROWS = 512


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


class _Budgeted(BatchingStage):
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
        found = cut(lengths, most, max_rows)
        last = lengths[found[-2:][0] :]
        room = len(last) != max_rows and int(last.max(initial=0)) * (len(last) + 1) <= most
        return found[:-1] if len(last) and room and not open_too else found


class Batch(_Budgeted):
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
    overflow: Literal["raise", "alone"] | None = None

    def check(self) -> None:
        super().check()
        good = self.max_tokens is not None or self.column is None
        self._require(good, "column", "given with max_tokens")

    @property
    def keeps_rows(self) -> bool:  # type: ignore[override]
        return self.max_tokens is None

    def open(self, below: OpenBelow, at: dict[str, Any]) -> RunSource:
        return Runs(self._cut(Held(self, below(at))), self)

    def _cut(self, held: Held) -> Iterator[Run]:
        needed, column = self.batch_size or 1, self.column or "input_ids"
        lengths = np.empty(0, dtype=np.int64)
        while held.fill(needed):
            if self.max_tokens is None:
                lengths = np.empty(held.rows, dtype=np.int64)
            else:
                lengths = self._lengths(held.waiting().block, column)
            edges = self._edges(lengths, held.closed and not self.drop_last)
            needed = self.batch_size or 1
            if len(edges) > 1:
                yield held.take(edges)
            elif held.closed:
                return
            else:
                needed = held.rows + 1 + held.rows // 2  # all that wait are counted anew


class BucketByLength(_Budgeted):
    """Group rows of similar length into batches, which need little padding.

    A buffer's rows are sorted into buckets, which are cut into batches in the order of their rows.
    Its batches come in an order drawn with ``seed``: anew every epoch if the chain shuffles. After
    ``repeat()``, with ``batch_size``, a buffer holds rows of at most 8 epochs, or of as many as
    make a batch.

    Args:
        batch_size: B, rows in a batch; 1 if left out.
        max_tokens: instead of ``batch_size``: the most tokens in a batch, rows x longest row.
        boundaries: n ascending lengths make n + 1 buckets. A row as long as a boundary is in the
            longer bucket.
        num_buckets: instead of ``boundaries``: buckets of equal numbers of rows; 32 if left out.
        column: gives a row's length, by lists or integers.
        buffer_size: rows sorted together, rounded up to a multiple of ``batch_size``.
        max_rows: with ``max_tokens``: the most rows in a batch.
        overflow: with ``max_tokens``: "raise" (the default) refuses a longer row, "alone" makes it
            a batch.
        drop_last: leave out short batches (with ``batch_size``).
        seed: for the order of a buffer's batches.

    Raises:
        DataError: a row is longer than ``max_tokens``.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"ids": [1] * n} for n in (9, 1, 8, 2, 1, 7)])
    >>> pipe = rows.bucket_by_length(2, boundaries=[5], column="ids")
    >>> [[len(row["ids"]) for row in batch] for batch in pipe]
    [[9, 8], [1, 2], [1, 7]]
    """

    keeps_rows = False

    batch_size: Count | None = None
    _: KW_ONLY
    max_tokens: Count | None = None
    boundaries: Annotated[Sequence[int], Each(Ge(1))] | None = None
    num_buckets: Count | None = None
    column: ColumnName = "input_ids"
    buffer_size: Count = 1024
    max_rows: Count | None = None
    overflow: Literal["raise", "alone"] | None = None
    drop_last: bool = False
    seed: Seed = 0

    def check(self) -> None:
        super().check()
        good = self.max_tokens is None or not self.drop_last
        self._require(good, "drop_last", "given with batch_size")
        if self.boundaries is not None:
            edges = list(self.boundaries)
            good = self.num_buckets is None
            self._require(good, "boundaries", "left out where num_buckets is given")
            good = bool(edges) and all(a < b for a, b in pairwise(edges))
            self._require(good, "boundaries", "ascending lengths, each once")
            self._set(boundaries=edges)

    _reorders: ClassVar[bool] = False  # whether batches come in another order every epoch

    def resolve(self, below: Sequence[Stage]) -> Self:
        return self.resolved(_reorders=any(stage.reorders for stage in below))

    def open(self, below: OpenBelow, at: dict[str, Any]) -> RunSource:
        at, used = opened(at)
        # By tokens it is filled as well as may be, by rows of however many epochs.
        most = (MOST_EPOCHS, MOST_EPOCHS) if self.max_tokens is None else ()
        return Runs(self._batches(Held(self, below(at), *most), used), self)

    def _batches(self, held: Held, used: int) -> Iterator[Run]:
        size = self.batch_size or 1
        rows = -(-self.buffer_size // size) * size
        while held.fill(rows, least=size):
            count = min(rows, held.rows)
            if held.more_follow:  # whole batches: the others come later
                count = count // size * size
            block = held.waiting().block.slice(0, count)
            order, bounds = self._cut(block)
            mixed, cursors = held.window(len(bounds) - 1, count, used, "buckets", self._reorders)
            sizes = np.diff(bounds)[mixed]
            order = order[stretches(bounds[:-1][mixed], sizes)]
            bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            while used < len(mixed):
                first, wanted = used, bounds[used] + RUN_ROWS
                used = max(first + 1, int(np.searchsorted(bounds, wanted, side="right")) - 1)
                low, high = int(bounds[first]), int(bounds[used])
                cut = bounds[first : used + 1] - low
                yield Run(block.take(order[low:high]), cursors(first, used), cut)
            used = 0

    def _cut(self, block: Block) -> tuple[IntArray, IntArray]:
        """A window's rows bucket by bucket, and where batches start in that order."""
        lengths = self._lengths(block, self.column)
        buckets = self._buckets(lengths)
        order = np.argsort(buckets, kind="stable")
        kept, rest = [], []
        sizes: list[IntArray] = []
        for rows in np.split(order, np.cumsum(np.bincount(buckets))[:-1]):
            edges = self._edges(lengths[rows], False)
            kept.append(rows[: edges[-1]])
            rest.append(rows[edges[-1] :])
            sizes.append(np.diff(edges))
        rows = np.concatenate(rest)
        edges = self._edges(lengths[rows], not self.drop_last)
        sizes.append(np.diff(edges))
        rows = np.concatenate([*kept, rows[: edges[-1]]]).astype(np.int64)
        return rows, np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)

    def _buckets(self, lengths: IntArray) -> IntArray:
        if self.boundaries is not None:
            return np.searchsorted(self.boundaries, lengths, side="right")
        count = self.num_buckets or NUM_BUCKETS
        rank = np.empty(len(lengths), dtype=np.int64)
        rank[np.argsort(lengths, kind="stable")] = np.arange(len(lengths))
        return rank * count // max(1, len(lengths))
