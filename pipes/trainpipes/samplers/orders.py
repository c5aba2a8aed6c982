"""Samplers as torch names them: which rows an epoch has, by position."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

from trainpipes._internal.checks import flag, require, whole_number
from trainpipes._internal.data_parallel import data_parallel
from trainpipes._internal.types import IntArray
from trainpipes.columns.row_types import as_array
from trainpipes.errors import ConfigError
from trainpipes.order.permutation import Permutation, uniform
from trainpipes.samplers.row_sampler import Draws, RowSampler


def _turns(start: int, stop: int, rows: int) -> list[tuple[int, int, int]]:
    """Positions ``start`` to ``stop`` as stretches of passes over all rows: pass, first, and last."""
    passes = range(start // max(1, rows), -(-stop // max(1, rows)))
    return [(n, max(0, start - n * rows), min(rows, stop - n * rows)) for n in passes]


def _joined(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


class SequentialSampler(RowSampler):
    """All rows, in order.

    Args:
        data_source: the dataset, or a number of rows; a pipeline needs none.

    >>> list(SequentialSampler(3))
    [0, 1, 2]
    """

    def __init__(self, data_source: Sized | int | None = None) -> None:
        super().__init__(data_source)

    def length(self, rows: int) -> int:
        return rows

    def index(self, epoch: int, start: int, stop: int, rows: int) -> IntArray:
        return np.arange(start, stop, dtype=np.int64)


class RandomSampler(RowSampler):
    """All rows in a random order: a permutation in O(1) memory.

    Args:
        data_source: the dataset, or a number of rows; a pipeline needs none.
        replacement: draw each row independently of those before.
        num_samples: indices in an epoch; as many as rows if left out. If there are more, without replacement,
            one permutation follows the other.
        seed: for the order.

    >>> sampler = RandomSampler(5, seed=0)
    >>> list(sampler), list(sampler)
    ([4, 2, 3, 1, 0], [4, 1, 2, 0, 3])
    """

    _options = ("replacement", "num_samples", "seed")

    def __init__(
        self, data_source: Sized | int | None = None, replacement: bool = False,
        num_samples: int | None = None, *, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(data_source)
        self.replacement = flag(replacement, "RandomSampler(replacement)")
        if num_samples is not None:
            whole_number(num_samples, 1, "RandomSampler(num_samples)", "indices in an epoch")
        self.num_samples = num_samples
        self.seed = whole_number(seed, None, "RandomSampler(seed)", "a seed")
        # In one place: another thread may draw from another epoch at any time.
        self._last: tuple[tuple[int, int, int], Permutation] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": None}

    def length(self, rows: int) -> int:
        return rows if self.num_samples is None else self.num_samples

    def check(self, rows: int) -> None:
        super().check(rows)
        if not rows and self.num_samples:
            raise ConfigError(f"{self} cannot draw from a dataset without rows")

    def index(self, epoch: int, start: int, stop: int, rows: int) -> IntArray:
        if self.replacement:
            draws = uniform(start, stop, self.seed, "draws", epoch) * rows
            return np.minimum(draws.astype(np.int64), rows - 1)
        parts = [
            self._permutation(rows, epoch, turn)(np.arange(first, last, dtype=np.int64))
            for turn, first, last in _turns(start, stop, rows)
        ]
        return _joined(parts)

    def _permutation(self, rows: int, epoch: int, turn: int) -> Permutation:
        last, key = self._last, (rows, epoch, turn)
        if last is None or last[0] != key:
            last = self._last = key, Permutation(rows, self.seed, "rows", epoch, turn)
        return last[1]


class SubsetRandomSampler(RowSampler):
    """Some of the rows, in a random order, another one every epoch.

    Args:
        indices: the row numbers; a row that is named twice comes twice.
        seed: for the order.

    >>> sorted(SubsetRandomSampler([5, 1, 2]))
    [1, 2, 5]
    """

    _options = ("seed",)

    def __init__(self, indices: Sequence[int] | Any, *, seed: int = 0) -> None:
        super().__init__()
        rows = np.asarray(indices)
        good = rows.ndim == 1 and (not rows.size or rows.dtype.kind in "iu")
        rule = "row numbers [n], integers of 0 or more"
        require(good, "SubsetRandomSampler(indices)", rule, indices)
        self.indices: IntArray = rows.astype(np.int64)
        least = int(self.indices.min(initial=0))
        require(least >= 0, "SubsetRandomSampler(indices)", rule, least)
        self._order = RandomSampler(seed=seed)
        self.seed = seed

    def length(self, rows: int) -> int:
        return len(self.indices)

    def _known_rows(self) -> int:
        return int(self.indices.max(initial=-1)) + 1

    def check(self, rows: int) -> None:
        if self._known_rows() > rows:
            raise ConfigError(
                f"{self} names row {self._known_rows() - 1:,}, and there are {rows:,} rows: leave it out"
            )

    def index(self, epoch: int, start: int, stop: int, rows: int) -> IntArray:
        return self.indices[self._order.index(epoch, start, stop, len(self.indices))]

    def fingerprint(self) -> dict[str, Any]:
        return self._named("indices", self.indices)


class DistributedSampler(RowSampler):
    """One replica's part of the rows, as with torch's sampler; all parts are equally long. In a pipeline, the
    order over all replicas.

    Args:
        dataset: the dataset, or a number of rows; a pipeline needs none.
        num_replicas: R; the world size if left out, in a pipeline 1.
        rank: from 0; the process's own if left out.
        shuffle: whether rows come in a random order.
        seed: for the order.
        drop_last: leave out the last rows where R does not divide their number; else the first ones come a
            second time at the end.

    >>> [list(DistributedSampler(4, 2, rank, shuffle=False)) for rank in (0, 1)]
    [[0, 2], [1, 3]]
    """

    _options = ("num_replicas", "shuffle", "seed", "drop_last")

    def __init__(
        self, dataset: Sized | int | None = None, num_replicas: int | None = None, rank: int | None = None,
        shuffle: bool = True, seed: int = 0, drop_last: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dataset)
        if num_replicas is not None:
            whole_number(num_replicas, 1, "DistributedSampler(num_replicas)", "replicas")
        good = rank is None or 0 <= rank < (num_replicas or rank + 1)
        require(good, "DistributedSampler(rank)", f"0 to {num_replicas} - 1", rank)
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = flag(shuffle, "DistributedSampler(shuffle)")
        self.seed = whole_number(seed, None, "DistributedSampler(seed)", "a seed")
        self.drop_last = flag(drop_last, "DistributedSampler(drop_last)")
        self._order: RowSampler = RandomSampler(seed=seed) if shuffle else SequentialSampler()

    def _replicas(self) -> tuple[int, int]:
        if self.num_replicas is not None and self.rank is not None:
            return self.num_replicas, self.rank
        rank, world = data_parallel()
        return self.num_replicas or world, rank if self.rank is None else self.rank

    def length(self, rows: int) -> int:
        """Indices in an epoch, of all replicas together."""
        return self._length(rows, self.num_replicas or 1)

    def _length(self, rows: int, parts: int) -> int:
        return (rows // parts if self.drop_last else -(-rows // parts)) * parts

    def index(self, epoch: int, start: int, stop: int, rows: int) -> IntArray:
        turns = _turns(start, stop, rows)
        return _joined([self._order.index(epoch, low, high, rows) for _, low, high in turns])

    def __len__(self) -> int:
        replicas, _ = self._replicas()
        return self._length(self._known_rows(), replicas) // replicas

    def __iter__(self) -> Draws:
        replicas, rank = self._replicas()
        of = {**self.fingerprint(), "num_replicas": None}  # any number of them can go on
        return Draws(self, (replicas, rank), self._length(self._known_rows(), replicas), of)


class WeightedRandomSampler(RowSampler):
    """Rows drawn with given probabilities.

    Args:
        weights: one for each row, 0 or more; they need not sum to 1. A row of weight 0 never comes.
        num_samples: indices in an epoch.
        replacement: whether a row can come more than once in an epoch.
        seed: for the draws.

    >>> list(WeightedRandomSampler([0.0, 1.0, 0.0], num_samples=3))
    [1, 1, 1]
    """

    _options = ("num_samples", "replacement", "seed")

    def __init__(
        self, weights: Sequence[float] | Any, num_samples: int, replacement: bool = True, *, seed: int = 0
    ) -> None:  # fmt: skip
        numbers = np.asarray(as_array(weights))
        good = numbers.ndim == 1 and numbers.dtype.kind in "biuf"
        require(good, "WeightedRandomSampler(weights)", "a number for each row, [rows]", weights)
        numbers = numbers.astype(np.float64)
        for row in np.flatnonzero(~(np.isfinite(numbers) & (numbers >= 0)))[:1]:
            given = f"got {numbers[row]} for row {row:,}"
            raise ConfigError(
                f"WeightedRandomSampler(weights) must be finite and 0 or more, {given}"
            )
        require(
            numbers.sum() > 0, "WeightedRandomSampler(weights)", "above 0 for some row", weights
        )
        super().__init__(len(numbers))
        self.weights = numbers
        option = "WeightedRandomSampler(num_samples)"
        self.num_samples = whole_number(num_samples, 1, option, "indices in an epoch")
        self.replacement = flag(replacement, "WeightedRandomSampler(replacement)")
        self.seed = whole_number(seed, None, "WeightedRandomSampler(seed)", "a seed")
        possible = int(np.count_nonzero(numbers))
        if not self.replacement and num_samples > possible:
            raise ConfigError(
                f"WeightedRandomSampler(num_samples={num_samples:,}, replacement=False): only "
                f"{possible:,} rows have a weight above 0"
            )
        self._ends = np.cumsum(numbers)
        self._last = int(np.flatnonzero(numbers)[-1])
        self._order: tuple[int, IntArray] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_order": None}

    def length(self, rows: int) -> int:
        return self.num_samples

    def index(self, epoch: int, start: int, stop: int, rows: int) -> IntArray:
        if not self.replacement:
            return self._without(epoch)[start:stop]
        draws = uniform(start, stop, self.seed, "weighted", epoch) * self._ends[-1]
        order, rows_drawn = np.argsort(draws), np.empty(len(draws), dtype=np.int64)
        # In order, which is several times as fast.
        rows_drawn[order] = np.searchsorted(self._ends, draws[order], side="right")
        return np.minimum(rows_drawn, self._last)

    def _without(self, epoch: int) -> IntArray:
        """By exponential keys: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006."""
        order = self._order
        if order is None or order[0] != epoch:
            draws = uniform(0, len(self.weights), self.seed, "weighted", epoch)
            with np.errstate(divide="ignore"):
                keys = -np.log1p(-draws) / self.weights
            keys[self.weights == 0] = np.inf
            sorted_rows = np.argsort(keys, kind="stable")[: self.num_samples]
            order = self._order = (epoch, sorted_rows.astype(np.int64, copy=False))
        return order[1]

    def fingerprint(self) -> dict[str, Any]:
        return self._named("weights", self.weights)
