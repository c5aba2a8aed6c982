"""``read_text``: rows of text files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, Literal

from trainpipes._internal.checks import column_name
from trainpipes.sources.text.format import MAX_ROW_BYTES
from trainpipes.sources.text.lines import PlainText
from trainpipes.sources.text.text_reader import TextReader


class ReadText(TextReader):
    r"""Reads text files: a row for each line, for each paragraph, or for each file.

    In: files, from ``list_files``. Out: rows with one column of text, as Arrow. Cursor: which block, and how
    many rows of it.

    Files are cut into blocks of about 4 MB, which an index lists: it is made by reading the files once, and
    kept. Files may be compressed (.gz, .zst, .bz2, .xz); their first bytes tell. See docs/formats.md.

    Args:
        unit: "line": every line, empty ones too, without its end (``\n`` or ``\r\n``). "paragraph": lines
            between blank ones, joined by ``\n``. "document": the whole file as it is.
        output_column: the name of the column.
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
        ConfigError: an option is invalid.
        UnreadableError: a file cannot be decompressed, or is not UTF-8.
        DataChangedError: a file has changed since it was listed.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "notes.txt"
    >>> _ = path.write_text("one\ntwo\n\nthree\n")
    >>> [row["text"] for row in tp.read_text(path)]
    ['one', 'two', '', 'three']
    >>> [row["text"] for row in tp.read_text(path, "paragraph")]
    ['one\ntwo', 'three']
    """

    unit: Literal["line", "paragraph", "document"] = "line"
    _: KW_ONLY
    output_column: str = "text"
    block_rows: int | None = None
    max_row_bytes: int | str = MAX_ROW_BYTES
    errors: Literal["strict", "replace"] = "strict"
    index: str | os.PathLike[str] | bool | None = None
    storage_options: Mapping[str, Any] | None = None

    def check(self) -> None:
        super().check()
        column_name(self.output_column, "read_text(output_column)")

    @property
    def form(self) -> PlainText:
        return PlainText(self.unit, self.output_column, self.most_row_bytes)
