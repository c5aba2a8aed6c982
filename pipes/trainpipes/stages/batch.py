"""``batch`` and ``bucket_by_length``: rows in batches, in their order or by their lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np

from trainpipes._internal.checks import ColumnName, Count, Each, Ge, IntArray, Seed
from trainpipes.columns.arrays import stretches
from trainpipes.columns.block import Block
from trainpipes.columns.packing import some_of
from trainpipes.columns.run import Run
from trainpipes.interfaces.held import Held, Turn, around, opened
from trainpipes.interfaces.read_columns import at_row, lengths_of
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import BatchingStage, OpenBelow
from trainpipes.order.permutation import STRATA, turn_order


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
        """Where batches start, and the end; a batch with room for more rows is left out or last."""
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
            tokens counts as a row of one token.
        max_rows: with ``max_tokens``: the most rows in a batch.
        column: with ``max_tokens``: gives a row's length, by lists or integers; "input_ids" by
            default.
        overflow: with ``max_tokens``: "raise" (the default) refuses a longer row, "alone" makes it
            a batch.

    After another ``batch``, as in ``.batch(8).pad_collate().batch(4)``, items are lists of ``batch_size``
    batches, such as those of a step of the optimizer. Each shard may have one short list in an epoch.

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


#: Buckets where nothing is said.
NUM_BUCKETS = 32
#: Rows of buckets in a run, about; whole batches.
RUN_ROWS = 512
#: Numbers of rows that are tried where an epoch ends, with ``max_tokens``.
TRIED = 8


class BucketByLength(Budgeted, keeps_rows=False):
    """Group rows of similar length into batches, which need little padding.

    A buffer's rows are sorted into buckets, which are cut into batches in the order of their rows.
    Its batches come in an order drawn with ``seed``: anew every epoch if the chain shuffles. All shards
    give short and long batches at the same turns, so that the ranks of a step have about the same to do.
    After
    ``repeat()``, and in a mix, a buffer ends where its rows' next epoch begins: rows of less than a
    batch go on, in a batch with some of that epoch.

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
    [[1, 2], [1, 7], [9, 8]]
    """

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

    _takes_turns = True
    _reorders: ClassVar[bool] = False  # whether batches come in another order every epoch

    def _resolve(self, below: Sequence[Stage]) -> Self:
        return self._resolved(_reorders=any(stage.traits.reorders for stage in below))

    def open(self, below: OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
        turn, (at, used) = Turn.of(at), opened(at)
        return self._batches(Held(self, below(at), joints=True), used, turn)

    def _batches(self, held: Held, used: int, turn: Turn) -> Iterator[Run]:
        size, least = self.batch_size or 1, 0
        rows = -(-self.buffer_size // size) * size
        while held.fill(rows, least):
            count = min(rows, held.rows)
            block = held.waiting().block.slice(0, count)
            lengths = self._lengths(block, self.column)
            joints = held.joints(rows)
            longest = np.maximum.accumulate(lengths)[joints - 1]
            begun, end = around(joints, joints < self._most_rows(longest))
            if end is None and count < rows and not held.ended:
                least = 2 * count  # a batch holds rows of many epochs
                continue
            least = 0
            if end is not None:
                count, order, bounds = self._cut_at_joint(lengths[:end], begun)
            else:
                order, bounds = self._cut(lengths, begun)
            sizes = np.diff(bounds)
            costs = np.maximum.reduceat(lengths[order], bounds[:-1]) if len(sizes) else sizes
            if self.max_tokens is None:  # else cells are about as many, and long rows cost more
                costs = costs * sizes
            epoch = turn.epoch if self._reorders else 0
            mixed = turn_order(costs, turn.number, STRATA, self.seed, epoch)
            later = turn.after(len(mixed))
            cursors = held.close_window(len(mixed), count, used, [turn.kept, later.kept])
            sizes = sizes[mixed]
            order = order[stretches(bounds[:-1][mixed], sizes)]
            bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            while used < len(mixed):
                first, wanted = used, bounds[used] + RUN_ROWS
                used = max(first + 1, int(np.searchsorted(bounds, wanted, side="right")) - 1)
                low, high = int(bounds[first]), int(bounds[used])
                cut = bounds[first : used + 1] - low
                yield Run(block.take(order[low:high]), cursors(first, used), cut)
            used, turn = 0, later

    def _most_rows(self, longest: Any) -> Any:
        """Rows of a batch whose longest has so many tokens."""
        if self.max_tokens is None:
            return np.full_like(longest, self.batch_size or 1)
        most = self.max_tokens // np.maximum(longest, 1)
        return most if self.max_rows is None else np.minimum(most, self.max_rows)

    def _cut_at_joint(self, lengths: IntArray, begun: int) -> tuple[int, IntArray, IntArray]:
        """How many of an epoch's last rows to give, so that a batch has room for the others, and their
        batches.
        """
        count, size = len(lengths), self.batch_size
        if self.max_tokens is None:
            count -= count % (size or 1)
            return count, *self._cut(lengths[:count], begun)
        longest = np.maximum.accumulate(lengths[:0:-1])
        left = int(np.count_nonzero(np.arange(1, count) < self._most_rows(longest)))
        tokens, best = np.cumsum(lengths), (0.0, count, *self._cut(lengths, begun))
        for number in (count - some_of(min(left, count - begun), TRIED)).tolist():
            order, bounds = self._cut(lengths[:number], begun)
            share = tokens[number - 1] / (len(bounds) - 1)
            if share > best[0]:
                best = share, number, order, bounds
        return best[1:]

    def _cut(self, lengths: IntArray, begun: int) -> tuple[IntArray, IntArray]:
        """Rows bucket by bucket, and where batches start in that order. The first ``begun`` rows share
        one, the first.
        """
        first = self._joint_batch(lengths, begun)
        others = np.delete(np.arange(len(lengths), dtype=np.int64), first)
        buckets = self._buckets(lengths[others])
        order = others[np.argsort(buckets, kind="stable")]
        is_kept = begun > 0 and not (self.drop_last and len(first) < (self.batch_size or 1))
        batches, sizes = ([first], [np.array([len(first)])]) if is_kept else ([], [])
        rest: list[IntArray] = []
        for rows in np.split(order, np.cumsum(np.bincount(buckets))[:-1]):
            edges = self._edges(lengths[rows], False)
            batches.append(rows[: edges[-1]])
            rest.append(rows[edges[-1] :])
            sizes.append(np.diff(edges))
        rows = np.concatenate(rest)
        edges = self._edges(lengths[rows], not self.drop_last)
        sizes.append(np.diff(edges))
        rows = np.concatenate([*batches, rows[: edges[-1]]]).astype(np.int64)
        return rows, np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)

    def _joint_batch(self, lengths: IntArray, begun: int) -> IntArray:
        """The first ``begun`` rows, and others of about their longest's length."""
        before, later = lengths[:begun], lengths[begun:]
        longest = int(before.max(initial=0))
        room = int(self._most_rows(longest)) - begun if begun else 0
        is_longer = later > longest
        order = np.argsort(np.where(is_longer, later + 1, longest - later), kind="stable")
        if self.max_tokens is not None:
            order = order[: np.count_nonzero(~is_longer)]
        shortest = begun + np.sort(order[:room])
        return np.concatenate([np.arange(begun), shortest]).astype(np.int64)

    def _buckets(self, lengths: IntArray) -> IntArray:
        if self.boundaries is not None:
            return np.searchsorted(self.boundaries, lengths, side="right")
        count = self.num_buckets or NUM_BUCKETS
        rank = np.empty(len(lengths), dtype=np.int64)
        rank[np.argsort(lengths, kind="stable")] = np.arange(len(lengths))
        return rank * count // max(1, len(lengths))
