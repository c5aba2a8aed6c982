"""What is known of each file of a data set: of an earlier run, or learned now, by one process for all.

Owns nothing; used by the thread that opens a pipeline, before any row is read.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import to_arrow
from trainpipes.sources.files.index_file import IndexFile, settled
from trainpipes.sources.files.list_files import FileList
from trainpipes.storage.cache import LOCK, folder, index_path
from trainpipes.storage.caching.private_file import FileLock

log = logging.getLogger("trainpipes")

T = TypeVar("T")

#: Seconds between two looks whether another process has made the index, and until that is logged.
TICK, PATIENCE = 0.05, 2.0


class KeptIndex(Generic[T]):
    """What is known of each file of a data set, of earlier or from now on.

    Args:
        files: the data set.
        file: where it is kept; None if it is not.
        schema: of the table in which it is kept.
        table_of: makes such a table of entries, and the names and stamps of their files.

    Attributes:
        fresh: what was just learned, by the number of the file.
    """

    def __init__(
        self,
        files: FileList,
        file: IndexFile | None,
        schema: pa.Schema,
        table_of: Callable[[Sequence[T], Sequence[str], Sequence[str]], pa.Table],
    ) -> None:
        self.files, self.file = files, file
        self.fresh: dict[int, T] = {}
        self._table_of = table_of
        self._table = pa.Table.from_batches([], schema)
        self._rows = np.full(len(files), -1, dtype=np.int64)

    @property
    def path(self) -> str | None:
        return None if self.file is None else str(self.file.path)

    def complete(
        self, learn: Callable[[list[int]], None], lacking: Callable[[], list[int]] | None = None
    ) -> None:
        """Find what is there, and have the rest learned and kept. Of several processes of a machine one does
        so, the others wait for it; if it is killed, the next one does.

        Args:
            learn: is given the numbers of files, and enters what it learns in ``fresh``.
            lacking: tells of which files something is to be learned; if left out, of those of which
                nothing is known.
        """
        lacking = lacking or self._missing
        self._find()
        if not lacking():
            return
        with self._alone():
            wanted = lacking()
            if not wanted:
                return
            read = settled(self.files, wanted) if self.file is not None else 0
            try:
                learn(wanted)
            finally:
                self._save(read)  # what was read is not read again, even if the rest was in vain

    def _find(self) -> None:
        if self.file is None:
            return
        table, rows = self.file.find(self.files)
        if (rows[self._rows >= 0] >= 0).all():  # else somebody has dropped it
            self._table, self._rows = table, rows
            self.fresh = {n: entry for n, entry in self.fresh.items() if rows[n] < 0}

    def _missing(self) -> list[int]:
        return [n for n in np.flatnonzero(self._rows < 0).tolist() if n not in self.fresh]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other process of this machine make the same at the same time; then look again."""
        root = folder()
        if self.path is None or root is None:
            yield
            return
        digest = hashlib.sha256(self.path.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        lock = FileLock(index_path(root, digest).with_suffix(LOCK))
        began = time.monotonic()
        said = False
        try:
            while not lock.take():
                time.sleep(TICK)
                if not said and time.monotonic() - began > PATIENCE:
                    log.info("waiting for another process that makes the index %s", self.path)
                    said = True
        except OSError:
            pass  # nothing depends on it
        else:
            self._find()
        try:
            yield
        finally:
            lock.leave()

    def kept_row(self, file: int) -> pa.Table:
        """What was kept of a file earlier, a table of one row."""
        return self._table.slice(int(self._rows[file]), 1)

    def _known(self) -> list[int]:
        """Files of which something is known."""
        return [n for n in range(len(self.files)) if self._rows[n] >= 0 or n in self.fresh]

    def table(self) -> pa.Table:
        """All that is known, a row for each file that something is known of."""
        fresh = sorted(self.fresh)
        names, stamps = self.files.kept_names(), self.files.stamps
        table = self._table_of(
            [self.fresh[n] for n in fresh], [names[n] for n in fresh], [stamps[n] for n in fresh]
        )
        if not len(self._table):
            return table
        places = self._rows.copy()
        places[fresh] = len(self._table) + np.arange(len(fresh))
        whole = pa.concat_tables([self._table, table])
        return whole.take(to_arrow(places[places >= 0])).combine_chunks()

    def _save(self, read: int) -> None:
        """Keep what is known; ``read`` is when the first of the files was read, ns."""
        known = np.array(self._known(), dtype=np.int64)
        if self.file is not None and len(known):
            self.file.save(self.files.pick(known), self.table(), read)
