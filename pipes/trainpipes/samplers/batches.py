"""``BatchSampler``: lists of another sampler's indices."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from trainpipes._internal.checks import flag, require, whole_number
from trainpipes.engine.layout import IntArray
from trainpipes.engine.topology import data_parallel
from trainpipes.samplers.row_sampler import Draws, RowSampler
from trainpipes.samplers.uniform import RandomSampler, SequentialSampler


class BatchSampler(Sampler[list[int]]):
    """Batches of another sampler's indices, as lists.

    In a pipeline (``from_dataset(dataset, batch_sampler=...)``) it is
    ``.shuffle(sampler=sampler).batch(...)``.

    Args:
        sampler: gives the indices.
        batch_size: of each batch.
        drop_last: leave out a short last one.
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
    """The batches of one epoch."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._draws: Any = iter(sampler.sampler)
        self._size, self._drop_last = sampler.batch_size, sampler.drop_last
        self.state_dict, self.load_state_dict = self._draws.state_dict, self._draws.load_state_dict

    def __next__(self) -> list[int]:
        batch = list(islice(self._draws, self._size))
        if not batch or (self._drop_last and len(batch) < self._size):
            raise StopIteration
        return batch


class DistributedSampler(RowSampler):
    """One replica's part of the rows, as torch's sampler of this name gives it; all parts are equally long.
    In a pipeline it gives the order over all replicas.

    Args:
        dataset: the dataset, or a number of rows; a pipeline needs none.
        num_replicas: R; the world size if left out, in a pipeline 1.
        rank: from 0; the process's own if left out.
        shuffle: whether rows come in a random order.
        seed: for the order.
        drop_last: leave out the last rows where R does not divide their number; else the first ones come
            a second time at the end.
    """

    def __init__(
        self,
        dataset: Sized | int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
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
        parts = self.num_replicas or 1
        return rows // parts * parts if self.drop_last else -(-rows // parts) * parts

    def index(self, epoch: int, start: int, stop: int, rows: int) -> IntArray:
        if stop <= rows:
            return self._order.index(epoch, start, stop, rows)
        again = np.arange(max(start, rows), stop, dtype=np.int64) % rows
        whole_part = self._order.index(epoch, min(start, rows), rows, rows)
        first = self._order.index(epoch, int(again.min()), int(again.max()) + 1, rows)
        return np.concatenate([whole_part, first[again - int(again.min())]])

    def __len__(self) -> int:
        replicas, _ = self._replicas()
        return self._for(replicas).length(self._known_rows()) // replicas

    def __iter__(self) -> Iterator[int]:
        replicas, rank = self._replicas()
        of = {**self.fingerprint(), "num_replicas": None}  # any number of them can go on
        length = self._for(replicas).length(self._known_rows())
        return Draws(self, (replicas, rank), length, of)

    def _for(self, replicas: int) -> DistributedSampler:
        return DistributedSampler(self.rows, replicas, 0, self.shuffle, self.seed, self.drop_last)

    def fingerprint(self) -> dict[str, Any]:
        return self._named("num_replicas", "shuffle", "seed", "drop_last")
