"""Grain: its Parquet source, a window shuffle, its own batching with a function that pads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grain
import torch
from tokenizers import Tokenizer

from benchmarks.contestants.contestant import Contestant
from benchmarks.contestants.padding import Batch, padded
from benchmarks.corpus import Data


class Grain(Contestant):
    """``ParquetIterDataset`` over all files, ``WindowShuffleIterDataset``, ``batch``, and a thread that is
    16 batches ahead. Its iterator has the state."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        tokenizer = Tokenizer.from_file(data.tokenizer) if data.text else None

        def collate(rows: Sequence[dict[str, Any]]) -> Batch:
            if tokenizer is not None:
                found = tokenizer.encode_batch_fast([row["text"] for row in rows])
                return padded([torch.tensor(encoding.ids) for encoding in found])
            return padded([torch.from_numpy(row["input_ids"]) for row in rows])

        rows = grain.experimental.ParquetIterDataset(data.files)
        shuffled = grain.experimental.WindowShuffleIterDataset(
            rows, window_size=data.buffer, seed=0
        )
        batches = shuffled.batch(data.batch, drop_remainder=False, batch_fn=collate)
        ahead = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=16)
        self.ahead = ahead
        self.iterator: Any = iter(ahead)

    def epoch(self) -> Iterator[Batch]:
        yield from self.iterator
        self.iterator = iter(self.ahead)

    def state(self) -> Any:
        return self.iterator.get_state()

    def load(self, state: Any) -> None:
        self.iterator.set_state(state)
