"""How many rows are equal to another one, in memory that does not grow with the rows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from trainpipes.columns.content_hash import HashArray, row_hashes

__all__ = ["Repeats", "repeats_of"]

#: Hashes that are held in memory: 64 MiB. More go to temporary files, 8 bytes a row.
HELD = 8 << 20
#: Of these, so many: each is sorted by itself, so that 2 billion rows need 64 MiB.
FILES = 256
#: Bytes of rows that are hashed at a time: hashing takes some six times as many.
HASHED_BYTES = 16 << 20


class Repeats:
    """Counts rows that are equal to one before. A context manager: it may hold temporary files."""

    def __init__(self) -> None:
        self._held: list[HashArray] = []
        self._count = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.rows = 0

    def __enter__(self) -> Repeats:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, table: pa.Table) -> None:
        """Count these rows, too."""
        step = max(1, int(HASHED_BYTES / max(1.0, table.nbytes / max(1, len(table)))))
        for first in range(0, len(table), step):
            hashes = row_hashes(table.slice(first, step))
            self._held.append(hashes)
            self._count += len(hashes)
            self.rows += len(hashes)
        if self._count > HELD:
            self._spill()

    def count(self) -> int:
        """Rows that are equal to one before."""
        if self._folder is None:
            return self.rows - len(np.unique(_joined(self._held)))
        self._spill()
        distinct = sum(
            len(np.unique(np.fromfile(path, np.uint64)))
            for path in Path(self._folder.name).iterdir()
        )
        return self.rows - distinct

    def _spill(self) -> None:
        """Put what is held into files, by the upper bits of the hashes."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="trainpipes-inspect-")
        hashes = np.sort(_joined(self._held))
        upper = (hashes >> np.uint64(56)).astype(np.int64)
        edges = np.searchsorted(upper, np.arange(FILES + 1))
        for number in range(FILES):
            own = hashes[edges[number] : edges[number + 1]]
            if len(own):
                with open(Path(self._folder.name) / str(number), "ab") as file:
                    own.tofile(file)
        self._held, self._count = [], 0


def _joined(parts: list[HashArray]) -> HashArray:
    return np.concatenate([np.empty(0, np.uint64), *parts])


def repeats_of(tables: Iterable[pa.Table]) -> tuple[int, int]:
    """Rows, and how many of them are equal to one before."""
    with Repeats() as repeats:
        for table in tables:
            repeats.add(table)
        return repeats.rows, repeats.count()
