"""``Inspection``: what ``inspect_files`` found, as plain values that print as tables."""

from __future__ import annotations

import dataclasses
import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from trainpipes._internal.text import amount

#: Columns, and unreadable files, that are printed; ``to_dict`` has them all.
MOST_COLUMNS, MOST_UNREADABLE = 40, 20
#: Characters of a line where there is no terminal.
WIDTH = 100

Rows = list[list[str]]


@dataclass(frozen=True)
class RowGroups:
    """Row groups of Parquet files.

    Attributes:
        count: how many there are.
        least: rows of the smallest one.
        median: rows of the median one.
        most: rows of the largest one.
        bytes: bytes of the largest one before compression.
    """

    count: int
    least: int
    median: int
    most: int
    bytes: int


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: the column's name.
        type: Arrow's name of its type; several where files differ, such as "int64 or string".
        nulls: the share of null values, 0 to 1, by the footers or else the sample; None if unknown.
        empty: the share of empty texts or lists in the sample; None for other types.
        bytes: compressed bytes in all Parquet files; None for other formats.
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
        columns: the measured columns; their lengths are added.
        unit: "tokens", "bytes", or "items" of lists of numbers.
        rows: number of measured rows.
        mean: the mean length.
        percentiles: the length that this percentage of rows does not exceed, by "50", "90", "95", "99".
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
    """What was found in data files. Prints as tables, also in notebooks.

    Attributes:
        reader: the function that reads the files, such as "read_parquet".
        files: number of files, without those that cannot be read.
        bytes: bytes of all files.
        rows: rows of all files that can be read.
        rows_counted: whether all rows were counted; else ``rows`` is an estimate.
        memory_bytes: estimated bytes of all rows in memory.
        codecs: compressed bytes in Parquet files, by codec.
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
    codecs: dict[str, int]
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
        """All of it as JSON has it."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        if find_spec("rich") is None:
            return "\n".join(self._plain_lines())
        from rich.console import Console

        width = shutil.get_terminal_size((WIDTH, 0)).columns
        console = Console(color_system=None, width=width, force_jupyter=False)
        with console.capture() as printed:
            console.print(self, crop=False)
        return "\n".join(map(str.rstrip, printed.get().splitlines()))

    def _repr_html_(self) -> str | None:
        if find_spec("rich") is None:
            return None
        from rich.console import Console

        console = Console(file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False)
        console.print(self, crop=False)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table
        from rich.text import Text

        for heads, rows in self._tables():
            table = Table(box=None, pad_edge=False, show_header=bool(heads))
            for n in range(len(rows[0])):
                table.add_column(heads[n] if heads else "", overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row))
            yield table
            yield ""
        for line in self._lines():
            copied = line.startswith(("  ->", "cannot be read"))  # a command or a path
            yield Text(line, no_wrap=copied, overflow="ignore" if copied else "fold")

    def _plain_lines(self) -> Iterator[str]:
        for heads, rows in self._tables():
            for row in [heads, *rows] if heads else rows:
                yield "  ".join(row)
            yield ""
        yield from self._lines()

    def _tables(self) -> Iterator[tuple[list[str], Rows]]:
        """The tables, as heads and rows of legible text."""
        for heads, rows in (
            ([], self._summary()),
            (["column", "type", "nulls", "empty", "size"], self._columns()),
            ([f"row {n + 1}" for n in range(len(self.shown))], self._shown()),
            (["length of", "in", "mean", "50 / 90 / 95 / 99 %", "longest"], self._lengths()),
        ):
            if rows:
                padding = [""] * (len(rows[0]) - len(heads)) if heads else []
                yield padding + heads, [list(map(_legible, row)) for row in rows]

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
        if total := sum(self.codecs.values()):
            said = [f"{name} {percent(size / total)}" for name, size in self.codecs.items()]
            told.append(["compression", ", ".join(said)])
        if self.sampled_rows != self.rows:
            told.append(["looked at", f"a sample of {self.sampled_rows:,} rows"])
        return told

    def _columns(self) -> Rows:
        told = [
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
        told = [[name, *(row.get(name, "") for row in self.shown)] for name in names[:MOST_COLUMNS]]
        return told + _more(len(names) - MOST_COLUMNS, len(self.shown) + 1)

    def _lengths(self) -> Rows:
        return [
            [
                " + ".join(one.columns),
                one.unit,
                f"{one.mean:,.1f}",
                " / ".join(f"{value:,}" for value in one.percentiles.values()),
                f"{one.most:,}",
            ]
            for one in self.lengths
        ]

    def _lines(self) -> Iterator[str]:
        for path, reason in list(self.unreadable.items())[:MOST_UNREADABLE]:
            yield _legible(f"cannot be read: {path}: {reason}")
        if (more := len(self.unreadable) - MOST_UNREADABLE) > 0:
            yield f"cannot be read: {more:,} more files"
        for one in self.findings:
            yield _legible(f"warning: {one.text}")
            yield _legible(f"  -> {one.cure}")


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


def _legible(text: str) -> str:
    """A text with escapes for control characters, which could move the cursor or change the terminal.

    >>> _legible("a\\x1b[31m\\nb")
    'a\\\\x1b[31m\\\\nb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
