"""Rows as arrays, one for each column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from trainpipes.engine.layout import IntArray
from trainpipes.errors import DataError
from trainpipes.storage.writers.array_blocks import Arrays, of_batch, of_rows
from trainpipes.storage.writers.epoch_runs import EpochRuns
from trainpipes.storage.writers.npy_files import ArrayColumns, Named

if TYPE_CHECKING:
    from trainpipes.pipeline import Pipeline


class ArrayGroups:
    #: Nobody can begin between two rows of these.
    cursor = None

    def __init__(
        self,
        blocks: Iterator[Arrays],
        named: Named,
        columns: ArrayColumns | None = None,
        row: int = 0,
    ) -> None:
        self._blocks, self._named = blocks, named
        self._columns, self.row = columns, row
        self._block: Arrays | None = None
        self._ends: IntArray = np.empty(0, np.int64)  # bytes up to the end of each row of the block
        self._used = 0

    def open(self, cursor: None, row: int) -> None:
        """Begin: they can be read once."""

    @property
    def schema(self) -> ArrayColumns:
        assert self._columns is not None
        return self._columns

    def group(self, most: int, most_bytes: int) -> tuple[Arrays, int] | None:
        while self._block is None or self._used == len(self._block):
            block, is_first = next(self._blocks, None), self._columns is None
            if block is None and is_first:
                raise DataError(
                    "write_memmap(): there are no rows to tell the columns from: check what filters them, or "
                    "give arrays or a table, which have columns without rows"
                )
            if block is None:
                return None
            self._columns = self._columns or ArrayColumns.of(block, *self._named)
            self._columns.check(block, self.row)
            self._block, self._used = block, 0
            self._ends = np.cumsum(self._columns.bytes_of(block))
            if is_first and not len(block):
                return block, 0
        start = self._used
        before = int(self._ends[start - 1]) if start else 0
        stop = int(np.searchsorted(self._ends, before + most_bytes)) + 1
        self._used = stop = min(stop, len(self._block), start + most)
        self.row += stop - start
        return self._block.slice(start, stop), int(self._ends[stop - 1]) - before


class EpochArrays(EpochRuns):
    def __init__(self, pipeline: Pipeline, caller: str, named: Named) -> None:
        self._named = named
        self._columns: ArrayColumns | None = None
        super().__init__(pipeline, caller)

    def know_columns(self) -> None:
        self.open()
        self.group(1, 1)
        self._columns = self.schema
        self.close()

    def _begin_at(self, row: int) -> None:
        self._groups = ArrayGroups(self._blocks(), self._named, self._columns, row)

    @property
    def schema(self) -> ArrayColumns:
        return self._groups.schema

    def group(self, most: int, most_bytes: int) -> tuple[Arrays, int] | None:
        found = self._groups.group(most, most_bytes)
        self.used += 0 if found is None else len(found[0])
        return found

    def _blocks(self) -> Iterator[Arrays]:
        while (data := self.next_run()) is not None:
            row = self._groups.row
            yield from of_rows(data, first=row) if isinstance(data, list) else [of_batch(data, row)]
