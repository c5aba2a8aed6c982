"""LitData: its own chunks, written first by ``optimize``, and its own loader."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import litdata
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer

from benchmarks.contestants.contestant import Contestant
from benchmarks.contestants.padding import Batch, padded
from benchmarks.corpus import Data


def texts(path: str) -> Iterator[str]:
    yield from pq.read_table(path).column("text").to_pylist()


def ids(path: str) -> Iterator[torch.Tensor]:
    for row in pq.read_table(path).column("input_ids").to_pylist():
        yield torch.tensor(row, dtype=torch.int32)


class LitData(Contestant):
    """``StreamingDataset(shuffle=True)`` in a ``StreamingDataLoader`` without workers, which has the state.
    Chunks are shuffled, and rows within them; there is no buffer to set."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.tokenizer = Tokenizer.from_file(data.tokenizer) if data.text else None
        self._loader: Any = None

    @property
    def loader(self) -> Any:
        if self._loader is None:
            rows = litdata.StreamingDataset(
                str(self.data.converted("litdata")), shuffle=True, drop_last=False, seed=0
            )
            self._loader = litdata.StreamingDataLoader(
                rows, batch_size=self.data.batch, collate_fn=self._collate
            )
        return self._loader

    def _collate(self, rows: list[Any]) -> Batch:
        if self.tokenizer is not None:
            return padded([torch.tensor(e.ids) for e in self.tokenizer.encode_batch_fast(rows)])
        return padded(rows)

    def convert(self) -> None:
        folder = self.data.converted("litdata")
        shutil.rmtree(folder, ignore_errors=True)
        litdata.optimize(
            fn=texts if self.data.text else ids,
            inputs=self.data.files,
            output_dir=str(folder),
            num_workers=1,
            chunk_bytes="64MB",
        )

    def epoch(self) -> Iterator[Batch]:
        found: Iterator[Batch] = iter(self.loader)
        return found

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)
