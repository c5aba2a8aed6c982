"""``read_csv``: rows of CSV and TSV files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal

import pyarrow as pa

from trainpipes._internal.checks import column_names, several
from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError
from trainpipes.sources.text.csv_rows import Csv
from trainpipes.sources.text.format import MAX_ROW_BYTES
from trainpipes.sources.text.text_reader import TextReader


class ReadCsv(TextReader):
    r"""Reads CSV and TSV files, and those with other delimiters.

    In: files, from ``list_files``. Out: rows with the chosen columns, as Arrow. Cursor: which block, and how
    many rows of it.

    Files are cut into blocks of about 4 MB, which an index lists: it is made by reading the files once, and
    kept. Files may be compressed (.gz, .zst, .bz2, .xz); their first bytes tell. See docs/formats.md.

    Each file's first line names its columns. A cell in quotes may hold delimiters, line ends, and quotes,
    which are written twice. An empty cell is null, and ``""`` is the empty text. Empty lines are skipped.

    Types (integers, floats, booleans, dates, times, text) are inferred from the first block of up to 16
    files, and fixed from then on: a row that does not fit is an error that names the file and the line.

    Args:
        columns: names of columns; None for all; then all files must have the same columns.
        delimiter: one character; if left out, a tab in files that end in .tsv and .tab, a comma in others.
        quote: the quote character; None if cells are not quoted.
        column_names: names of the columns, for files without a header line.
        null_values: texts of unquoted cells that mean null, such as ``["", "NA"]``.
        schema: columns and types to read, instead of inferring them; other columns are left out.
        infer: "first" infers types from the first blocks; "all" from all rows, read once, and widens types
            that differ, to text if nothing else holds both.
        block_rows: rows in a block; if left out, as many as make about 4 MB.
        max_row_bytes: bytes of a row at most, decompressed; a file with a longer one is refused, by its line,
            before much of it is in memory. About 4 times as much are needed to read such a row.
        errors: "strict" raises where text is not UTF-8, and names the line and the byte; "replace" puts
            U+FFFD in its place.
        index: where to keep the index: a file that ends in ".arrow", or a folder. True: in the cache folder
            (see ``tp.cache``). False: nowhere. If left out: in the cache folder, if the files are
            remote, 64 or more, or 4 MiB or more in all.
        storage_options: more options for the fsspec file system, besides those of ``list_files``. They are
            neither shown nor part of a state.

    Raises:
        ConfigError: an option is invalid, or ``schema`` has a type that cannot be read from CSV.
        UnreadableError: a line is broken or not UTF-8 (names it), or a file is cut off.
        SchemaError: a file lacks a column; later, a row does not fit the schema.
        DataChangedError: a file has changed since it was listed.

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
    null_values: Sequence[str] = ("",)
    schema: pa.Schema | None = None
    infer: Literal["first", "all"] = "first"
    block_rows: int | None = None
    max_row_bytes: int | str = MAX_ROW_BYTES
    errors: Literal["strict", "replace"] = "strict"
    index: str | os.PathLike[str] | bool | None = None
    storage_options: Mapping[str, Any] | None = None

    def check(self) -> None:
        super().check()
        for name, value in (("delimiter", self.delimiter), ("quote", self.quote)):
            if value is not None and not _is_mark(value):
                raise ConfigError(
                    f"read_csv({name}) is one ASCII character that ends no line, or None, got {shown(value)}"
                )
        if self.quote is not None and self.quote in (self.delimiter or ",\t"):
            raise ConfigError(
                "read_csv(delimiter, quote) are two different characters, got "
                f"{shown(self.delimiter)} and {self.quote!r}"
            )
        nulls = self.null_values
        if not several(nulls) or not all(isinstance(one, str) for one in nulls):
            raise ConfigError(f"read_csv(null_values) is a list of texts, got {shown(nulls)}")
        self._set(null_values=tuple(nulls))
        if self.column_names is not None:
            self._set(column_names=column_names(self.column_names, "read_csv(column_names)"))

    @property
    def form(self) -> Csv:
        names = None if self.column_names is None else tuple(self.column_names)
        return Csv(
            self.delimiter,
            self.quote,
            names,
            tuple(self.null_values),
            exact=self.schema is None,
            max_row_bytes=self.most_row_bytes,
        )


def _is_mark(value: Any) -> bool:
    """Whether a value is one byte that can stand between cells or around one."""
    return isinstance(value, str) and len(value) == 1 and value.isascii() and value not in "\r\n"
