"""An index of data files in a small file, so that a later start over many files opens none of them.

The file is an Arrow table, a row for each data file: where it is, its size and time of change (or etag), and
what a format has learned of it. A row counts only while size and stamp are those of the listing. An index
that is damaged, or not ours, is ignored.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import one_chunk, to_arrow, to_numpy
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.listing import is_local
from trainpipes.storage.cache import SUFFIX, folder, index_path
from trainpipes.storage.caching import checked_file

log = logging.getLogger("trainpipes")

#: Local files of which none is kept, unless it is asked for: to read them takes milliseconds.
FEW = 64
#: Nanoseconds within which a disk may give two changes of a file the same time.
TICK = 10_000_000
#: Rows of files that are not in the listing at hand, for each one that is; so many stay in any case.
OTHERS, SOME_OTHERS = 4, 10_000


@dataclass(frozen=True)
class IndexKind:
    """What the index of a format holds.

    Args:
        reader: the stage that keeps it, for messages.
        holds: what it is an index of, for messages.
        about: what its files say they are, of JSON types.
        schema: of the table; its first columns are ``path``, ``stamp`` and ``size``.
        is_sound: whether the values in a table of this schema make sense together.
        settings: options of the reader on which the index depends.
        least_bytes: local files that are together smaller than this are not worth keeping anything of.
    """

    reader: str
    holds: str
    about: dict[str, Any]
    schema: pa.Schema
    is_sound: Callable[[pa.Table], bool]
    settings: str = ""
    least_bytes: float = float("inf")


class IndexFile:
    """The file in which the index of a data set is kept.

    Args:
        path: where.
        own: whether it is in the cache, for its user alone; else the user named it, and may share it.
        kind: what is kept.
    """

    def __init__(self, path: Path, own: bool, kind: IndexKind) -> None:
        self.path = path
        self._own = own
        self._kind = kind

    @staticmethod
    def of(files: FileList, index: str | bool | None, kind: IndexKind) -> IndexFile | None:
        """The file for these files; None if there is none to be.

        Args:
            files: the data set.
            index: a file, or a folder for several; True for the cache's; None for the cache's if it pays;
                False for none.
            kind: what is to be kept.
        """
        root = folder()
        if index is False or root is None or not len(files):
            return None
        digest = _digest(files, kind.settings)
        if isinstance(index, str):
            if index.endswith(SUFFIX):
                return IndexFile(Path(index).expanduser().absolute(), False, kind)
            several = Path(index).expanduser().absolute()
            return IndexFile(several / f"{digest}{SUFFIX}", False, kind)
        small = len(files) < FEW and int(files.sizes.sum()) < kind.least_bytes
        if index is None and small and all(map(is_local, files.systems)):
            return None
        return IndexFile(index_path(root, digest), True, kind)

    def find(self, files: FileList) -> tuple[pa.Table, IntArray]:
        """What was kept earlier, and which of its rows are those of the files, int64 ``[files]``; -1 where
        there is none, or the file has changed since."""
        rows = np.full(len(files), -1, dtype=np.int64)
        table = self._load()
        if table is None:
            return pa.Table.from_batches([], self._kind.schema), rows
        known = {name: row for row, name in enumerate(table.column("path").to_pylist())}
        stamps = table.column("stamp").to_pylist()
        sizes = to_numpy(one_chunk(table.column("size"))).tolist()
        listed = zip(files.kept_names(), files.stamps, files.sizes.tolist(), strict=True)
        for file, (name, stamp, size) in enumerate(listed):
            row = known.get(name, -1)
            if row >= 0 and stamp and stamps[row] == stamp and sizes[row] == size:
                rows[file] = row
        return table, rows

    def _load(self) -> pa.Table | None:
        try:
            return checked_file.read(
                self.path, self._kind.about, own=self._own, check=self._kind.is_sound
            )
        except checked_file.ForeignError as error:
            raise ConfigError(
                f"{self._kind.reader}(index={str(self.path)!r}) names a file that exists, but is "
                f"not an index of {self._kind.holds}: name another one, or remove it",
                path=str(self.path),
            ) from error

    def save(self, files: FileList, table: pa.Table, read: int) -> None:
        """Keep what was learned of the files, beside what is there of others. If it cannot be written,
        nothing is raised: it would only save time.

        Args:
            files: the data set.
            table: a row for each of these.
            read: when the first of them was read, ns.
        """
        good = [
            bool(stamp) and size >= 0 for stamp, size in zip(files.stamps, files.sizes, strict=True)
        ]
        for file in np.flatnonzero(good).tolist():
            if is_local(files.systems[int(files.system_of[file])]):
                # It may have changed once more without another time.
                good[file] = int(files.stamps[file]) < read - TICK
        if not any(good):
            return
        parts = [table.take(to_arrow(np.flatnonzero(good).astype(np.int64)))]
        earlier = self._load()  # others may have written since
        if earlier is not None:
            names = set(files.kept_names())
            others = [n for n, p in enumerate(earlier.column("path").to_pylist()) if p not in names]
            most = max(SOME_OTHERS, OTHERS * len(files))
            parts.append(earlier.take(to_arrow(np.array(others[-most:], dtype=np.int64))))
        try:
            whole = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
            checked_file.write(self.path, lambda: [whole], self._kind.about, own=self._own)
        except OSError as error:
            log.info("the index cannot be kept in %s: %s", self.path, error)


def _digest(files: FileList, settings: str) -> str:
    """Stands for the lowest folder that holds all files, and for settings."""
    shared = os.path.commonprefix(files.known_names()).rpartition("/")[0]  # noqa: RUF071  (cut at a "/")
    known_by = f"{shared}\0{settings}" if settings else shared
    return hashlib.sha256(os.fsencode(known_by)).hexdigest()[:32]


def settled(files: FileList, which: Sequence[int]) -> int:
    """Wait until any further change of local files that were just written would show in their time of change;
    return the time, ns."""
    now = time.time_ns()
    local = [is_local(system) for system in files.systems]
    times = [int(files.stamps[n]) for n in which if local[int(files.system_of[n])]]
    left = max(times, default=0) + TICK - now
    if 0 <= left <= TICK:
        time.sleep((left + TICK / 10) / 1e9)
    return time.time_ns()


def forget(path: str | None) -> None:
    """Drop an index that was found to be out of date."""
    if path is not None:
        with suppress(OSError):
            os.unlink(path)
