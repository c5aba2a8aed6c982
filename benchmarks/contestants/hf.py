"""Hugging Face datasets, streaming: ``load_dataset(..., streaming=True)`` and its shuffle buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import pyarrow as pa
import torch
from tokenizers import Tokenizer
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.contestants.contestant import Contestant
from benchmarks.contestants.padding import Batch, padded, padded_flat
from benchmarks.corpus import Data

datasets.disable_progress_bars()
# It sleeps 5 s at the end of each epoch, which would weigh more here than where epochs are long.
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0


def shuffled(data: Data) -> Any:
    found: Any = datasets.load_dataset(
        "parquet", data_files=data.files, split="train", streaming=True
    )
    return found.shuffle(seed=0, buffer_size=data.buffer)


class Rows(Contestant):
    """Row by row into a ``StatefulDataLoader``; text by a batched ``map`` of 1,000."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        rows = shuffled(data)
        if data.text:
            tokenizer = Tokenizer.from_file(data.tokenizer)

            def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
                return {"input_ids": [e.ids for e in tokenizer.encode_batch_fast(batch["text"])]}

            rows = rows.map(tokenize, batched=True, remove_columns=["text"])
        self.loader = StatefulDataLoader(rows, batch_size=data.batch, collate_fn=self._collate)

    def _collate(self, rows: list[dict[str, list[int]]]) -> Batch:
        return padded([torch.tensor(row["input_ids"]) for row in rows])

    def epoch(self) -> Iterator[Batch]:
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)


class Arrow(Contestant):
    """``with_format("arrow")`` and ``batch(32)``, its state taken from the dataset."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.rows = shuffled(data).with_format("arrow")
        if data.text:
            tokenizer = Tokenizer.from_file(data.tokenizer)

            def tokenize(table: pa.Table) -> pa.Table:
                found = tokenizer.encode_batch_fast(table.column("text").to_pylist())
                ids = pa.array([e.ids for e in found], pa.list_(pa.int32()))
                return pa.table({"input_ids": ids})

            self.rows = self.rows.map(tokenize, batched=True, remove_columns=["text"])
        self.rows = self.rows.with_format("arrow").batch(data.batch)

    def epoch(self) -> Iterator[Batch]:
        for table in self.rows:
            rows = table.column("input_ids").combine_chunks().flatten()
            yield padded_flat(rows.values.to_numpy(), rows.offsets.to_numpy())

    def state(self) -> Any:
        return self.rows.state_dict()

    def load(self, state: Any) -> None:
        self.rows.load_state_dict(state)
