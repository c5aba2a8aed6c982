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
        called: what the pieces are called.
        count: how many there are.
        rows: rows of a piece.
        bytes: bytes of a piece before compression.
    """

    called: str
    count: int
    rows: Spread
    bytes: Spread


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: the column's name.
        type: Arrow's name of its type; where files differ, the type that holds all values, or several, such
            as "int64 or string".
        nulls: the share of null values, 0 to 1; None if unknown.
        null_rows: number of rows with a null, in files that have the column; estimated if not all rows were
            looked at.
        nulls_counted: whether all rows were looked at, in footers or in the sample.
        bytes: compressed bytes in the files; None if unknown.
        least: the least value, by the footers, in short; None if they do not say.
        most: the greatest value, in the same way.
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
        columns: the columns that were measured; their lengths are added.
        unit: "tokens", "bytes", or "items" of lists.
        rows: number of rows that were measured.
        mean: the mean length of a row.
        percentiles: the length that this percentage of rows does not exceed, by "50", "90", "95", "99".
        most: the greatest length.
        total: the length of all rows in files that have these columns, estimated from those measured.
        edges: edges of a histogram's bars, one more than bars; a bar includes its lower edge, the last bar
            both.
        counts: rows in each bar.
        longer: the share of rows that are longer than this length, by "512", "1024" and so on.
        padding: the share of padding in batches of 8 random rows; None for bytes.
        packed_length: row length of a trial of packing.
        packed_padding: the share of padding in rows packed to that length.
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
        kind: a name for scripts that does not change, such as "nulls".
        text: the finding in words.
        cure: what to write or type; "" if there is nothing to do.
        paths: the first few files concerned.
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
    """What was found in data files. Prints as text.

    Attributes:
        reader: the function that reads the files, such as "read_parquet".
        files: number of files that can be read.
        bytes: bytes of all files.
        rows: rows of all files that can be read; None if unknown.
        rows_counted: whether rows were counted; else their number is an estimate.
        memory_bytes: estimated bytes of all rows in memory; None without rows.
        codecs: bytes in the files, by compression; "none" for uncompressed data.
        groups: the pieces that files are read by; None if there are none.
        columns: all columns, in the order of the first file.
        sampled_rows: number of rows that were looked at.
        beginnings: whether only the beginning of large row groups was looked at.
        shown: some of these rows, each value in short, by column.
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
        from trainpipes.look.inspection.as_text import as_text

        return as_text(self, width)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from trainpipes.look.inspection.as_html import as_html

        return as_html(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):  # the name of a file may be no text
        return value.encode("utf-8", "backslashreplace").decode()
    return value
