"""The dataset of many blog posts: read rows until a buffer is full, shuffle it, give them one at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import fsspec
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.contestants.contestant import Contestant
from benchmarks.contestants.padding import Batch, padded
from benchmarks.corpus import Data


class RowBuffer(IterableDataset[Any]):
    """Rows in random order; a worker reads every n-th file."""

    def __init__(self, data: Data, seed: int = 0) -> None:
        self.data = data
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        rng = random.Random(self.seed)
        info = get_worker_info()
        files = self.data.files if info is None else self.data.files[info.id :: info.num_workers]
        system = fsspec.filesystem("slow" if self.data.slow else "file")
        held: list[Any] = []
        for path in files:
            with system.open(path) as file:
                for batch in pq.ParquetFile(file).iter_batches(10_000):
                    held.extend(batch.column(0).to_pylist())
                    if len(held) >= self.data.buffer:
                        rng.shuffle(held)
                        yield from held
                        held = []
        rng.shuffle(held)
        yield from held


class Collate:
    """Ids or texts to a padded batch. Texts are tokenized a batch at a time."""

    def __init__(self, data: Data) -> None:
        self.tokenizer = Tokenizer.from_file(data.tokenizer) if data.text else None

    def __call__(self, rows: list[Any]) -> Batch:
        if self.tokenizer is not None:
            rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(rows)]
        return padded([torch.tensor(row) for row in rows])


class InDataLoader(Contestant):
    """In a ``DataLoader``."""

    workers = 0

    def epoch(self) -> Iterator[Batch]:
        return iter(
            DataLoader(
                RowBuffer(self.data),
                batch_size=self.data.batch,
                collate_fn=Collate(self.data),
                num_workers=self.workers,
            )
        )


class InWorkers(InDataLoader):
    """In a ``DataLoader`` with 2 workers."""

    workers = 2


class InStatefulDataLoader(Contestant):
    """In torchdata's ``StatefulDataLoader``, which counts, and after a resume reads up to there."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.loader = StatefulDataLoader(
            RowBuffer(data), batch_size=data.batch, collate_fn=Collate(data)
        )

    def epoch(self) -> Iterator[Batch]:
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)
