"""CSV as rows: records of cells, of which a quoted one may hold line ends and delimiters.

Arrow parses. Where a record ends is found by NumPy: at a line end with an even number of quotes before it,
where quotes stand as they should, and else quote by quote.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from trainpipes._internal.checks import repeated
from trainpipes._internal.secrets import without_query
from trainpipes.engine.layout import IntArray
from trainpipes.sources.compressed.streams import SUFFIXES
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.text.exact_integers import refuse_rounded_cells
from trainpipes.sources.text.format import (
    MOST_ROW_BYTES,
    Bytes,
    Cutter,
    Start,
    TextFormat,
)
from trainpipes.sources.text.row_errors import BOM

FEED, RETURN = 10, 13
TABBED = (".tsv", ".tab")
#: Bytes that Arrow parses at once, unless a row has more: 4 MB take 1.6 times as long for each, since they do
#: not stay in the cache of the processor.
PARSED_BYTES = 1 << 20
#: Bytes of a cell that can be nothing but text.
LONG_CELL = 64 << 10


def delimiter_of(path: str) -> str:
    """The delimiter of a file, by its name.

    >>> delimiter_of("a.csv"), delimiter_of("a.tsv.gz")
    (',', '\\t')
    """
    name = without_query(path).lower()
    for ending in SUFFIXES.values():
        name = name.removesuffix(ending)
    return "\t" if name.endswith(TABBED) else ","


class RecordCutter:
    """Rows are records: lines, where line ends in quoted cells do not count. Empty lines are no records.

    A cell is quoted if a quote is its first byte; within it, two quotes stand for one. So does Arrow read it.

    Args:
        delimiter: what stands between cells.
        quote: what cells are quoted by; None for nothing.
    """

    def __init__(self, delimiter: str, quote: str | None) -> None:
        self._delimiter, self._quote = ord(delimiter), None if quote is None else ord(quote)
        self._inside = False  # a quoted cell
        self._last = FEED  # the last byte of what was read
        self._ended = False  # which was a quote that ended a cell
        self._length = 0  # bytes of the record at hand
        self._only_return = False  # it is one carriage return so far

    def stops(self, data: Bytes, newlines: IntArray) -> IntArray:
        if not len(data):
            return newlines
        ends = newlines
        if self._quote is not None:
            quotes = np.flatnonzero(data == self._quote)
            if len(quotes) or self._inside:
                ends = newlines[~self._quoted(data, quotes, newlines)]
            else:
                self._ended = False
        self._last = int(data[-1])
        starts = np.append(0, ends + 1)
        lengths = np.append(ends, len(data)) - starts
        first = data[np.minimum(starts, len(data) - 1)]
        lengths[0] += self._length
        only = (lengths == 1) & (first == RETURN)
        if self._length:
            only[0] = lengths[0] == 1 and self._only_return
        self._length, self._only_return = int(lengths[-1]), bool(only[-1])
        found: IntArray = ends[(lengths[:-1] > 0) & ~only[:-1]] + 1
        return found

    def _quoted(self, data: Bytes, quotes: IntArray, newlines: IntArray) -> Any:
        """Which line ends are within quoted cells, bool ``[newlines]``."""
        # By turns, quotes begin and end cells. One that begins a cell follows a delimiter, a line's end or,
        # as the second of two that stand for one, the quote before it.
        begins = quotes[int(self._inside) :: 2]
        last = self._last if self._last != self._quote or self._ended else -1
        before = np.where(begins > 0, data[np.maximum(begins, 1) - 1].astype(np.int16), last)
        good = (before == self._delimiter) | (before == FEED) | (before == self._quote)
        if good.all():
            odd = (np.searchsorted(quotes, newlines) + self._inside) % 2 == 1
            self._inside = (len(quotes) + self._inside) % 2 == 1
            self._ended = not self._inside and bool(data[-1] == self._quote)
            return odd
        return self._one_by_one(data, quotes, newlines)

    def _one_by_one(self, data: Bytes, quotes: IntArray, newlines: IntArray) -> Any:
        """The same where some quotes are within cells that are not quoted."""
        edges: list[int] = []
        inside, ended = self._inside, -1 if self._ended else -2
        for at in quotes.tolist():
            before = int(data[at - 1]) if at else self._last
            doubled = ended == at - 1
            if inside:
                inside, ended = False, at
                edges.append(at)
            elif doubled or before in (self._delimiter, FEED):
                inside = True
                edges.append(at)
        odd = (np.searchsorted(np.array(edges, np.int64), newlines) + self._inside) % 2 == 1
        self._inside, self._ended = inside, ended == len(data) - 1
        return odd

    def finish(self) -> bool:
        if self._inside:
            raise BadFileError("cut off: a quoted cell has no end")
        return self._length > 0 and not self._only_return


@dataclass(frozen=True)
class Csv(TextFormat):
    """Cells between delimiters.

    Args:
        delimiter: between cells; None for a tab in .tsv and .tab files, a comma in others.
        quote: what cells are quoted by; None for nothing.
        names: names of columns, of files without a line of them; None to take each file's first line.
        nulls: cells that are null where they are not quoted.
        exact: whether integers that floats would round are refused.
        max_row_bytes: of a row at most.
    """

    name: ClassVar[str] = "CSV"
    rule: ClassVar[str] = (
        "a row has a cell for each column, and quotes around cells with delimiters"
    )
    reader: ClassVar[str] = "read_csv"

    delimiter: str | None = None
    quote: str | None = '"'
    names: tuple[str, ...] | None = None
    nulls: tuple[str, ...] = ("",)
    exact: bool = False
    max_row_bytes: int = MOST_ROW_BYTES

    @property
    def settings(self) -> dict[str, Any]:
        return {
            **super().settings,
            "delimiter": self.delimiter,
            "quote": self.quote,
            "names": self.names,
            "nulls": self.nulls,
        }

    @property
    def each_names_columns(self) -> bool:
        return True

    def _delimiter(self, path: str) -> str:
        return self.delimiter or delimiter_of(path)

    def start(self, head: bytes, whole: bool, path: str) -> Start | None:
        at = len(BOM) if head.startswith(BOM) else 0
        if self.names is not None:
            return Start(at, self.names)
        view = np.frombuffer(head, np.uint8)[at:]
        cutter = self.cutter(Start(), path)
        try:
            stops = cutter.stops(view, np.flatnonzero(view == FEED)).tolist()
            if not stops and not whole:
                return None
            if not stops and cutter.finish():
                stops = [len(view)]
        except BadFileError:
            stops = []
        if not stops:
            return Start(at)
        return Start(at + stops[0], self._header(head[at : at + stops[0]], path))

    def _header(self, line: bytes, path: str) -> tuple[str, ...]:
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadFileError(
                f"byte {error.start:,} of its first line is not UTF-8: write it as UTF-8"
            ) from error
        if "\0" in text:
            raise BadFileError("its first line is no text: it holds a byte of zero")
        quoting: Any = csv.QUOTE_NONE if self.quote is None else csv.QUOTE_MINIMAL
        cells = csv.reader(
            text.strip("\r\n").splitlines(keepends=True),
            delimiter=self._delimiter(path),
            quotechar=self.quote,
            quoting=quoting,
        )
        try:
            names = tuple(next(cells))
        except csv.Error as error:
            raise BadFileError(f"its first line does not name columns: {error}") from error
        if next(cells, None) is not None:
            raise BadFileError(
                "its lines end with a carriage return alone, got no line feed: write line feeds, as by "
                "tr '\\r' '\\n'"
            )
        twice = repeated(names)
        if twice:
            raise BadFileError(
                f"its first line names a column {twice[0]!r} twice: {list(names)}; for a file without such a "
                "line give column_names=[...]"
            )
        return names

    def cutter(self, start: Start, path: str) -> Cutter:
        return RecordCutter(self._delimiter(path), self.quote)

    def parse(
        self, data: bytes, start: Start, path: str, schema: pa.Schema | None, strict: bool = False
    ) -> pa.Table:
        if data.startswith(BOM):  # Arrow leaves one out, and this is not the file's
            data = BOM + data
        try:
            found = self._parsed(data, start, path, schema, PARSED_BYTES)
        except pa.ArrowInvalid:  # a row may be longer; what else is wrong is said once more
            types = self._long_texts(data, start, path) if schema is None else schema
            found = self._parsed(data, start, path, schema, max(64, len(data) + 1), types)
        if self.exact:
            refuse_rounded_cells(found, data, partial(self._as_text, data, start, path))
        return found

    def _long_texts(self, data: bytes, start: Start, path: str) -> pa.Schema:
        """The columns with cells that are too long for anything but text. Arrow would try all types on them,
        in a time that grows with the square of their length."""
        texts = self._as_text(data, start, path, list(start.header))
        long = (name for name in texts.column_names if _longest(texts.column(name)) > LONG_CELL)
        return pa.schema([(name, pa.string()) for name in long])

    def _as_text(self, data: bytes, start: Start, path: str, names: list[str]) -> pa.Table:
        texts = pa.schema([(name, pa.string()) for name in names])
        return self._parsed(data, start, path, texts, max(64, len(data) + 1))

    def _parsed(
        self,
        data: bytes,
        start: Start,
        path: str,
        schema: pa.Schema | None,
        block_size: int,
        types: pa.Schema | None = None,
    ) -> pa.Table:
        return pcsv.read_csv(
            pa.BufferReader(data),
            pcsv.ReadOptions(use_threads=False, block_size=block_size, column_names=start.header),
            pcsv.ParseOptions(
                delimiter=self._delimiter(path),
                quote_char=self.quote or False,
                newlines_in_values=self.quote is not None,
            ),
            pcsv.ConvertOptions(
                check_utf8=False,  # it was looked at
                column_types=schema if types is None else types,
                include_columns=None if schema is None else schema.names,
                null_values=list(self.nulls),
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )

    def infer(self, data: bytes, start: Start, path: str) -> tuple[pa.Schema, list[float]]:
        table = self.parse(data, start, path, None)
        fields = [pa.field(f.name, pa.string()) if f.type == pa.null() else f for f in table.schema]
        return pa.schema(fields), [float(column.nbytes) for column in table.columns]

    def wider(self, one: pa.Field, other: pa.Field) -> pa.Field:
        """All cells are text, so that text holds what nothing else does."""
        if one.type.equals(other.type):
            return one
        numbers = [
            pa.types.is_integer(f.type) or pa.types.is_floating(f.type) for f in (one, other)
        ]
        return super().wider(one, other) if all(numbers) else one.with_type(pa.string())

    def empty(self, start: Start) -> pa.Schema:
        return pa.schema([(name, pa.string()) for name in start.header])

    def empty_as(self, schema: pa.Schema) -> None:
        header = tuple(schema.names)
        quoted = (self.delimiter or ",").join("" for _ in header)
        self.parse(quoted.encode() + b"\n", Start(0, header), "", schema)


def _longest(texts: Any) -> int:
    return pc.max(pc.binary_length(texts)).as_py() or 0
