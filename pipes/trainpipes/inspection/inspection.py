"""``Inspection``: what was found out of files of data. Plain values; prints as text, and in notebooks as
tables."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["BadFile", "Column", "Finding", "Groups", "Inspection", "Lengths", "Spread"]


@dataclass(frozen=True)
class Spread:
    """The least, the median and the greatest of several numbers."""

    least: int
    median: int
    most: int


@dataclass(frozen=True)
class Groups:
    """The pieces that files are read by: row groups, record batches or blocks.

    Attributes:
        called: what they are.
        count: how many.
        rows: of one.
        bytes: of one, as its values are before they are compressed.
    """

    called: str
    count: int
    rows: Spread
    bytes: Spread


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: as files have it.
        type: of its values, as Arrow calls it; where files differ, the one that holds all of theirs, or
            several, as "int64 or string".
        nulls: the part of its values that are null, 0 to 1; None where nothing says.
        null_rows: how many of the rows of files that have it, in proportion if not all were looked at.
        nulls_counted: whether all of these were, in footers or in the sample.
        bytes: in the files, compressed as they are; None where that is not known.
        least: the least value, as footers have it, in short; None where they do not say.
        most: the greatest one.
    """

    name: str
    type: str
    nulls: float | None
    null_rows: int | None
    nulls_counted: bool
    bytes: int | None = None
    least: str | None = None
    most: str | None = None


@dataclass(frozen=True)
class Lengths:
    """How long rows are.

    Attributes:
        columns: whose.
        unit: "tokens", "bytes", or "items" of lists.
        rows: that were measured.
        mean: per row.
        percentiles: of the rows so many percent are not longer, by "50", "90", "95", "99".
        most: the longest.
        total: of all rows of the files that have these columns, in proportion.
        edges: of the bars of a histogram, one more than there are bars; each has its lower edge, and the
            last one both.
        counts: rows in each bar.
        longer: the part of the rows that is longer than so many, by "512", "1024" and so on.
        padding: the part of batches of 8 random rows that is padding; None for bytes.
        packed_length: the length that rows were packed to, to see what is left.
        packed_padding: the part of packed rows that is padding.
        rows_of_files: rows of the files that have these columns.
    """

    columns: tuple[str, ...]
    unit: Literal["tokens", "bytes", "items"]
    rows: int
    mean: float
    percentiles: dict[str, int]
    most: int
    total: int
    edges: tuple[int, ...]
    counts: tuple[int, ...]
    longer: dict[str, float]
    padding: float | None = None
    packed_length: int | None = None
    packed_padding: float | None = None
    rows_of_files: int = 0


@dataclass(frozen=True)
class Finding:
    """Something to know before training.

    Attributes:
        level: "warning", or "note" for what is good to know and no fault.
        kind: a name that stays, such as "nulls", for scripts.
        text: what it is.
        cure: what to write or type; empty if there is nothing to do.
        paths: files concerned, the first few.
    """

    level: Literal["warning", "note"]
    kind: str
    text: str
    cure: str = ""
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class BadFile:
    """A file that cannot be read."""

    path: str
    reason: str


@dataclass(frozen=True)
class Inspection:
    """What was found out of files of data. Prints as text.

    Attributes:
        reader: the function that reads the files, such as "read_parquet".
        files: how many can be read.
        bytes: of all files, as they are.
        rows: of all files that can be read; None where nothing says.
        rows_counted: whether they were counted; else their number is an estimate.
        memory_bytes: of all rows in memory, in proportion; None without rows.
        codecs: what data is compressed with, by bytes in the files; "none" where it is not.
        groups: the pieces that files are read by; None where there are none.
        columns: all of them, in the order of the first file.
        sampled_rows: rows that were looked at.
        beginnings: whether of large row groups only the beginning was.
        shown: some of them, each value in short, by column.
        lengths: how long rows are.
        findings: what to know before training, warnings first.
        unreadable: files that cannot be read.
    """

    reader: str
    files: int
    bytes: int
    rows: int | None
    rows_counted: bool
    memory_bytes: int | None
    codecs: dict[str, int]
    groups: Groups | None
    columns: tuple[Column, ...]
    sampled_rows: int
    beginnings: bool
    shown: tuple[dict[str, str], ...]
    lengths: tuple[Lengths, ...]
    findings: tuple[Finding, ...]
    unreadable: tuple[BadFile, ...]

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that are faults."""
        return tuple(one for one in self.findings if one.level == "warning")

    @property
    def readable(self) -> bool:
        """Whether there are rows, and every file can be read."""
        return not self.unreadable and self.files > 0 and self.rows != 0

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, texts and numbers, as JSON has them."""
        found: dict[str, Any] = _plain(dataclasses.asdict(self))
        return found

    def text(self, width: int = 100) -> str:
        """All of it as text, in lines of about ``width`` characters."""
        from trainpipes.inspection.as_text import as_text

        return as_text(self, width)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from trainpipes.inspection.as_html import as_html

        return as_html(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):  # the name of a file may be no text
        return value.encode("utf-8", "backslashreplace").decode()
    return value
