"""MosaicML streaming: its own MDS files, written first, and its own loader."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer

try:
    import torchvision  # noqa: F401
except ImportError:
    # Asked for at import, for image datasets, and not to be had for every build of torch.
    import transformers.feature_extraction_utils
    import transformers.models.auto.tokenization_auto  # noqa: F401

    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms.functional"):
        stand_in: Any = ModuleType(name)
        stand_in.VisionDataset = stand_in.CIFAR10 = stand_in.to_tensor = object
        sys.modules[name] = stand_in

import numpy as np
import streaming

from benchmarks.contestants.contestant import Contestant
from benchmarks.contestants.padding import Batch, padded
from benchmarks.corpus import Data


class Mosaic(Contestant):
    """``StreamingDataset(shuffle=True)`` with its default algorithm over blocks of the buffer's size, in a
    ``StreamingDataLoader`` without workers. Its state counts samples."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.tokenizer = Tokenizer.from_file(data.tokenizer) if data.text else None
        self._loader: Any = None

    @property
    def loader(self) -> Any:
        if self._loader is None:
            streaming.base.util.clean_stale_shared_memory()
            rows = streaming.StreamingDataset(
                local=str(self.data.converted("mosaic")),
                shuffle=True,
                shuffle_block_size=self.data.buffer,
                shuffle_seed=0,
                batch_size=self.data.batch,
            )
            self._loader = streaming.StreamingDataLoader(
                rows, batch_size=self.data.batch, collate_fn=self._collate
            )
        return self._loader

    def _collate(self, rows: list[dict[str, Any]]) -> Batch:
        if self.tokenizer is not None:
            found = self.tokenizer.encode_batch_fast([row["text"] for row in rows])
            return padded([torch.tensor(encoding.ids) for encoding in found])
        return padded([torch.from_numpy(row["input_ids"].copy()) for row in rows])

    def convert(self) -> None:
        folder = self.data.converted("mosaic")
        shutil.rmtree(folder, ignore_errors=True)
        column, kind = self.data.column, "str" if self.data.text else "ndarray:int32"
        with streaming.MDSWriter(out=str(folder), columns={column: kind}) as out:
            for path in self.data.files:
                for row in pq.read_table(path).column(0).to_pylist():
                    out.write({column: row if self.data.text else np.array(row, dtype=np.int32)})

    def epoch(self) -> Iterator[Batch]:
        found: Iterator[Batch] = iter(self.loader)
        return found

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)
