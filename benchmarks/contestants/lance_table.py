"""LanceDB: its own table, written first, and its streaming dataset for PyTorch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import lancedb
import pyarrow as pa
import pyarrow.dataset as ds
import torch
from lancedb.streaming import StreamingDataLoader, StreamingDataset
from tokenizers import Tokenizer

from benchmarks.contestants.contestant import Contestant
from benchmarks.contestants.padding import Batch, padded
from benchmarks.corpus import Data


class Lance(Contestant):
    """``StreamingDataset`` of 2 splits in a ``StreamingDataLoader`` without workers. Rows are shuffled over
    the whole table, in clumps of 64; the dataset has the state."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.tokenizer = Tokenizer.from_file(data.tokenizer) if data.text else None
        self._loader: Any = None
        self._rows: Any = None

    @property
    def rows(self) -> Any:
        if self._rows is None:
            table = lancedb.connect(str(self.data.converted("lance"))).open_table("rows")
            self._rows = StreamingDataset(
                table,
                num_splits=2,
                shuffle_seed=0,
                shuffle_clump_size=64,
                read_batch_size=1024,
                transform=self._arrays,
            )
        return self._rows

    def _arrays(self, batch: pa.RecordBatch) -> list[Any]:
        if self.tokenizer is not None:
            found = self.tokenizer.encode_batch_fast(batch.column("text").to_pylist())
            return [torch.tensor(encoding.ids) for encoding in found]
        column = batch.column("input_ids")
        values = torch.from_numpy(column.flatten().to_numpy().copy())
        return list(values.split(column.value_lengths().to_pylist()))

    def convert(self) -> None:
        folder = self.data.converted("lance")
        shutil.rmtree(folder, ignore_errors=True)
        rows = ds.dataset(self.data.files).to_table()
        lancedb.connect(str(folder)).create_table("rows", rows)

    def epoch(self) -> Iterator[Batch]:
        found: Iterator[Batch] = iter(
            StreamingDataLoader(self.rows, batch_size=self.data.batch, collate_fn=padded)
        )
        return found

    def state(self) -> Any:
        return self.rows.state_dict()

    def load(self, state: Any) -> None:
        self.rows.load_state_dict(state)
