"""Reads rows of Arrow files in order, record batch by record batch.

An ``ArrowReader`` is one place in the files, for one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import gathered
from trainpipes.engine.layout import IntArray
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.remote.ahead import Ahead
from trainpipes.sources.remote.retry import Requests

if TYPE_CHECKING:
    from trainpipes.sources.arrow.read_arrow import ArrowFiles


class ArrowReader:
    """One place in Arrow files. Not for two threads at once.

    Args:
        source: the files and blocks.
    """

    def __init__(self, source: ArrowFiles) -> None:
        self._source = source
        self._requests = Requests(source.files.retry_seconds)
        self._last: tuple[tuple[int, int], pa.RecordBatch] | None = None
        self._fetched: dict[tuple[int, int], memoryview] = {}
        sizes = source.block_bytes
        self._ahead = Ahead(
            self._fetch, lambda block: float(sizes[block]), source.files.prefetch_bytes
        )

    def expect(self, blocks: Sequence[int]) -> None:
        """Say which blocks will be read next, in order: those on other machines are fetched, several side
        by side."""
        files, of_block = self._source.files, self._source.file_of_block
        there = [b for b in blocks if not is_local(files.system(int(of_block[b])))]
        self._ahead.expect([block for block in there if not self._holds(block)])

    def _holds(self, block: int) -> bool:
        """Whether all of a block is of the batch that was decoded last."""
        file, numbers = self._batches(block, 0, int(self._source.lengths[block]))
        return self._last is not None and all(self._last[0] == (file, n) for n in numbers)

    def _fetch(self, block: int) -> dict[tuple[int, int], memoryview]:
        file, numbers = self._batches(block, 0, int(self._source.lengths[block]))
        return {(file, n): self._source.fetch(file, n, self._requests) for n in numbers}

    def _batches(self, block: int, start: int, stop: int) -> tuple[int, range]:
        """The file of a block, and the batches in it that hold these of its rows."""
        file = int(self._source.file_of_block[block])
        begin = int(self._source.begins[block])
        rows = self._source.batch_rows[file]
        first = int(np.searchsorted(rows, begin + start, side="right")) - 1
        return file, range(first, int(np.searchsorted(rows, begin + stop)))

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        """Rows ``start`` to ``stop`` of a block.

        Raises:
            DataError: they cannot be had, or not decoded.
            UnreachableError: the server does not answer, or denies access.
        """
        schema = self._source.schema
        if start == stop:
            return pa.Table.from_batches([], schema)
        found = self._ahead.take(block)
        if found is not None:
            self._fetched = found
        file, numbers = self._batches(block, start, stop)
        begin = int(self._source.begins[block])
        parts = []
        for number in numbers:
            first = int(self._source.batch_rows[file][number])
            batch = self._batch(file, number)
            low = max(0, begin + start - first)
            parts.append(batch.slice(low, begin + stop - first - low))
        return pa.Table.from_batches(parts, schema)

    def _batch(self, file: int, number: int) -> pa.RecordBatch:
        key = file, number
        if self._last is None or self._last[0] != key:
            fetched = self._fetched.pop(key, None)
            self._last = None  # two would take twice the memory
            self._last = key, self._source.batch(file, number, self._requests, fetched)
        return self._last[1]

    def close(self) -> None:
        """Let go of what was decoded last."""
        self._last, self._fetched = None, {}


def take_rows(
    take: Callable[[int, IntArray], pa.RecordBatch], firsts: IntArray, index: IntArray
) -> pa.Table:
    """The rows at ``index``, of one row or more.

    ``ChunkedArray.take`` may copy the whole column; a chunk's own takes what is asked.

    Args:
        take: gives rows of a chunk by the chunk's number and theirs in it.
        firsts: the number of each chunk's first row, and the number of rows, int64 ``[chunks + 1]``.
        index: numbers of rows, int64, in any order, with repeats.
    """
    which = np.searchsorted(firsts, index, side="right") - 1
    order = np.argsort(which, kind="stable")
    found, edges = np.unique(which[order], return_index=True)
    parts = []
    for number, places in zip(found.tolist(), np.split(order, edges[1:]), strict=True):
        parts.append(pa.Table.from_batches([take(number, index[places] - firsts[number])]))
    if len(parts) == 1:  # the one sort was stable, so that rows stand as they were asked for
        return parts[0]
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return gathered(pa.concat_tables(parts).combine_chunks(), back)
