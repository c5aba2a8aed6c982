from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import repeated
from trainpipes._internal.locks import cached_property
from trainpipes._internal.types import IntArray
from trainpipes.columns.arrays import gathered, take_rows
from trainpipes.columns.columns import with_numbers
from trainpipes.columns.content import table_digest
from trainpipes.errors import ConfigError
from trainpipes.errors.text import amount, shown
from trainpipes.interfaces.source import NumberedRowsSource
from trainpipes.interfaces.stage_kinds import Source
from trainpipes.sources.files.schema import Rows, fitted

#: Rows in a block, so that a shuffle has blocks to put in another order.
BLOCK_ROWS = 8192


class FromArrow(Source, has_blocks=True, random_access=True):
    """Rows of a ``pyarrow.Table`` (or record batch) in memory.

    The first state hashes all rows.

    Args:
        table: the rows.

    >>> import pyarrow as pa, trainpipes as tp
    >>> list(tp.from_arrow(pa.table({"x": [1, 2]})))
    [{'x': 1}, {'x': 2}]
    """

    free = frozenset({"table"})

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


class TableSource(NumberedRowsSource):
    """Rows of a table, or those at ``indices`` int64 ``[rows]``; with the types of ``schema``, if set."""

    by_number = False

    def __init__(self, table: pa.Table, block_rows: int, indices: IntArray | None = None) -> None:
        super().__init__(len(table) if indices is None else len(indices), block_rows)
        self.table, self.indices = table, indices
        self.row_bytes = table.nbytes / len(table) if len(table) else None
        self._keys: dict[int, str] = {}

    @cached_property
    def _chunks(self) -> tuple[list[pa.RecordBatch], IntArray]:
        batches = self.table.to_batches()
        return batches, np.cumsum([0, *map(len, batches)], dtype=np.int64)

    def slice(self, start: int, stop: int) -> pa.Table:
        if self.indices is not None:
            index = self.indices[start:stop]
            if not len(index) or (np.diff(index) != 1).any():
                return self._taken(index)
            start, stop = int(index[0]), int(index[-1]) + 1
        return self._fitted(self.table.slice(start, stop - start))

    def take(self, index: IntArray) -> pa.Table:
        return self._taken(index if self.indices is None else self.indices[index])

    def _taken(self, index: IntArray) -> pa.Table:
        if not len(index):
            return self._fitted(self.table.slice(0, 0))
        chunks, firsts = self._chunks
        return take_rows(lambda n, rows: self._fitted(gathered(chunks[n], rows)), firsts, index)

    def _fitted(self, rows: Rows) -> Rows:
        return rows if self.schema is None else fitted(rows, self.schema)

    def block_key(self, block: int) -> str:
        if block not in self._keys:
            self._keys[block] = table_digest(self.read(block, 0, int(self.lengths[block])))
        return self._keys[block]


class ArrowSource(TableSource):
    """A user's table, which a state knows by a digest of its content."""

    def __init__(self, table: pa.Table) -> None:
        super().__init__(table, BLOCK_ROWS)

    def fingerprint(self) -> dict[str, Any]:
        table = self.table
        names = table.schema.to_string(show_field_metadata=False, show_schema_metadata=False)
        digest = hashlib.sha256(names.encode())
        for position in (0, len(table) // 2, len(table) - 1):
            if 0 <= position < len(table):
                digest.update(_row_text(table.slice(position, 1)).encode())
        sample, content = digest.hexdigest()[:16], table_digest(table)[:16]
        return {"rows": len(table), "sample": sample, "content": content}

    def describe(self) -> list[tuple[str, str]]:
        return [*super().describe(), ("in memory", amount(self.table.nbytes))]


def _row_text(row: pa.Table) -> str:
    try:
        return repr(row.to_pylist())
    except ValueError:  # of a time in nanoseconds, which Python has none for
        return repr(with_numbers(row).to_pylist())
