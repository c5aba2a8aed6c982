"""Arrow parses CSV. NumPy finds where records end: at line ends with an even number of quotes before them."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from trainpipes._internal.checks import Each, IntArray, column_names, repeated, text
from trainpipes.columns.arrays import to_arrow
from trainpipes.columns.types import Rule
from trainpipes.errors import without_query
from trainpipes.interfaces.quarantine import OnBadRow
from trainpipes.sources.compressed import SUFFIXES
from trainpipes.sources.files.formats import BadFileError
from trainpipes.sources.read_text import TextReader
from trainpipes.sources.text_cutters import Cutter, RecordCutter, integer, refuse_rounded
from trainpipes.sources.text_format import TextFormat
from trainpipes.sources.text_pieces import BOM, MAX_ROW_BYTES, Start, other_mark, row_bytes

TABBED = (".tsv", ".tab")
#: Bytes that Arrow parses at once, unless a row has more: 4 MB take 1.6 times as long for each, since they do
#: not stay in the cache of the processor.
PARSED_BYTES = 1 << 20
#: Bytes of a cell that can be nothing but text.
LONG_CELL = 64 << 10
INTEGER_CELL = re.compile(r"\s*[+-]?\d{16,}\s*")


class ReadCsv(TextReader):
    r"""Reads CSV, TSV and similar files as Arrow rows. They may be compressed (.gz, .zst, .bz2, .xz).

    Each file's first line names its columns. A quoted cell may hold delimiters, line ends, and doubled
    quotes. An empty cell is null, ``""`` the empty text. Empty lines are skipped.

    Args:
        columns: names of columns; None for all, which all files must then have.
        delimiter: a character; if left out, a tab in .tsv and .tab files, a comma in others.
        quote: the quote character; None if cells are not quoted.
        column_names: names of the columns, for files without a header line.
        null_values: unquoted cells that mean null, such as ``["", "NA"]``.
        schema, infer, block_rows, max_row_bytes, errors, on_error, index, storage_options: as in
            ``read_json``.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.csv"
    >>> _ = path.write_text('id,text\n1,"Hello,\nyou"\n2,\n3,""\n')
    >>> list(tp.list_files(path).read_csv())
    [{'id': 1, 'text': 'Hello,\nyou'}, {'id': 2, 'text': None}, {'id': 3, 'text': ''}]
    """

    columns: Sequence[str] | None = None
    _: KW_ONLY
    delimiter: str | None = None
    quote: str | None = '"'
    column_names: Sequence[str] | None = None
    null_values: Annotated[Sequence[str], Each(text)] = ("",)
    schema: pa.Schema | None = None
    infer: Literal["first", "all"] = "first"
    block_rows: int | None = None
    max_row_bytes: Annotated[int | str, row_bytes] = MAX_ROW_BYTES
    errors: Literal["strict", "replace"] = "strict"
    on_error: OnBadRow = "raise"
    index: str | os.PathLike[str] | bool | None = None
    storage_options: Mapping[str, Any] | None = None

    def check(self) -> None:
        super().check()
        for name in ("delimiter", "quote"):
            value = self.options[name]
            good = value is None or _is_mark(value)
            rule = "one ASCII character that ends no line, or None (a map() of read_text() splits by more)"
            self._require(good, name, rule)
        other = self.quote is None or self.quote not in (self.delimiter or ",\t")
        self._require(other, "quote", "another character than the delimiter")
        self._set(null_values=tuple(self.null_values))
        if self.column_names is not None:
            self._set(column_names=column_names(self.column_names, "read_csv(column_names)"))

    @property
    def form(self) -> TextFormat:
        return Csv(self.options)


def _is_mark(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 1 and value.isascii() and value not in "\0\r\n"


def delimiter_of(path: str) -> str:
    name = without_query(path).lower()
    for ending in SUFFIXES.values():
        name = name.removesuffix(ending)
    return "\t" if name.endswith(TABBED) else ","


class Csv(TextFormat):
    """CSV files as a format."""

    name = "CSV"
    rule: ClassVar[str] = (
        "a row has a cell for each column, and quotes around cells with delimiters"
    )
    reader: ClassVar[str] = "read_csv"
    names_columns: ClassVar[bool] = True
    type_rule: ClassVar[Rule] = "texts"
    empty: ClassVar[pa.DataType] = pa.string()

    def rule_for(self, row: bytes, start: Start) -> str:
        mark = other_mark(start.names)
        return (
            f"{self.rule} (if {mark!r} parts them, take delimiter={mark!r})" if mark else self.rule
        )

    def start(self, head: bytes, whole: bool, path: str) -> Start | None:
        at = len(BOM) if head.startswith(BOM) else 0
        delimiter = self.options["delimiter"] or delimiter_of(path)
        if (names := self.options["column_names"]) is not None:
            return Start(at, names, delimiter)
        cutter = RecordCutter(delimiter, self.options["quote"])
        stops = cutter.stops(head[at:])[0].tolist()
        if not stops and not whole:
            return None
        if not stops and (cutter.inside or not cutter.finish()):
            return Start(at, kind=delimiter)
        stop = at + stops[0] if stops else len(head)
        return Start(stop, self._header(head[at:stop], delimiter), delimiter)

    def _header(self, line: bytes, delimiter: str) -> tuple[str, ...]:
        try:
            text = line.decode("utf-8", "replace" if self.replace else "strict")
        except UnicodeDecodeError as error:
            raise BadFileError(
                f"byte {error.start:,} of its first line is not UTF-8: write it as UTF-8"
            ) from error
        if "\0" in text:
            raise BadFileError("its first line is no text: it holds a byte of zero")
        quote, lines = self.options["quote"], io.StringIO(text.strip("\r\n"), newline="")
        quoting: Any = csv.QUOTE_NONE if quote is None else csv.QUOTE_MINIMAL
        cells = csv.reader(lines, delimiter=delimiter, quotechar=quote, quoting=quoting)
        try:
            names = tuple(next(cells))
        except csv.Error as error:
            raise BadFileError(f"its first line does not name columns: {error}") from error
        if next(cells, None) is not None:
            raise BadFileError(
                "its lines end with a carriage return alone, got no line feed: write line feeds, as by "
                "tr '\\r' '\\n'"
            )
        if twice := repeated(names):
            raise BadFileError(
                f"its first line names a column {twice[0]!r} twice: {list(names)}; for a file without such a "
                "line give column_names=[...]"
            )
        return names

    def cutter(self, start: Start) -> Cutter:
        return RecordCutter(start.kind, self.options["quote"])

    def parse(
        self, data: bytes, start: Start, schema: pa.Schema | None, strict: bool = False
    ) -> pa.Table:
        if data.startswith(BOM):  # Arrow leaves out a BOM, and this is not the file's
            data = BOM + data
        if data.endswith(start.kind.encode()):  # Arrow takes a last cell without an end for text
            data += b"\n"
        names = None if schema is None else schema.names
        whole = max(64, len(data) + 1)

        def as_text(columns: list[str]) -> pa.Table:
            return self._parsed(data, start, _texts(columns), columns, whole)

        try:
            table = self._parsed(data, start, schema, names, PARSED_BYTES)
        except pa.ArrowInvalid:  # a row may be longer; any other error is raised again
            if schema is None:
                # Arrow would try all types on long cells, in a time that grows with their length's square.
                texts = as_text(list(start.names))
                schema = _texts(n for n in texts.column_names if _longest(texts[n]) > LONG_CELL)
            table = self._parsed(data, start, schema, names, whole)
        if self.inferred:
            refuse_rounded(table, data, lambda names, rows: _written(as_text(names), rows))
        return table

    def _parsed(
        self,
        data: bytes,
        start: Start,
        types: pa.Schema | None,
        columns: list[str] | None,
        block_size: int,
    ) -> pa.Table:
        return pcsv.read_csv(
            pa.BufferReader(data),
            pcsv.ReadOptions(use_threads=False, block_size=block_size, column_names=start.names),
            pcsv.ParseOptions(
                delimiter=start.kind,
                quote_char=self.options["quote"] or False,
                newlines_in_values=self.options["quote"] is not None,
            ),
            pcsv.ConvertOptions(
                check_utf8=False,  # it was looked at
                column_types=types,
                include_columns=columns,
                null_values=list(self.options["null_values"]),
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )


def _texts(names: Any) -> pa.Schema:
    return pa.schema([(name, pa.string()) for name in names])


def _longest(texts: Any) -> int:
    return pc.max(pc.binary_length(texts)).as_py() or 0


def _written(texts: pa.Table, rows: IntArray) -> Iterator[dict[str, int]]:
    for row in texts.take(to_arrow(rows)).to_pylist():
        cells = {name: cell for name, cell in row.items() if INTEGER_CELL.fullmatch(cell or "")}
        yield {name: integer(cell) for name, cell in cells.items()}
