"""SPDL: a pipeline of threads around the same row buffer. It has no Parquet, shuffle or state of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from spdl.pipeline import PipelineBuilder

from benchmarks.contestants.contestant import Contestant
from benchmarks.contestants.padding import Batch
from benchmarks.contestants.row_buffer import Collate, RowBuffer
from benchmarks.corpus import Data


class Batches:
    """Lists of rows: an item for every row would go through an event loop one by one."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __iter__(self) -> Iterator[list[Any]]:
        rows = iter(RowBuffer(self.data))
        while held := list(islice(rows, self.data.batch)):
            yield held


class Spdl(Contestant):
    """``add_source`` with lists of 32 rows, ``pipe`` with two threads that collate, ``add_sink``"""

    def epoch(self) -> Iterator[Batch]:
        pipeline = (
            PipelineBuilder()
            .add_source(Batches(self.data))
            .pipe(Collate(self.data), concurrency=2, output_order="input")
            .add_sink(8)
            .build(num_threads=2)
        )
        with pipeline.auto_stop():
            yield from pipeline
