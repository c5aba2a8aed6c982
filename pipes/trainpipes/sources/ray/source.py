"""The rows of a dataset of Ray Data, in blocks of our own.

Ray cuts blocks by how many processors a cluster has, and by bytes. The plan, and so the order of a shuffle,
must not depend on that: our blocks are of so many rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.amount import amount
from trainpipes.columns.content import table_digest
from trainpipes.kinds.source import Place, RowSource
from trainpipes.sources.files.file_rows import cut_evenly
from trainpipes.sources.ray.blocks import RayBlocks

__all__ = ["RaySource"]


class RaySource(RowSource):
    """A dataset's rows, in blocks. Can be pickled.

    Args:
        blocks: Ray's.
        block_rows: rows of a block of ours.
    """

    def __init__(self, blocks: RayBlocks, block_rows: int) -> None:
        made = blocks.made
        self._blocks = blocks
        self._block_rows = block_rows
        self._firsts = made.firsts
        self._begins = cut_evenly(made.rows, block_rows)
        self.lengths = np.diff(self._begins)
        self.schema: pa.Schema = made.schema
        self.row_bytes = made.bytes / made.rows if made.rows else None

    def __reduce__(self) -> Any:
        return RaySource, (self._blocks, self._block_rows)

    def reader(self) -> RayReader:
        return RayReader(self._blocks, self._begins)

    def place(self, block: int, row: int) -> Place:
        return Place(row=int(self._begins[block]) + row)

    def block_key(self, block: int) -> str:
        """A digest of the block's rows."""
        return table_digest(self.reader().read(block, 0, int(self.lengths[block])))

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": int(self._firsts[-1]), "content": self._blocks.digest}

    def describe(self) -> list[tuple[str, str]]:
        made = self._blocks.made
        blocks = len(made.refs)
        where = (
            f"{amount(made.bytes)} in Ray's object store, in {blocks:,} block{'s' * (blocks != 1)}"
        )
        return [("rows", f"{made.rows:,}"), ("dataset", where)]


class RayReader:
    """Reads one span's blocks, and keeps the one of Ray's that it read last.

    Args:
        blocks: Ray's.
        begins: first row of each block of ours.
    """

    def __init__(self, blocks: RayBlocks, begins: Any) -> None:
        self._blocks = blocks
        self._begins = begins
        self._last: tuple[int, pa.Table] | None = None

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        made = self._blocks.made
        row, end = int(self._begins[block]) + start, int(self._begins[block]) + stop
        number = int(np.searchsorted(made.firsts, row, side="right")) - 1
        parts = [pa.Table.from_batches([], made.schema)] if row == end else []
        while row < end:
            first = int(made.firsts[number])
            part = self._table(number).slice(row - first, end - row)
            parts.append(part)
            row, number = row + len(part), number + 1
        return pa.concat_tables(parts)

    def _table(self, number: int) -> pa.Table:
        if self._last is None or self._last[0] != number:
            self._last = None  # before the next one is there
            self._last = number, self._blocks.table(number)
        return self._last[1]

    def close(self) -> None:
        self._last = None
