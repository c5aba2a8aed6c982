from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.text import amount
from trainpipes.columns.arrays import gathered, one_chunk, take_rows, to_numpy
from trainpipes.columns.content import table_digest
from trainpipes.engine.layout import IntArray
from trainpipes.kinds.source import Place, RandomAccessSource
from trainpipes.sources.files.file_rows import cut_evenly
from trainpipes.sources.files.schema import fitted, plain

#: Rows that a state knows a dataset by that is not in memory.
SAMPLED = 16


class HFTable(RandomAccessSource):
    def __init__(self, dataset: Any, block_rows: int) -> None:
        self._dataset = dataset
        self._block_rows = block_rows
        table: pa.Table = dataset.data.table
        columns = dict(dataset.format).get("columns")
        if columns is not None:
            table = table.select([name for name in table.column_names if name in columns])
        self.schema: pa.Schema = pa.schema([plain(field) for field in table.schema])
        self._whole = table
        self._chunks: list[pa.RecordBatch] = [c for c in table.to_batches() if len(c)]
        self._firsts: IntArray = np.cumsum([0, *map(len, self._chunks)], dtype=np.int64)
        self._indices: IntArray | None = None
        if dataset._indices is not None:
            found = one_chunk(dataset._indices.column(0))
            self._indices = to_numpy(found).astype(np.int64, copy=False)
        self._rows = len(table) if self._indices is None else len(self._indices)
        self._begins = cut_evenly(self._rows, block_rows)
        self.lengths = np.diff(self._begins)
        self.row_bytes = table.nbytes / len(table) if len(table) else None

    def __reduce__(self) -> Any:
        return HFTable, (self._dataset, self._block_rows)

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        first = int(self._begins[block])
        if self._indices is None:
            return self._slice(first + start, first + stop)
        index = self._indices[first + start : first + stop]
        if len(index) and (np.diff(index) == 1).all():
            return self._slice(int(index[0]), int(index[-1]) + 1)
        return self._taken(index)

    def take(self, index: IntArray) -> pa.Table:
        return self._taken(index if self._indices is None else self._indices[index])

    def _slice(self, start: int, stop: int) -> pa.Table:
        return fitted(self._whole.slice(start, stop - start), self.schema)

    def _taken(self, index: IntArray) -> pa.Table:
        if not len(index):
            return pa.Table.from_batches([], self.schema)
        return take_rows(
            lambda number, rows: fitted(gathered(self._chunks[number], rows), self.schema),
            self._firsts,
            index,
        )

    def place(self, block: int, row: int) -> Place:
        return Place(row=int(self._begins[block]) + row)

    def block_key(self, block: int) -> str:
        rows = self.read(block, 0, int(self.lengths[block]))
        return table_digest(rows)

    def fingerprint(self) -> dict[str, Any]:
        found: dict[str, Any] = {"rows": self._rows, "columns": _digest(str(self.schema).encode())}
        if self._indices is not None:
            found["indices"] = _digest(np.ascontiguousarray(self._indices, "<i8").tobytes())
        if not self._dataset.cache_files:
            found["content"] = table_digest(self._whole)[:16]
        elif self._rows:
            places = np.linspace(0, self._rows - 1, SAMPLED).astype(np.int64)
            found["sample"] = table_digest(self.take(places))[:16]
        return found

    def describe(self) -> list[tuple[str, str]]:
        where = (
            f"{len(self._dataset.cache_files):,} files" if self._dataset.cache_files else "memory"
        )
        lines = [("rows", f"{self._rows:,}"), ("dataset in", where)]
        if self._indices is not None:
            lines.append(("indices", f"{self._rows:,} of a table of {len(self._whole):,} rows"))
        if self.row_bytes is not None:
            lines.append(("in memory", f"{amount(self.row_bytes)} a row"))
        return lines


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
