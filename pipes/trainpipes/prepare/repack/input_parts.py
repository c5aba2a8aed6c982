"""The first half of the work: the input, part by part, to temporary files.

A part is a stretch of the input's rows. Where the number of rows is known and nothing but their place decides
where they go, a part is sorted by that at once (a run). Else its rows are kept as they come, with the
hashes or keys that their places depend on, and sorted in a second step. What is there of a part is kept under
``read/00000.json``, which appears last: parts are made in any order, by any process, and again after a kill.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.order import IntArray
from trainpipes.prepare.repack.duplicates import hash_rows, save_hashes
from trainpipes.prepare.repack.row_bytes import ROW_COST, row_bytes
from trainpipes.prepare.repack.sorted_keys import SortOrder, save_keys
from trainpipes.prepare.repack.sorted_runs import (
    LEAST_PIECE,
    MOST_PIECE,
    Places,
    damaged,
    write_run,
)
from trainpipes.values.content_hash import checksum, row_hashes
from trainpipes.writers.output_file import writing

__all__ = ["Keeping", "Part", "SortedPart", "order_places", "read_kept", "save_json"]

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
        left_out: checksum of those that go nowhere.
        runs: names of its runs; None where its rows are kept as they come.
        next: where the input goes on after it; None at its end.
        notes: that the input needs to go on there.
    """

    first: int
    rows: int
    bytes: int
    checksum: int
    left_out: int = 0
    runs: list[str] | None = None
    next: dict[str, Any] | None = None
    notes: dict[str, Any] | None = None


def save_json(path: Path, content: dict[str, Any], asker: str) -> None:
    """Keep something; the file is there when it is whole."""
    part = path.with_name(f".{path.name}")
    with writing(path, asker):
        part.write_bytes(json.dumps(content).encode())
        os.replace(part, path)


class Keeping:
    """Keeps the rows of one part as they come, and what their places depend on.

    Args:
        folder: of temporary files.
        number: of the part.
        first: number of its first row.
        by: columns by which rows are the same as others; None where that is not asked, () for all.
        order: by which rows are sorted, if they are.
        asker: for messages.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        first: int,
        by: Sequence[str] | None,
        order: SortOrder | None,
        asker: str,
    ) -> None:
        self._folder, self._number, self._first = folder, number, first
        self._by, self._order, self._asker = by, order, asker
        self._path = folder / "kept" / f"{number:05d}.arrow"
        self._part = self._path.with_name(f".{self._path.name}")
        self._hashes: list[Any] = []
        self._keys: list[pa.Table] = []
        self._rows = self._bytes = self._checksum = 0
        self._file: Any = None
        self._writer: Any = None

    def add(self, tables: Sequence[pa.Table]) -> None:
        """The next rows."""
        table = pa.concat_tables(tables).combine_chunks()
        with writing(self._path, self._asker):
            if self._writer is None:
                options = pa.ipc.IpcWriteOptions(compression="lz4")
                self._file = open(self._part, "wb")  # noqa: SIM115  (``close`` does)
                self._writer = pa.ipc.new_file(self._file, table.schema, options=options)
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
        with writing(self._path, self._asker):
            self._writer.close()
            self._file.close()
            os.replace(self._part, self._path)
        stem = self._folder / "hashes" / f"{self._number:05d}"
        if self._by is not None:
            save_hashes(stem, np.concatenate(self._hashes), self._first, self._asker)
        if self._order is not None:
            path = self._folder / "keys" / f"{self._number:05d}.arrow"
            save_keys(path, pa.concat_tables(self._keys), self._order, BATCH_BYTES, self._asker)
        return Part(self._first, self._rows, self._bytes, self._checksum % 2**64)

    def abandon(self) -> None:
        """Close the file of a part that did not become whole."""
        if self._file is not None:
            self._file.close()


def read_kept(folder: Path, number: int, most: int, asker: str) -> Iterator[list[pa.Table]]:
    """The rows of a part that were kept as they came, up to so many bytes at a time."""
    path = folder / "kept" / f"{number:05d}.arrow"
    held: list[pa.Table] = []
    size = 0
    try:
        with pa.OSFile(str(path), "rb") as opened:
            file = pa.ipc.open_file(opened)
            for batch in range(file.num_record_batches):
                held.append(pa.Table.from_batches([file.get_batch(batch)]))
                size += held[-1].nbytes + ROW_COST * len(held[-1])
                if size >= most:
                    yield held
                    held, size = [], 0
    except (OSError, pa.ArrowException) as error:
        raise damaged(asker, f"{path} cannot be read ({error})") from error
    if held:
        yield held


class SortedPart:
    """Sorts the rows of one part by their places, as they come.

    Args:
        folder: of temporary files.
        number: of the part.
        first: number of its first row.
        places: where rows go.
        cuts: places before which a new piece begins.
        pieces: how many runs there are about, in all.
        unit: bytes of a run.
        asker: for messages.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        first: int,
        places: Places,
        cuts: IntArray,
        pieces: int,
        unit: int,
        asker: str,
    ) -> None:
        self._folder, self._number, self._first = folder, number, first
        self._places, self._cuts, self._asker = places, cuts, asker
        self._piece = min(MOST_PIECE, max(LEAST_PIECE, unit // (4 * max(1, pieces))))
        self._rows = self._bytes = self._checksum = self._left_out = 0
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
        name = f"{self._number:05d}-{len(self._runs)}"
        write_run(
            self._folder / "runs" / name, tables, places, self._cuts, self._piece, self._asker
        )
        self._runs.append(name)
        self._rows += rows

    def abandon(self) -> None:
        """Nothing is open."""

    def close(self) -> Part:
        """What there is of the part."""
        return Part(
            self._first, self._rows, self._bytes, self._checksum % 2**64, self._left_out % 2**64,
            self._runs,
        )  # fmt: skip


def order_places(files: Sequence[Path], starts: Sequence[int], first: int, stop: int) -> IntArray:
    """Where the rows of a stretch go, from files of sorted keys; -1 for those that are in none.

    Args:
        files: arrays int64 ``[rows, 2]``, of numbers of rows, ascending, and their places in the stretch.
        starts: the place at which each one begins.
        first: number of the first row.
        stop: and the one after the last.
    """
    found = np.full(stop - first, -1, dtype=np.int64)
    for path, start in zip(files, starts, strict=True):
        own = np.load(path, mmap_mode="r")
        low, high = np.searchsorted(own[:, 0], [first, stop])
        found[np.array(own[low:high, 0]) - first] = np.array(own[low:high, 1]) + start
    return found
