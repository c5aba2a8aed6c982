"""``Inspection``: what ``inspect_files`` found, as plain values that print as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainpipes._internal.table import folded, table, terminal_width
from trainpipes._internal.text import amount, escaped

#: Columns, and unreadable files, that are printed; ``to_dict`` has them all.
MOST_COLUMNS, MOST_UNREADABLE = 40, 20

Rows = list[list[str]]


@dataclass(frozen=True)
class RowGroups:
    """Row groups of Parquet files: how many, rows of the smallest, the median and the largest one, and bytes
    of the largest one before compression."""

    count: int
    least: int
    median: int
    most: int
    bytes: int


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: of the column.
        type: of Arrow; several where files differ, such as "int64 or string".
        nulls: their share in the sample, 0 to 1; None if it has none of the column.
        empty: the share of empty texts or lists in the sample; None for other types.
        bytes: estimated, of all its values in memory; None if the sample has none.
    """

    name: str
    type: str
    nulls: float | None
    empty: float | None
    bytes: int | None


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
        too_long: the share of rows longer than ``max_length``; None if it is not given.
    """

    columns: list[str]
    unit: str
    rows: int
    mean: float
    percentiles: dict[str, int]
    most: int
    too_long: float | None


@dataclass(frozen=True)
class Finding:
    """Something to fix before training.

    Attributes:
        kind: a name for scripts, such as "nulls".
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
        row_groups: row groups of Parquet files; None for other formats.
        columns: all columns, in the order of the first file.
        sampled_rows: number of rows in the sample.
        shown: some rows of the sample, each value in short, by column.
        lengths: how long rows are.
        findings: what to fix before training.
        unreadable: why files cannot be read, by path.
    """

    reader: str
    files: int
    bytes: int
    rows: int
    rows_counted: bool
    memory_bytes: int
    row_groups: RowGroups | None
    columns: list[Column]
    sampled_rows: int
    shown: list[dict[str, str]]
    lengths: list[Lengths]
    findings: list[Finding]
    unreadable: dict[str, str]

    @property
    def readable(self) -> bool:
        """Whether every file can be read, and there are rows."""
        return not self.unreadable and self.rows > 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        width = terminal_width()
        found = []
        for rows in (self._summary(), self._columns(), self._shown(), self._lengths()):
            if rows:
                found += [table([list(map(escaped, row)) for row in rows], width), ""]
        for line in map(escaped, self._lines()):
            copied = line.startswith(("  ->", "cannot be read"))  # a command or a path
            found += [line] if copied else folded(line, width)
        return "\n".join(found)

    def _summary(self) -> Rows:
        about = "" if self.rows_counted else "about "
        rows = f"{about}{self.rows:,}, about {amount(self.memory_bytes)} in memory"
        told = [
            ["files", f"{self.files:,} of {amount(self.bytes)}, for {self.reader}()"],
            ["rows", rows],
        ]
        if groups := self.row_groups:
            sizes = f"{groups.least:,} / {groups.median:,} / {groups.most:,}"
            told.append(["row groups", f"{groups.count:,} of {sizes} rows (least / median / most)"])
        if self.sampled_rows != self.rows:
            told.append(["looked at", f"a sample of {self.sampled_rows:,} rows"])
        return told

    def _columns(self) -> Rows:
        told = [["column", "type", "nulls", "empty", "in memory"]] if self.columns else []
        told += [
            [
                one.name,
                one.type,
                "?" if one.nulls is None else percent(one.nulls),
                "" if one.empty is None else percent(one.empty),
                "" if one.bytes is None else amount(one.bytes),
            ]
            for one in self.columns[:MOST_COLUMNS]
        ]
        return told + _more(len(self.columns) - MOST_COLUMNS, 5)

    def _shown(self) -> Rows:
        if not self.shown:
            return []
        names = list(dict.fromkeys(name for row in self.shown for name in row))
        told = [["", *(f"row {n + 1}" for n in range(len(self.shown)))]]
        told += [
            [name, *(row.get(name, "") for row in self.shown)] for name in names[:MOST_COLUMNS]
        ]
        return told + _more(len(names) - MOST_COLUMNS, len(self.shown) + 1)

    def _lengths(self) -> Rows:
        told = [["length of", "in", "mean", "50 / 90 / 95 / 99 %", "longest"]]
        told += [
            [
                " + ".join(map(self._with_note, one.columns)),
                one.unit,
                f"{one.mean:,.1f}",
                " / ".join(f"{value:,}" for value in one.percentiles.values()),
                f"{one.most:,}",
            ]
            for one in self.lengths
        ]
        return told if self.lengths else []

    def _with_note(self, column: str) -> str:
        kind = next((one.type for one in self.columns if one.name == column), "")
        chat = kind.startswith(("list<", "large_list<")) and (
            "content:" in kind or "value:" in kind
        )
        return f"{column} (texts, without the template)" if chat else column

    def _lines(self) -> Iterator[str]:
        for path, reason in list(self.unreadable.items())[:MOST_UNREADABLE]:
            yield f"cannot be read: {path}: {reason}"
        if (more := len(self.unreadable) - MOST_UNREADABLE) > 0:
            yield f"cannot be read: {more:,} more files"
        for one in self.findings:
            yield f"warning: {one.text}"
            yield f"  -> {one.cure}"


def percent(share: float) -> str:
    """A share as text: never 0 % for what is there, nor 100 % for what is not all.

    >>> percent(0.00001), percent(0.123), percent(0.99999), percent(1.0)
    ('under 0.1 %', '12.3 %', 'over 99.9 %', '100 %')
    """
    if 0 < share < 0.001:
        return "under 0.1 %"
    if 0.999 < share < 1:
        return "over 99.9 %"
    return f"{100 * share:.1f} %".replace(".0 %", " %")


def _more(count: int, width: int) -> Rows:
    return [[f"… {count:,} more columns", *[""] * (width - 1)]] if count > 0 else []
