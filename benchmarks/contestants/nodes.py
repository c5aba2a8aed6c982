"""torchdata.nodes: the same row buffer, batched, collated in two threads, fetched ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper, Prefetcher

from benchmarks.contestants.contestant import Contestant
from benchmarks.contestants.padding import Batch
from benchmarks.contestants.row_buffer import Collate, RowBuffer
from benchmarks.corpus import Data


class Nodes(Contestant):
    """The nodes have no shuffle and no Parquet; both come from the row buffer, which is replayed."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        rows = Batcher(IterableWrapper(RowBuffer(data)), batch_size=data.batch, drop_last=False)
        batches = ParallelMapper(rows, Collate(data), num_workers=2, method="thread", in_order=True)
        self.loader: Any = Loader(Prefetcher(batches, prefetch_factor=4))

    def epoch(self) -> Iterator[Batch]:
        found: Iterator[Batch] = iter(self.loader)
        return found

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)
