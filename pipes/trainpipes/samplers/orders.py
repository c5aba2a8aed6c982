"""Samplers as torch names them, and their base: which rows an epoch has, by position, or one by one, as torch
asks for them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence, Sized
from itertools import islice
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import Sampler

from trainpipes._internal.callers import data_parallel
from trainpipes._internal.checks import IntArray, flag, require, whole_number
from trainpipes.columns.content import short_digest
from trainpipes.columns.types import as_array
from trainpipes.errors import ConfigError, StateError
from trainpipes.order.permutation import Permutation, uniform

#: Indices made at a time where they are asked for singly.
AHEAD = 4096


class RowSampler(Sampler[int]):
    """The base of all samplers of rows. A sampler of your own defines ``length`` and ``index``.

    Each ``iter()`` is the next epoch; ``set_epoch`` chooses another. The iterator has ``state_dict`` and
    ``load_state_dict``: epoch, position, the number of rows, and the sampler's identity.

    Args:
        rows: number of rows to choose from; a pipeline needs none.

    >>> import numpy as np
    >>> class Odd(RowSampler):
    ...     def length(self, rows):
    ...         return rows // 2
    ...
    ...     def index(self, epoch, start, stop, rows):
    ...         return np.arange(start, stop) * 2 + 1
    >>> list(Odd(7))
    [1, 3, 5]
    """

    _options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, rows: Sized | int | None = None) -> None:
        option = f"{type(self).__name__}(data_source)"
        if rows is not None and not isinstance(rows, int | np.integer):
            rule = "a dataset with a length, or a number of rows"
            require(isinstance(rows, Sized), option, rule, rows)
            rows = len(rows)
        self.rows = None if rows is None else whole_number(rows, 0, option, "rows")
        self._epoch = 0

    @abstractmethod
    def length(self, rows: int) -> int:
        """Indices in an epoch over ``rows`` rows."""

    @abstractmethod
    def index(self, epoch: int, start: int, stop: int, rows: int) -> IntArray:
        """The rows at positions ``start`` to ``stop`` (excluded) of an epoch, int64: a pure function."""

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the sampler in a state, of JSON types."""
        options = {name: getattr(self, name) for name in self._options}
        return {"sampler": type(self).__name__, **options}

    def _named(self, option: str, values: np.ndarray[Any, Any]) -> dict[str, Any]:
        """The same with how many numbers it was given, and their digest."""
        named = {"sampler": "", option: len(values), "digest": short_digest(values.tobytes())}
        return named | RowSampler.fingerprint(self)

    def check(self, rows: int) -> None:
        """Raise unless it can sample from ``rows`` rows.

        Raises:
            ConfigError: it was made for another number of them.
        """
        if self.rows is not None and self.rows != rows:
            raise ConfigError(
                f"{self} was made for {self.rows:,} rows, and there are {rows:,}: make it for this dataset"
            )

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` be epoch ``epoch``."""
        option = f"{type(self).__name__}.set_epoch(epoch)"
        self._epoch = whole_number(epoch, None, option, "the number of an epoch")

    def _known_rows(self) -> int:
        if self.rows is None:
            raise ConfigError(
                f"{self} does not know how many rows there are: outside a pipeline, pass the dataset or "
                "their number first"
            )
        return self.rows

    def __len__(self) -> int:
        return self.length(self._known_rows())

    def __iter__(self) -> Draws:
        return Draws(self)

    def __repr__(self) -> str:
        options = list(self.fingerprint().items())[1:]
        said = [f"{k}={v!r}" for k, v in options if v is not None and v is not False]
        return f"{type(self).__name__}({', '.join(said)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowSampler):
            return NotImplemented
        return (self.fingerprint(), self.rows) == (other.fingerprint(), other.rows)

    def __hash__(self) -> int:
        return hash(type(self).__name__)


class Draws(Iterator[int]):
    """The indices of an epoch, in turn."""

    def __init__(
        self, sampler: RowSampler, stride: tuple[int, int] = (1, 0), length: int | None = None,
        of: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._sampler, self._rows = sampler, sampler._known_rows()
        sampler.check(self._rows)
        self._step, self._shift = stride
        self._length = sampler.length(self._rows) if length is None else length
        self._of = of or sampler.fingerprint()
        self._epoch: int | None = None
        self._at = 0  # position over all parts
        self._held: list[int] = []
        self._next = 0

    def __next__(self) -> int:
        if self._epoch is None:
            self._epoch, self._sampler._epoch = self._sampler._epoch, self._sampler._epoch + 1
        if self._next == len(self._held):
            first = self._at + self._shift
            stop = min(self._length, first + AHEAD * self._step)
            if first >= stop:
                raise StopIteration
            drawn = np.asarray(self._sampler.index(self._epoch, first, stop, self._rows))
            self._held, self._next = drawn[:: self._step].tolist(), 0
        self._next += 1
        self._at += self._step
        return self._held[self._next - 1]

    def state_dict(self) -> dict[str, Any]:
        """Where the next index stands, of JSON types."""
        epoch = self._sampler._epoch if self._epoch is None else self._epoch
        return {"epoch": epoch, "position": self._at, "rows": self._rows, "of": self._of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken, also of another number of replicas."""
        of = state.get("of") if isinstance(state, dict) else state
        if of != self._of:
            raise StateError(f"this state is of the sampler {of}, and this is {self._of}")
        rows = state.get("rows", self._rows)
        if rows != self._rows:
            raise StateError(
                f"this state is of a sampler over {rows:,} rows, and this one is over {self._rows:,}: make "
                "the sampler for the same dataset"
            )
        self._epoch, self._at = int(state["epoch"]), int(state["position"])
        self._sampler._epoch = self._epoch + 1
        self._held, self._next = [], 0


class BatchSampler(Sampler[list[int]]):
    """Batches of another sampler's indices, as lists.

    In a pipeline (``from_dataset(dataset, batch_sampler=...)``) it is
    ``.shuffle(sampler=sampler).batch(...)``.

    Args:
        sampler: gives the indices.
        batch_size: of each batch.
        drop_last: leave out a short last batch.

    >>> from trainpipes.samplers import SequentialSampler
    >>> list(BatchSampler(SequentialSampler(5), batch_size=2))
    [[0, 1], [2, 3], [4]]
    """

    def __init__(self, sampler: RowSampler, batch_size: int, drop_last: bool = False) -> None:
        good, rule = isinstance(sampler, RowSampler), "one of trainpipes.samplers"
        require(good, "BatchSampler(sampler)", rule, sampler, "torch's BatchSampler takes torch's")
        self.sampler = sampler
        self.batch_size = whole_number(batch_size, 1, "BatchSampler(batch_size)", "rows in a batch")
        self.drop_last = flag(drop_last, "BatchSampler(drop_last)")

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` be epoch ``epoch``."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        rows = len(self.sampler)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return _Batches(self)

    def __repr__(self) -> str:
        last = ", drop_last=True" if self.drop_last else ""
        return f"BatchSampler({self.sampler!r}, {self.batch_size}{last})"


class _Batches(Iterator[list[int]]):
    """The indices of an epoch in batches, with the state of the sampler's ``Draws``."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._draws = iter(sampler.sampler)
        self._size, self._drop_last = sampler.batch_size, sampler.drop_last
        self.state_dict, self.load_state_dict = self._draws.state_dict, self._draws.load_state_dict

    def __next__(self) -> list[int]:
        batch = list(islice(self._draws, self._size))
        if not batch or (self._drop_last and len(batch) < self._size):
            raise StopIteration
        return batch


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
            permutations follow each other.
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
            option = "RandomSampler(num_samples)"
            num_samples = whole_number(num_samples, 1, option, "indices in an epoch")
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
    """Some of the rows, in a random order, a new order every epoch.

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
        self.seed = self._order.seed

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
            option = "DistributedSampler(num_replicas)"
            num_replicas = whole_number(num_replicas, 1, option, "replicas")
        if rank is not None:
            rank = whole_number(rank, 0, "DistributedSampler(rank)", "the number of a replica")
        good = rank is None or 0 <= rank < (num_replicas or rank + 1)
        rule = f"0 to {num_replicas - 1}" if num_replicas else "0 or more"
        require(good, "DistributedSampler(rank)", rule, rank)
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = flag(shuffle, "DistributedSampler(shuffle)")
        self.seed = whole_number(seed, None, "DistributedSampler(seed)", "a seed")
        self.drop_last = flag(drop_last, "DistributedSampler(drop_last)")
        self._order: RowSampler = RandomSampler(seed=seed) if shuffle else SequentialSampler()

    def _replicas(self) -> tuple[int, int]:
        if self.num_replicas is not None and self.rank is not None:
            return self.num_replicas, self.rank
        own_rank, world = data_parallel()
        replicas, rank = self.num_replicas or world, own_rank if self.rank is None else self.rank
        way = "give num_replicas and rank"
        require(rank < replicas, "DistributedSampler(rank)", f"0 to {replicas - 1}", rank, way)
        return replicas, rank

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
        weights: a weight for each row, 0 or more; they need not sum to 1. A row of weight 0 never comes.
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
            got = f"got {numbers[row]} for row {row:,}"
            raise ConfigError(f"WeightedRandomSampler(weights) must be finite and 0 or more, {got}")
        with np.errstate(over="ignore"):
            total = numbers.sum()
        option = "WeightedRandomSampler(weights)"
        require(total > 0, option, "above 0 for some row", weights)
        require(np.isfinite(total), option, "numbers whose sum is finite", f"a sum of {total}")
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
            with np.errstate(divide="ignore", over="ignore"):
                keys = -np.log1p(-draws) / self.weights
            keys[self.weights == 0] = np.nan  # after inf, the keys of the least weights
            sorted_rows = np.argsort(keys, kind="stable")[: self.num_samples]
            order = self._order = (epoch, sorted_rows.astype(np.int64, copy=False))
        return order[1]

    def fingerprint(self) -> dict[str, Any]:
        return self._named("weights", self.weights)
