"""Footers that were read before, in a small file: so that a start over many files reads none of them.

The file is an Arrow table, a row for each Parquet file: where it is, its size and time of change (or
etag), and of its footer what ``index.py`` needs, the checksum included. A row counts only while size
and stamp are what the listing says. A file that is damaged, or not ours, is as good as none.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.arrays import apart, one_chunk, python_to_arrow, to_arrow, to_numpy
from trainpipes.cache import SUFFIX, folder, index_path
from trainpipes.errors import ConfigError
from trainpipes.order import IntArray
from trainpipes.runtime.caching import sealed
from trainpipes.sources.files import FileList
from trainpipes.sources.listing import is_local

__all__ = ["FooterFile", "FooterTable", "Footer", "checked_index", "forget", "settled"]

log = logging.getLogger("trainpipes")

#: What our files say they are.
ABOUT = {"footers": 1}
#: Local files of which none is kept, unless it is asked for: to read them takes milliseconds.
FEW = 64
#: Nanoseconds within which a disk may give two changes of a file the same time.
TICK = 10_000_000
#: Rows of files that are not in the listing at hand, for each one that is; so many stay in any case.
OTHERS, SOME_OTHERS = 4, 10_000

#: Bytes of the shortest footer, more rows than a row group has, and more rows or bytes than a data set.
SMALLEST, MOST_ROWS, MOST = 8, 1 << 32, 2.0**62

COLUMNS = pa.schema(
    [
        ("path", pa.string()),
        ("stamp", pa.string()),
        ("size", pa.int64()),
        ("footer", pa.int64()),
        ("checksum", pa.int64()),
        ("rows", pa.list_(pa.int64())),
        ("group_bytes", pa.list_(pa.int64())),
        ("schema", pa.dictionary(pa.int32(), pa.binary())),
        ("sampled_rows", pa.int64()),
        ("leaves", pa.list_(pa.string())),
        ("leaf_bytes", pa.list_(pa.float64())),
    ]
)


@dataclass(frozen=True)
class Footer:
    """What is kept of one footer.

    Args:
        size: bytes of the file.
        footer: bytes of the footer.
        checksum: CRC-32 of the footer.
        rows: rows of each row group.
        group_bytes: uncompressed bytes of each row group.
        schema: the file's Arrow schema.
        sampled_rows: rows of the row groups that sizes in memory were told of.
        leaves: paths of the Parquet columns; empty where nothing was sampled.
        leaf_bytes: bytes of the sampled rows in memory, of each of these; NaN where not asked for.
    """

    size: int
    footer: int
    checksum: int
    rows: list[int]
    group_bytes: list[int]
    schema: pa.Schema
    sampled_rows: int = 0
    leaves: tuple[str, ...] = ()
    leaf_bytes: tuple[float, ...] = ()


class FooterTable:
    """Footers of several files, as columns.

    Args:
        table: with the columns of ``COLUMNS``.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table.unify_dictionaries().combine_chunks()

    def __len__(self) -> int:
        return len(self.table)

    @staticmethod
    def of(footers: Sequence[Footer], names: Sequence[str], stamps: Sequence[str]) -> FooterTable:
        """Footers of files with these names and stamps."""
        values = {"path": names, "stamp": stamps}
        for name in set(COLUMNS.names) - {*values, "schema"}:
            values[name] = [getattr(footer, name) for footer in footers]
        columns = {name: python_to_arrow(values[name], COLUMNS.field(name).type) for name in values}
        schemas: list[pa.Schema] = []
        numbers = []
        for footer in footers:
            equal = (n for n, schema in enumerate(schemas) if schema.equals(footer.schema))
            number = next(equal, len(schemas))
            if number == len(schemas):
                schemas.append(footer.schema)
            numbers.append(number)
        written = python_to_arrow(
            [schema.serialize().to_pybytes() for schema in schemas], pa.binary()
        )
        places = python_to_arrow(numbers, pa.int32())
        columns["schema"] = pa.DictionaryArray.from_arrays(places, written)
        return FooterTable(pa.table(columns, schema=COLUMNS))

    def column(self, name: str) -> Any:
        """A column's values as one Arrow array."""
        return one_chunk(self.table.column(name))

    def numbers(self, name: str) -> IntArray:
        """A column of integers, int64 ``[files]``."""
        return to_numpy(self.column(name)).astype(np.int64)

    def flat(self, name: str) -> tuple[IntArray, IntArray]:
        """A column of lists of integers: all of them, and where each file's begin, int64 ``[files + 1]``."""
        values, starts = apart(self.column(name))
        return to_numpy(values).astype(np.int64), starts.astype(np.int64)

    def schemas(self) -> list[tuple[int, pa.Schema]]:
        """The first file with each schema, and that schema."""
        column = self.column("schema")
        if not len(column):
            return []
        numbers, firsts = np.unique(to_numpy(column.indices), return_index=True)
        written = column.dictionary
        return [
            (first, pa.ipc.read_schema(written[number].as_buffer()))
            for first, number in sorted(zip(firsts.tolist(), numbers.tolist(), strict=True))
        ]

    def sample(self, file: int) -> tuple[int, list[str], list[float]]:
        """Rows sampled of a file, its Parquet columns, and bytes of these rows in each."""
        row = (
            self.table.slice(file, 1)
            .select(["sampled_rows", "leaves", "leaf_bytes"])
            .to_pylist()[0]
        )
        return row["sampled_rows"], row["leaves"], row["leaf_bytes"]

    def take(self, index: IntArray) -> FooterTable:
        return FooterTable(self.table.take(to_arrow(index)))

    @staticmethod
    def join(parts: Sequence[FooterTable]) -> FooterTable:
        return FooterTable(pa.concat_tables([part.table for part in parts]))


def with_more(footer: Footer, leaves: Sequence[str], leaf_bytes: Sequence[float]) -> Footer:
    """A footer with sizes of columns that were asked for earlier, too."""
    if tuple(leaves) != footer.leaves:
        return footer
    pairs = zip(footer.leaf_bytes, leaf_bytes, strict=True)
    return replace(footer, leaf_bytes=tuple(old if new != new else new for new, old in pairs))


class FooterFile:
    """The file in which footers of a data set are kept.

    Args:
        path: where.
        own: whether it is in the cache, for its user alone; else the user named it, and may share it.
    """

    def __init__(self, path: Path, own: bool) -> None:
        self.path = path
        self._own = own

    @staticmethod
    def of(files: FileList, index: str | bool | None) -> FooterFile | None:
        """The file for these files; None if there is none to be.

        Args:
            files: the data set.
            index: a file, or a folder for several; True for the cache's; None for the cache's if it pays;
                False for none.
        """
        root = folder()
        if index is False or root is None or not len(files):
            return None
        if isinstance(index, str):
            if index.endswith(SUFFIX):
                return FooterFile(Path(index).expanduser().absolute(), own=False)
            several = Path(index).expanduser().absolute()
            return FooterFile(several / f"{_digest(files)}{SUFFIX}", own=False)
        if index is None and len(files) < FEW and all(map(is_local, files.systems)):
            return None
        return FooterFile(index_path(root, _digest(files)), own=True)

    def find(self, files: FileList) -> tuple[FooterTable, IntArray]:
        """Footers of earlier, and which of them are those of the files, int64 ``[files]``; -1 where there
        is none, or the file has changed since."""
        rows = np.full(len(files), -1, dtype=np.int64)
        table = self._load()
        if table is None:
            return FooterTable(pa.Table.from_batches([], COLUMNS)), rows
        known = {name: row for row, name in enumerate(table.column("path").to_pylist())}
        stamps = table.column("stamp").to_pylist()
        sizes = table.numbers("size").tolist()
        listed = zip(files.names, files.stamps, files.sizes.tolist(), strict=True)
        for file, (name, stamp, size) in enumerate(listed):
            row = known.get(name, -1)
            if row >= 0 and stamp and stamps[row] == stamp and sizes[row] == size:
                rows[file] = row
        return table, rows

    def _load(self) -> FooterTable | None:
        try:
            table = sealed.read(self.path, ABOUT, own=self._own, check=_is_sound)
        except sealed.ForeignError as error:
            raise ConfigError(
                f"read_parquet(index={str(self.path)!r}) names a file that is there and no index of footers: "
                "name another one, or remove it",
                path=str(self.path),
            ) from error
        return None if table is None else FooterTable(table)

    def save(self, files: FileList, footers: FooterTable, read: int) -> None:
        """Keep the footers of the files, and those of others that are there. What cannot be written
        is left: it would only save time.

        Args:
            files: the data set.
            footers: of these.
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
        parts = [footers.take(np.flatnonzero(good).astype(np.int64))]
        earlier = self._load()  # others may have written since
        if earlier is not None:
            names = set(files.names)
            others = [n for n, p in enumerate(earlier.column("path").to_pylist()) if p not in names]
            most = max(SOME_OTHERS, OTHERS * len(files))
            parts.append(earlier.take(np.array(others[-most:], dtype=np.int64)))
        try:
            content = sealed.pack(FooterTable.join(parts).table, ABOUT)
            sealed.put(self.path, content, own=self._own)
        except OSError as error:
            log.info("footers cannot be kept in %s: %s", self.path, error)


def _is_sound(table: pa.Table) -> bool:
    """Whether a table can be what footers say: nothing missing, no number out of its range."""
    if not table.schema.equals(COLUMNS) or any(c.null_count for c in table.columns):
        return False
    footers = FooterTable(table)
    numbers = {name: footers.numbers(name) for name in ("size", "footer", "checksum")}
    lists = [footers.column(n) for n in ("rows", "group_bytes", "leaves", "leaf_bytes")]
    if any(column.flatten().null_count for column in lists):
        return False
    counts = [to_numpy(column.value_lengths()) for column in lists]
    rows, starts = footers.flat("rows")
    sizes, _ = footers.flat("group_bytes")
    leaves = to_numpy(footers.column("leaf_bytes").flatten())
    sampled = footers.numbers("sampled_rows")
    try:
        footers.schemas()
    except (pa.ArrowException, OSError):
        return False
    return bool(
        (counts[0] == counts[1]).all()
        and (counts[2] == counts[3]).all()
        and (numbers["footer"] >= SMALLEST).all()
        and (numbers["footer"] <= numbers["size"]).all()
        and ((numbers["checksum"] >= 0) & (numbers["checksum"] < 1 << 32)).all()
        and ((rows >= 0) & (rows < MOST_ROWS)).all()
        and (sizes >= 0).all()
        and not (leaves < 0).any()  # some are NaN
        and max(np.sum(each, dtype=np.float64) for each in (rows, sizes, leaves[leaves == leaves]))
        < MOST
        and (sampled >= 0).all()
        and (sampled <= np.add.reduceat(np.append(rows, 0), starts[:-1])).all()
    )


def _digest(files: FileList) -> str:
    """Stands for the lowest folder that holds all files."""
    shared = os.path.commonprefix(files.names).rpartition("/")[0]  # noqa: RUF071  (cut at a "/")
    return hashlib.sha256(os.fsencode(shared)).hexdigest()[:32]


def settled(files: FileList, which: Sequence[int]) -> int:
    """The time, ns, once local files that were just written could no more be written again without
    another time."""
    now = time.time_ns()
    local = [is_local(system) for system in files.systems]
    times = [int(files.stamps[n]) for n in which if local[int(files.system_of[n])]]
    left = max(times, default=0) + TICK - now
    if 0 <= left <= TICK:
        time.sleep((left + TICK / 10) / 1e9)
    return time.time_ns()


def forget(path: str | None) -> None:
    """Drop a file of footers, of which one was found to be out of date."""
    if path is not None:
        with suppress(OSError):
            os.unlink(path)


def checked_index(index: Any) -> str | bool | None:
    """The option ``index`` of a reader, as text if it is a path."""
    if index is None or isinstance(index, bool):
        return index
    if not isinstance(index, str | os.PathLike) or not os.fspath(index):
        raise ConfigError(
            f"read_parquet(index) is a file that ends in {SUFFIX}, a folder, True, False or None, got "
            f"{index!r}"
        )
    return str(os.fspath(index))
