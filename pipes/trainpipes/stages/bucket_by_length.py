from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self

import numpy as np

from trainpipes._internal.checks import ColumnName, Count, Each, Ge, Seed
from trainpipes.columns.arrays import stretches
from trainpipes.columns.block import Block
from trainpipes.columns.run import Run, RunSource
from trainpipes.engine.layout import IntArray, permutation
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import BatchingStage, OpenBelow
from trainpipes.stages.batch import NOT_BOTH, LongRow, budget_of
from trainpipes.stages.held import MOST_EPOCHS, Held, cursors_in, misplaced
from trainpipes.stages.token_columns import lengths_of

#: Buckets where nothing is said.
NUM_BUCKETS = 32
#: Rows in a run, about; whole batches.
RUN_ROWS = 512


class BucketByLength(BatchingStage):
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
    overflow: LongRow | None = None
    drop_last: bool = False
    seed: Seed = 0

    def check(self) -> None:
        if self.batch_size is None and self.max_tokens is None:
            self._set(batch_size=1)
        self._require(self.batch_size is None or self.max_tokens is None, "batch_size", *NOT_BOTH)
        if self.max_tokens is not None:
            self._require(self.drop_last is False, "drop_last", "given with batch_size")
        else:
            self._require(self.max_rows is None, "max_rows", "given with max_tokens")
            self._require(self.overflow is None, "overflow", "given with max_tokens")
        either = self.boundaries is None or self.num_buckets is None
        self._require(either, "boundaries", "left out where num_buckets is given")
        if self.boundaries is not None:
            edges = list(self.boundaries)
            good = edges and all(a < b for a, b in pairwise(edges))
            self._require(good, "boundaries", "ascending lengths, each once")
            self._set(boundaries=edges)

    _reorders: ClassVar[bool] = False  # whether batches come in another order every epoch

    def resolve(self, below: Sequence[Stage]) -> Self:
        return self.resolved(_reorders=any(stage.reorders for stage in below))

    _budget = cached_property(budget_of)

    @property
    def _size(self) -> int:
        return self.batch_size or 1

    @property
    def rows(self) -> int:
        return -(-self.buffer_size // self._size) * self._size

    def open(self, below: OpenBelow, at: dict[str, Any]) -> RunSource:
        at, used = (at["below"], at["row"]) if "below" in at else (at, 0)
        if self._budget is not None:  # filled as well as may be, by rows of however many epochs
            return _Buckets(self, Held(below(at)), used)
        held = Held(below(at), MOST_EPOCHS, MOST_EPOCHS, least=self._size)
        return _Buckets(self, held, used)

    def cut(self, block: Block) -> tuple[IntArray, IntArray]:
        """A window's rows bucket by bucket, and where batches start in that order."""
        lengths = lengths_of(block, self.column, self)
        if self._budget is not None:
            self._budget.check(lengths, block.ids, self)
        buckets = self._buckets(lengths)
        order = np.argsort(buckets, kind="stable")
        ends = np.cumsum(np.bincount(buckets, minlength=1))
        kept, rest = [], []
        sizes: list[IntArray] = []
        for start, stop in pairwise([0, *ends.tolist()]):
            rows = order[start:stop]
            edges = self._edges(lengths[rows])
            kept.append(rows[: edges[-1]])
            rest.append(rows[edges[-1] :])
            sizes.append(np.diff(edges))
        rows = np.concatenate(rest)
        edges = self._edges(lengths[rows], open_too=not self.drop_last)
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

    def _edges(self, lengths: IntArray, open_too: bool = False) -> IntArray:
        """Where batches start, and the end; one with room for more rows is left out or last."""
        count = len(lengths)
        if self._budget is None:
            full = count // self._size * self._size
            last = [count] if open_too and full < count else []
            return np.array([*range(0, full, self._size), full, *last], dtype=np.int64)
        found = self._budget.cut(lengths)
        open_ = count and not self._budget.full(lengths[found[-2] :])
        return found[:-1] if open_ and not open_too else found


class _Buckets:
    def __init__(self, stage: BucketByLength, held: Held, used: int) -> None:
        self._stage = stage
        self._held = held
        self._item = used
        self._block: Block | None = None

    def next_run(self) -> Run:
        while self._block is None:
            self._open()
        first = self._item
        wanted = self._bounds[first] + RUN_ROWS
        stop = max(first + 1, int(np.searchsorted(self._bounds, wanted, side="right")) - 1)
        self._item = stop
        low, high = int(self._bounds[first]), int(self._bounds[stop])
        items = len(self._bounds) - 1
        block = self._block.take(self._order[low:high])
        if stop == items:
            self._block, self._item = None, 0
        cursors = cursors_in(self._ends, first, stop, items)
        return Run(block, cursors, self._bounds[first : stop + 1] - low)

    def _open(self) -> None:
        held, stage = self._held, self._stage
        if not held.fill(stage.rows):
            raise StopIteration
        count = min(stage.rows, held.rows)
        if held.more_follow:  # whole batches: the others come later
            count = count // stage._size * stage._size
        block = held.waiting().block.slice(0, count)
        order, bounds = stage.cut(block)
        items = len(bounds) - 1
        if self._item and self._item >= items:
            raise misplaced(stage, self._item)
        held.gave(items > 0, stage)
        if items:
            ids = int(block.ids[0])
            epoch = held.epoch if stage._reorders else 0
            mixed = permutation(items, stage.seed, "buckets", epoch, ids)
            sizes = np.diff(bounds)[mixed]
            self._order = order[stretches(bounds[:-1][mixed], sizes)]
            self._bounds: IntArray = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            self._block, self._ends = block, held.ends(count)
        held.drop(count)
