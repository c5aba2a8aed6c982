"""What no pipeline can beat: the scan, the tokenizer and the memory, each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from benchmarks.contestants.contestant import Contestant
from benchmarks.corpus import Data


class Scan(Contestant):
    """The columns read and decoded, by 1 thread; nothing is done with them."""

    threads = 1

    def epoch(self) -> Iterator[Any]:
        jobs = [
            (path, group)
            for path in self.data.files
            for group in range(pq.ParquetFile(path).num_row_groups)
        ]
        if self.threads == 1:
            yield from (self._read(*job) for job in jobs)
            return
        with ThreadPoolExecutor(self.threads) as pool:
            yield from pool.map(lambda job: self._read(*job), jobs)

    def _read(self, path: str, group: int) -> pa.Table:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            return file.read_row_group(group, columns=[self.data.column], use_threads=False)


class ScanOnTwo(Scan):
    """The same by 2 threads, row group by row group."""

    threads = 2


class Engine(Contestant):
    """``tokenizers``: ``encode_batch_fast`` of 1,000 texts that are in memory, and their ids read out."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.encode = self.load_engine()
        self.texts = [
            text for path in data.files for text in pq.read_table(path).column("text").to_pylist()
        ]

    def load_engine(self) -> Callable[[list[str]], Any]:
        tokenizer = Tokenizer.from_file(self.data.tokenizer)

        def encode(texts: list[str]) -> list[list[int]]:
            return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]

        return encode

    def epoch(self) -> Iterator[Any]:
        for start in range(0, len(self.texts), 1000):
            yield self.encode(self.texts[start : start + 1000])


class Copy(Contestant):
    """The bytes of the padded batches, ids and mask, copied once by 1 thread into memory of 73 MB."""

    def epoch(self) -> Iterator[Any]:
        width = 280  # tokens of the longest of 32 rows, about
        source = np.ones((2, 1_024, width), dtype=np.int64)
        held = [np.ones_like(source) for _ in range(16)]
        for number in range(-(-self.data.made["rows"] // 1_024)):
            np.copyto(held[number % 16], source)
            yield source[0]
