"""``read_csv``: rows of CSV and TSV files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal

import pyarrow as pa

from trainpipes.checks import column_names, several
from trainpipes.errors import ConfigError
from trainpipes.shown import shown
from trainpipes.sources.text.csv_rows import Csv
from trainpipes.sources.text.text_reader import TextReader

__all__ = ["ReadCsv"]


class ReadCsv(TextReader):
    r"""Reads CSV files, also with tabs or other delimiters.

    In: files, from ``list_files``. Out: rows with the chosen columns, as Arrow. Cursor: which block, and how
    many rows of it.

    Files are cut into blocks of about 4 MB by an index, which is made by reading them once and kept. They may
    be compressed: .gz, .zst, .bz2, .xz, told by what they begin with. See docs/formats.md.

    Each file's first line names its columns. A cell in quotes may hold delimiters, line ends, and quotes,
    which are written twice. A cell with nothing in it is null, and ``""`` in quotes is the empty text. Lines
    without anything are passed over.

    Types are those that the first block of 16 files at most has (integers, floats, booleans, dates, times,
    text), and held to: a row that does not fit is an error that names the file and the line.

    Args:
        columns: names of columns; None for all, which every file must have then.
        delimiter: one character; if left out, a tab in files that end in .tsv and .tab, a comma in others.
        quote: what cells are quoted by, one character; None for nothing.
        column_names: names of the columns, of files whose first line is a row already.
        null_values: cells that are null where they are not quoted, such as ``["", "NA"]``.
        schema: columns and their types, in place of what is found; other columns are left out.
        infer: "first" looks for types in the first blocks, "all" in all rows, once: it makes types wider
            where they differ, in the end to text.
        block_rows: rows in a block, of each file; by bytes if left out.
        errors: what to do about text that is not UTF-8: "strict" raises, and names the line and the byte;
            "replace" has U+FFFD in its place.
        index: where to keep the index: a file that ends in ".arrow", or a folder. By default in the cache's
            folder (see ``trainpipes.cache``), for remote files, for 64 local ones or more, and for 4 MiB or
            more; True: there in any case; False: not at all.
        storage_options: options for the fsspec file system, in addition to those of ``list_files``.
            They are neither shown nor part of a state.

    Raises:
        ConfigError: an option is something else, or ``schema`` has a type that CSV is not read as.
        UnreadableError: a line is broken or not UTF-8, and is named; a file is cut off.
        SchemaError: a file lacks a column; later, a row does not fit the schema.
        DataChangedError: a file is no longer what it was when it was listed.

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
        return Csv(self.delimiter, self.quote, names, tuple(self.null_values))


def _is_mark(value: Any) -> bool:
    """Whether a value is one byte that can stand between cells or around one."""
    return isinstance(value, str) and len(value) == 1 and value.isascii() and value not in "\r\n"
