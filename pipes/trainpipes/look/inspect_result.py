"""``Inspection``: what ``inspect_files`` found, as plain values that print as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainpipes._internal.table import folded, table, terminal_width
from trainpipes.errors.text import amount, escaped

#: Columns, and unreadable files, that are printed; ``to_dict`` has them all.
MOST_COLUMNS, MOST_UNREADABLE = 40, 20

Rows = list[list[str]]


@dataclass(frozen=True)
class Column:
    """A column of the files.

    Attributes:
        name: of the column.
        type: of Arrow; several where files differ, such as "int64 or string".
        nulls: their share in the sample, 0 to 1; None if it has none of the column.
    """

    name: str
    type: str
    nulls: float | None


@dataclass(frozen=True)
class Lengths:
    """How long the rows of the sample are.

    Attributes:
        columns: whose lengths are added.
        unit: "tokens", "bytes", or "items" of lists of numbers.
        rows: that were measured.
        mean: of the lengths.
        percentiles: by "50", "90", "95", "99".
        most: the greatest length.
    """

    columns: list[str]
    unit: str
    rows: int
    mean: float
    percentiles: dict[str, int]
    most: int


@dataclass(frozen=True)
class Finding:
    """Something to fix before training.

    Attributes:
        kind: a name for scripts, such as "bad_rows".
        text: what was found.
        cure: the command or the code that fixes it.
    """

    kind: str
    text: str
    cure: str


@dataclass(frozen=True, repr=False)
class Inspection:
    """What was found in data files. Prints as tables.

    Attributes:
        reader: the function that reads the files, such as "read_parquet".
        files: number of files, without those that cannot be read.
        bytes: bytes of all files.
        rows: rows of all files that can be read.
        rows_counted: whether all rows were counted; else ``rows`` is an estimate.
        memory_bytes: estimated bytes of all rows in memory.
        row_groups: of Parquet files: their "count", and the "least", "median" and "most" rows of one; else
            None.
        columns: all columns, in the order of the first file.
        sampled_rows: number of rows in the sample.
        shown: some rows of the sample, each value in short, by column.
        lengths: how long rows are.
        findings: what to fix before training.
        unreadable: why files cannot be read, by path.
        bad_rows: how many rows of the sample cannot be used: lines that cannot be parsed, images
            that cannot be decoded.
        bad_places: why, of the first ten of them, by place.
    """

    reader: str
    files: int
    bytes: int
    rows: int
    rows_counted: bool
    memory_bytes: int
    row_groups: dict[str, int] | None
    columns: list[Column]
    sampled_rows: int
    shown: list[dict[str, str]]
    lengths: list[Lengths]
    findings: list[Finding]
    unreadable: dict[str, str]
    bad_rows: int = 0
    bad_places: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def readable(self) -> bool:
        """Whether every file and every row of the sample can be read, and there are rows."""
        return not self.unreadable and not self.bad_rows and self.rows > 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        width, lines = terminal_width(), []
        for rows in self._tables():
            lines += [table([list(map(escaped, row)) for row in rows], width), ""]
        for line in map(escaped, self._lines()):
            copied = line.startswith(("  ->", "cannot be read"))  # a command or a path
            lines += [line] if copied else folded(line, width)
        return "\n".join(lines)

    def _tables(self) -> Iterator[Rows]:
        about = "" if self.rows_counted else "about "
        summary = [
            ["files", f"{self.files:,} of {amount(self.bytes)}, for {self.reader}()"],
            ["rows", f"{about}{self.rows:,}, about {amount(self.memory_bytes)} in memory"],
        ]
        if self.row_groups:
            count, *sizes = (f"{value:,}" for value in self.row_groups.values())
            said = f"{count} of {' / '.join(sizes)} rows (least / median / most)"
            summary.append(["row groups", said])
        if self.sampled_rows != self.rows:
            summary.append(["looked at", f"a sample of {self.sampled_rows:,} rows"])
        yield summary
        if self.columns:
            rows = [[column.name, column.type, percent(column.nulls)] for column in self.columns]
            yield _cut([["column", "type", "nulls"], *rows])
        if names := dict.fromkeys(name for row in self.shown for name in row):
            head = ["", *(f"row {n + 1}" for n in range(len(self.shown)))]
            rows = [[name, *(row.get(name, "") for row in self.shown)] for name in names]
            yield _cut([head, *rows])
        if self.lengths:
            head = ["length of", "in", "mean", "50 / 90 / 95 / 99 %", "longest"]
            yield [head, *map(self._length, self.lengths)]

    def _length(self, lengths: Lengths) -> list[str]:
        chats = {c.name for c in self.columns if "list<" in c.type and "content:" in c.type}
        names = [f"{c} (texts, without the template)" if c in chats else c for c in lengths.columns]
        percentiles = " / ".join(f"{value:,}" for value in lengths.percentiles.values())
        return [
            " + ".join(names),
            lengths.unit,
            f"{lengths.mean:,.1f}",
            percentiles,
            f"{lengths.most:,}",
        ]

    def _lines(self) -> Iterator[str]:
        for path, reason in list(self.unreadable.items())[:MOST_UNREADABLE]:
            yield f"cannot be read: {path}: {reason}"
        if (more := len(self.unreadable) - MOST_UNREADABLE) > 0:
            yield f"cannot be read: {more:,} more files"
        for place, reason in self.bad_places.items():
            yield f"cannot be read: {place}: {reason}"
        for finding in self.findings:
            yield f"warning: {finding.text}"
            yield f"  -> {finding.cure}"


def percent(share: float | None) -> str:
    """A share as text: never 0 % for what is there, nor 100 % for what is not all.

    >>> percent(0.00001), percent(0.123), percent(0.99999), percent(1.0)
    ('under 0.1 %', '12.3 %', 'over 99.9 %', '100 %')
    """
    if share is None:
        return "?"
    if 0 < share < 0.001:
        return "under 0.1 %"
    if 0.999 < share < 1:
        return "over 99.9 %"
    return f"{100 * share:.1f} %".replace(".0 %", " %")


def _cut(rows: Rows) -> Rows:
    more = len(rows) - 1 - MOST_COLUMNS
    if more <= 0:
        return rows
    return [*rows[: MOST_COLUMNS + 1], [f"… {more:,} more columns", *[""] * (len(rows[0]) - 1)]]
