"""Some rows of all files, evenly spread: stretches of consecutive rows, so that their order can be judged,
too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa

from trainpipes._internal.progress import counted
from trainpipes.columns.columns import table_of
from trainpipes.errors import SchemaError, TrainpipesError, UnreachableError
from trainpipes.kinds.source import Reader
from trainpipes.look.inspection.inspection import BadFile
from trainpipes.look.inspection.part import Found, Part, own_reason
from trainpipes.sources.files.each_file import reason

__all__ = ["Sample", "Stretch", "all_rows", "read_sample"]

#: Stretches of rows that a sample has: of files on this machine, and of remote ones, which cost some requests
#: each.
LOCAL_STRETCHES, REMOTE_STRETCHES = 64, 16
#: Rows of a stretch at least, so that their order can be seen.
STRETCH_ROWS = 16
#: Bytes of rows in memory that a sample has at most; of remote files.
LOCAL_BYTES, REMOTE_BYTES = 256 << 20, 32 << 20
#: How far into a row group a stretch may begin: all before it is decoded and dropped.
DEPTH_BYTES = 16 << 20
#: Bytes of rows that are read at a time where all are.
STEP_BYTES = 8 << 20
#: Rows of which each is a file of its own, and a request where that is remote.
REMOTE_FILES = 64


@dataclass(frozen=True)
class Stretch:
    """Consecutive rows of one file.

    Args:
        part: number of the file among those that can be read.
        first: number of the first row in the file.
        table: the rows.
    """

    part: int
    first: int
    table: pa.Table

    @cached_property
    def columns(self) -> dict[str, pa.ChunkedArray]:
        """The columns by name: to ask the table for each takes as long as it has columns."""
        return dict(zip(self.table.column_names, self.table.columns, strict=True))


@dataclass
class Sample:
    """Rows that were read.

    Args:
        stretches: in the order of the files.
        whole: whether they are all rows that there are.
        bad: files of which rows could not be decoded.
        unlike: rows that have other types than their file says, in the words of the error.
        beginnings: whether of some row groups only the beginning was looked at.
    """

    stretches: list[Stretch] = field(default_factory=list)
    whole: bool = False
    bad: list[BadFile] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    beginnings: bool = False

    @property
    def rows(self) -> int:
        return sum(len(stretch.table) for stretch in self.stretches)

    @cached_property
    def names(self) -> list[str]:
        """Names of the columns of all stretches."""
        return list(dict.fromkeys(name for each in self.stretches for name in each.columns))

    def chunks(self, name: str) -> list[pa.Array]:
        """A column's rows, in those stretches that have it."""
        having = (each.columns[name] for each in self.stretches if name in each.columns)
        return [chunk for column in having for chunk in column.chunks]


@dataclass(frozen=True)
class _Wanted:
    part: int
    block: int
    start: int
    stop: int


def read_sample(found: Found, rows: int, remote: bool, one_file_each: bool) -> Sample:
    """Read about ``rows`` rows.

    Args:
        found: the files.
        rows: how many, at most.
        remote: whether they are on another machine.
        one_file_each: whether each row is a file.

    Raises:
        UnreachableError: a server does not answer, or denies access.
    """
    there = int(found.lengths.sum())
    most = REMOTE_BYTES if remote else LOCAL_BYTES
    if found.row_bytes:
        rows = min(rows, max(1, int(most / found.row_bytes)))
    if remote and one_file_each:
        rows = min(rows, REMOTE_FILES)
    count = REMOTE_STRETCHES if remote else LOCAL_STRETCHES
    sample, taken = Sample(), 0
    broken: set[int] = set()
    places, sample.beginnings = _wanted(found.parts, rows, count)
    for part, wanted in counted(_by_part(places), "reading some rows of files", None, "files"):
        if taken > most:
            break
        for stretch in _read(found.parts[part], part, wanted, sample, broken):
            taken += stretch.table.nbytes
            sample.stretches.append(stretch)
            if taken > most:
                break
    sample.whole = sample.rows == there and all(part.counted for part in found.parts)
    return sample


def all_rows(found: Found, sample: Sample) -> Iterator[pa.Table]:
    """All rows, a few MB at a time; files that cannot be decoded are added to ``sample.bad``."""
    broken: set[int] = set()
    for number, part in enumerate(found.parts):
        step = max(1, int(STEP_BYTES / max(1.0, part.row_bytes)))
        wanted = [
            _Wanted(number, block, start, min(length, start + step))
            for block, length in enumerate(part.lengths.tolist())
            for start in range(0, length, step)
        ]
        for stretch in _read(part, number, wanted, sample, broken):
            yield stretch.table


def _wanted(parts: Sequence[Part], rows: int, count: int) -> tuple[list[_Wanted], bool]:
    """Which rows to read: ``count`` stretches at even distances, or all rows where there are no more. And
    whether of some blocks only the beginning is reached."""
    lengths = [part.lengths for part in parts]
    flat = np.concatenate([np.empty(0, np.int64), *lengths])
    ends = np.cumsum(flat)
    total = int(ends[-1]) if len(ends) else 0
    owner = np.repeat(np.arange(len(parts)), [len(each) for each in lengths])
    first = np.cumsum([0, *(len(each) for each in lengths)])
    if total <= rows:
        return [
            _Wanted(int(owner[n]), n - int(first[owner[n]]), 0, int(flat[n]))
            for n in np.flatnonzero(flat).tolist()
        ], False
    count = max(1, min(count, rows // STRETCH_ROWS))
    each = rows // count
    edges = np.linspace(0, total, count + 1)[:-1].astype(np.int64)
    blocks = np.searchsorted(ends, edges, side="right")
    wanted, beginnings = [], False
    for block in np.unique(blocks).tolist():
        part = int(owner[block])
        own = edges[blocks == block] - (ends[block] - flat[block])
        length = int(flat[block])
        # Only the beginning of a large row group is read: its stretches are spread over that.
        reach = min(
            length, max(len(own) * each, int(DEPTH_BYTES / max(1.0, parts[part].row_bytes)))
        )
        beginnings = beginnings or reach < length
        starts = np.minimum(own * (reach / length), max(0, reach - each)).astype(np.int64)
        at = 0
        for start in starts.tolist():
            begin = max(start, at)
            at = min(length, begin + each)
            if begin < at:
                wanted.append(_Wanted(part, block - int(first[part]), begin, at))
    return wanted, beginnings


def _by_part(wanted: Sequence[_Wanted]) -> Iterator[tuple[int, list[_Wanted]]]:
    parts = dict.fromkeys(one.part for one in wanted)
    for part in parts:
        yield part, [one for one in wanted if one.part == part]


def _read(
    part: Part, number: int, wanted: Sequence[_Wanted], sample: Sample, broken: set[int]
) -> Iterator[Stretch]:
    """The rows that are wanted of one file, as far as they can be read."""
    reader: Reader | None = None
    try:
        for one in wanted:
            try:
                if reader is None:
                    source = part.open()
                    reader = source.reader()
                data = reader.read(one.block, one.start, one.stop)
                table = table_of(data, "inspect_files()")
            except (UnreachableError, MemoryError):
                raise
            except SchemaError as error:
                if number not in broken:
                    sample.unlike.append(str(error))
                broken.add(number)
                return
            except Exception as error:
                name, said = part.name, reason(error)
                if isinstance(error, UnicodeEncodeError):
                    said = "its name is not UTF-8: rename it"
                if isinstance(error, TrainpipesError):
                    name, said = error.path or part.name, own_reason(error.path or part.name, error)
                if number not in broken:
                    sample.bad.append(BadFile(name, said))
                broken.add(number)
                return
            yield Stretch(number, int(part.lengths[: one.block].sum()) + one.start, table)
    finally:
        if reader is not None:
            reader.close()
