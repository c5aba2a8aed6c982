from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import repeated
from trainpipes._internal.text import amount, shown
from trainpipes.columns.arrays import gathered, take_rows
from trainpipes.columns.content import table_digest
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError
from trainpipes.kinds.source import Place, RandomAccessSource
from trainpipes.kinds.stage_kinds import Source

#: Rows in a block, so that a shuffle has blocks to put in another order.
BLOCK_ROWS = 8192


class FromArrow(Source):
    """Rows of a ``pyarrow.Table`` (or record batch) in memory.

    The first state hashes all rows.

    Args:
        table: the rows.

    >>> import pyarrow as pa, trainpipes as tp
    >>> list(tp.from_arrow(pa.table({"x": [1, 2]})))
    [{'x': 1}, {'x': 2}]
    """

    has_blocks = True
    free = frozenset({"table"})
    random_access = True

    table: pa.Table

    def check(self) -> None:
        if isinstance(self.table, pa.RecordBatch):
            self._set(table=pa.Table.from_batches([self.table]))
        if not isinstance(self.table, pa.Table):
            raise ConfigError(
                f"from_arrow(table) takes a pyarrow.Table, got {type(self.table).__name__}"
            )
        twice = repeated(self.table.column_names)
        if twice:
            raise ConfigError(
                f"from_arrow(table) takes columns of different names, got {shown(twice[0])} twice: rename "
                "them with table.rename_columns([...])"
            )

    def open(self) -> ArrowSource:
        return ArrowSource(self.table)

    def __repr__(self) -> str:
        return f"from_arrow({self.table.num_rows} rows of {', '.join(self.table.column_names)})"


class ArrowSource(RandomAccessSource):
    def __init__(self, table: pa.Table) -> None:
        self._table = table
        starts = np.arange(0, max(1, len(table)), BLOCK_ROWS, dtype=np.int64)
        self._starts = starts
        self.lengths = np.diff(np.append(starts, len(table)))
        self.row_bytes = table.nbytes / len(table) if len(table) else None
        self._keys: dict[int, str] = {}
        self._chunks: tuple[list[pa.RecordBatch], IntArray] | None = None  # and their first rows

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        return self._table.slice(int(self._starts[block]) + start, stop - start)

    def take(self, index: IntArray) -> pa.Table:
        if self._chunks is None:
            made = self._table.to_batches()
            self._chunks = made, np.cumsum([0, *(len(chunk) for chunk in made)])
        chunks, firsts = self._chunks
        if len(chunks) < 2:
            return gathered(self._table, index)
        return take_rows(lambda n, rows: gathered(chunks[n], rows), firsts, index)

    def place(self, block: int, row: int) -> Place:
        return Place(row=int(self._starts[block]) + row)

    def fingerprint(self) -> dict[str, Any]:
        names = self._table.schema.to_string(show_field_metadata=False, show_schema_metadata=False)
        digest = hashlib.sha256(names.encode())
        for position in (0, len(self._table) // 2, len(self._table) - 1):
            if 0 <= position < len(self._table):
                digest.update(repr(self._table.slice(position, 1).to_pylist()).encode())
        return {
            "rows": len(self._table),
            "sample": digest.hexdigest()[:16],
            "content": table_digest(self._table)[:16],
        }

    def block_key(self, block: int) -> str:
        if block not in self._keys:
            self._keys[block] = table_digest(self.read(block, 0, int(self.lengths[block])))
        return self._keys[block]

    def describe(self) -> list[tuple[str, str]]:
        return [("rows", f"{len(self._table):,}"), ("in memory", amount(self._table.nbytes))]
