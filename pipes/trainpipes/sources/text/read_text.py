"""``read_text``: rows of text files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, Literal

from trainpipes.checks import column_name
from trainpipes.sources.text.lines import PlainText
from trainpipes.sources.text.text_reader import TextReader

__all__ = ["ReadText"]


class ReadText(TextReader):
    r"""Reads text files: a row for each line, for each paragraph, or for each file.

    In: files, from ``list_files``. Out: rows with one column of text, as Arrow. Cursor: which block, and how
    many rows of it.

    Files are cut into blocks of about 4 MB by an index, which is made by reading them once and kept. They may
    be compressed: .gz, .zst, .bz2, .xz, told by what they begin with. See docs/formats.md.

    Args:
        unit: "line": every line, empty ones too, without its end (``\n`` or ``\r\n``). "paragraph": lines
            between blank ones, joined by ``\n``. "document": the whole file as it is, of 1 GiB at most.
        column: the name of the column.
        block_rows: rows in a block, of each file; by bytes if left out.
        errors: what to do about text that is not UTF-8: "strict" raises, and names the line and the byte;
            "replace" has U+FFFD in its place.
        index: where to keep the index: a file that ends in ".arrow", or a folder. By default in the cache's
            folder (see ``trainpipes.cache``), for remote files, for 64 local ones or more, and for 4 MiB or
            more; True: there in any case; False: not at all.
        storage_options: options for the fsspec file system, in addition to those of ``list_files``.
            They are neither shown nor part of a state.

    Raises:
        ConfigError: an option is something else.
        UnreadableError: a file cannot be decompressed, or is not UTF-8.
        DataChangedError: a file is no longer what it was when it was listed.

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
    column: str = "text"
    block_rows: int | None = None
    errors: Literal["strict", "replace"] = "strict"
    index: str | os.PathLike[str] | bool | None = None
    storage_options: Mapping[str, Any] | None = None

    def check(self) -> None:
        super().check()
        column_name(self.column, "read_text(column)")

    @property
    def form(self) -> PlainText:
        return PlainText(self.unit, self.column)
