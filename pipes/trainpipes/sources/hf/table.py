from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.text import amount
from trainpipes.columns.arrays import to_numpy
from trainpipes.columns.content import table_digest
from trainpipes.sources.arrow.from_arrow import TableSource
from trainpipes.sources.files.schema import plain

#: Rows that a state knows a dataset by that is not in memory.
SAMPLED = 16


class HFTable(TableSource):
    def __init__(self, dataset: Any, block_rows: int) -> None:
        table, columns, indices = dataset.data.table, dict(dataset.format).get("columns"), None
        if columns is not None:
            table = table.select([name for name in table.column_names if name in columns])
        if dataset._indices is not None:
            indices = to_numpy(dataset._indices.column(0)).astype(np.int64, copy=False)
        super().__init__(table, block_rows, indices)
        self.schema: pa.Schema = pa.schema([plain(field) for field in table.schema])
        self._dataset, self._block_rows = dataset, block_rows

    def __reduce__(self) -> Any:
        return HFTable, (self._dataset, self._block_rows)

    def fingerprint(self) -> dict[str, Any]:
        found: dict[str, Any] = {"rows": self.rows, "columns": _digest(str(self.schema).encode())}
        if self.indices is not None:
            found["indices"] = _digest(np.ascontiguousarray(self.indices, "<i8").tobytes())
        if not self._dataset.cache_files:
            found["content"] = table_digest(self.table)[:16]
        elif self.rows:
            places = np.linspace(0, self.rows - 1, SAMPLED).astype(np.int64)
            found["sample"] = table_digest(self.take(places))[:16]
        return found

    def describe(self) -> list[tuple[str, str]]:
        where = (
            f"{len(self._dataset.cache_files):,} files" if self._dataset.cache_files else "memory"
        )
        lines = [*super().describe(), ("dataset in", where)]
        if self.indices is not None:
            lines.append(("indices", f"{self.rows:,} of a table of {len(self.table):,} rows"))
        if self.row_bytes is not None:
            lines.append(("in memory", f"{amount(self.row_bytes)} a row"))
        return lines


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
