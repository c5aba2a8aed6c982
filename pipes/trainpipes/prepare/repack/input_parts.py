"""The first half of the work: the input, part by part, to temporary files.

A part is a stretch of the input's rows. Where the number of rows is known and nothing but their place decides
where they go, a part is sorted by that at once (a run). Else its rows are kept as they come, with the
hashes or keys that their places depend on, and sorted in a second step. What is there of a part is kept under
``read/00000.json``, which appears last: parts are made in any order, by any process, and again after a kill.
"""

from __future__ import annotations

import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.content_hash import checksum, row_hashes
from trainpipes.engine.layout import IntArray
from trainpipes.prepare.repack.duplicates import hash_rows, save_hashes
from trainpipes.prepare.repack.row_bytes import ROW_COST, row_bytes
from trainpipes.prepare.repack.sorted_keys import SortOrder, save_keys
from trainpipes.prepare.repack.sorted_runs import (
    CODEC,
    LEAST_PIECE,
    MOST_PIECE,
    Places,
    write_run,
)
from trainpipes.prepare.repack.temporary import TemporaryFiles

#: Bytes of a batch of rows that are kept as they come.
BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """A part of the input that is whole in temporary files.

    Attributes:
        first: number of its first row.
        rows: how many it has.
        bytes: of its rows in memory.
        checksum: of their content.
        columns: their schema, as Arrow writes it, in base 64.
        left_out: checksum of those that go nowhere.
        runs: names of its runs; None where its rows are kept as they come.
        again: rows that it has before itself, where duplicates are looked for.
        next: where the input goes on after it; None at its end.
    """

    first: int
    rows: int
    bytes: int
    checksum: int
    columns: str
    left_out: int = 0
    runs: list[str] | None = None
    again: int = 0
    next: dict[str, Any] | None = None

    @property
    def schema(self) -> pa.Schema:
        """Of its rows."""
        return pa.ipc.read_schema(pa.py_buffer(b64decode(self.columns)))


class Keeping:
    """Keeps the rows of one part as they come, and what their places depend on.

    Args:
        files: temporary files.
        number: of the part.
        first: number of its first row.
        by: columns by which rows are the same as others; None where that is not asked, () for all.
        order: by which rows are sorted, if they are.
    """

    def __init__(
        self,
        files: TemporaryFiles,
        number: int,
        first: int,
        by: Sequence[str] | None,
        order: SortOrder | None,
    ) -> None:
        self._files, self._number, self._first = files, number, first
        self._by, self._order = by, order
        self._hashes: list[Any] = []
        self._keys: list[pa.Table] = []
        self._rows = self._bytes = self._checksum = 0
        self._columns = ""
        self._open = ExitStack()
        self._writer: Any = None

    def add(self, tables: Sequence[pa.Table]) -> None:
        """The next rows."""
        table = pa.concat_tables(tables).combine_chunks()
        if self._writer is None:
            self._columns = _as_text(table.schema)
            name = f"kept/{self._number:05d}.arrow"
            options = pa.ipc.IpcWriteOptions(compression=CODEC)
            file = pa.PythonFile(self._open.enter_context(self._files.saving(name)), mode="w")
            self._writer = pa.ipc.new_stream(file, table.schema, options=options)
        size = max(1, table.nbytes)
        rows = max(1, len(table) * BATCH_BYTES // size)
        for start in range(0, len(table), rows):
            self._writer.write_table(table.slice(start, rows), max_chunksize=rows)
        self._checksum += checksum(row_hashes(table))
        if self._by is not None:
            self._hashes.append(hash_rows(table.select(list(self._by)) if self._by else table))
        if self._order is not None:
            keys = self._order.keys(table, self._first + self._rows)
            self._keys.append(pa.concat_tables([keys]).combine_chunks())
        self._rows += len(table)
        self._bytes += int(row_bytes(table).sum())

    def close(self) -> Part:
        """Keep what belongs to the part."""
        with self._open:
            self._writer.close()
        again = 0
        if self._by is not None:
            stem = f"hashes/{self._number:05d}"
            again = save_hashes(self._files, stem, np.concatenate(self._hashes), self._first)
        if self._order is not None:
            keys = pa.concat_tables(self._keys)
            save_keys(self._files, f"keys/{self._number:05d}", keys, self._order, BATCH_BYTES)
        return Part(
            self._first, self._rows, self._bytes, self._checksum % 2**64, self._columns, again=again
        )

    def abandon(self) -> None:
        """Remove the file of a part that did not become whole."""
        with suppress(_Abandoned), self._open:
            raise _Abandoned


class _Abandoned(Exception):
    """What a file that is not wanted any more is left by."""


def _as_text(schema: pa.Schema) -> str:
    return b64encode(schema.serialize().to_pybytes()).decode()


def read_kept(files: TemporaryFiles, number: int, most: int) -> Iterator[list[pa.Table]]:
    """The rows of a part that were kept as they came, up to so many bytes at a time."""
    held: list[pa.Table] = []
    size = 0
    with files.opened(f"kept/{number:05d}.arrow") as file:
        for batch in pa.ipc.open_stream(file):
            held.append(pa.Table.from_batches([batch]))
            size += held[-1].nbytes + ROW_COST * len(held[-1])
            if size >= most:
                yield held
                held, size = [], 0
    if held:
        yield held


class SortedPart:
    """Sorts the rows of one part by their places, as they come.

    Args:
        files: temporary files.
        number: of the part.
        first: number of its first row.
        places: where rows go.
        cuts: places before which a new piece begins.
        pieces: how many runs there are about, in all.
        unit: bytes of a run.
    """

    def __init__(
        self,
        files: TemporaryFiles,
        number: int,
        first: int,
        places: Places,
        cuts: IntArray,
        pieces: int,
        unit: int,
    ) -> None:
        self._files, self._first, self._places, self._cuts = files, first, places, cuts
        # No other try of the same part, which may have runs of another size, has these names.
        self._stem = f"runs/{number:05d}-{secrets.token_hex(4)}"
        self._piece = min(MOST_PIECE, max(LEAST_PIECE, unit // (4 * max(1, pieces))))
        self._rows = self._bytes = self._checksum = self._left_out = 0
        self._columns = ""
        self._runs: list[str] = []

    def add(self, tables: Sequence[pa.Table]) -> None:
        """The next rows, as a run."""
        rows = sum(map(len, tables))
        places = self._places(self._first + self._rows, rows)
        start = 0
        for table in tables:
            hashes = row_hashes(table)
            self._checksum += checksum(hashes)
            self._left_out += checksum(hashes[places[start : start + len(table)] < 0])
            self._bytes += int(row_bytes(table).sum())
            start += len(table)
        self._columns = self._columns or _as_text(tables[0].schema)
        name = f"{self._stem}-{len(self._runs)}"
        write_run(self._files, name, tables, places, self._cuts, self._piece)
        self._runs.append(name)
        self._rows += rows

    def close(self) -> Part:
        """What there is of the part."""
        runs, self._runs = self._runs, []
        return Part(
            self._first, self._rows, self._bytes, self._checksum % 2**64, self._columns,
            self._left_out % 2**64, runs,
        )  # fmt: skip

    def abandon(self) -> None:
        """Remove the runs of a part that did not become whole."""
        for name in self._runs:
            self._files.remove(f"{name}.arrow")
            self._files.remove(f"{name}.npy")
