from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import ColumnName
from trainpipes._internal.types import IntArray
from trainpipes.interfaces.quarantine import OnBadRow
from trainpipes.sources.text.cutters import (
    FEED,
    Cutter,
    DocumentCutter,
    LineCutter,
    ParagraphCutter,
)
from trainpipes.sources.text.format import TextFormat
from trainpipes.sources.text.text_reader import TextReader
from trainpipes.sources.text.text_rows import BOM, MAX_ROW_BYTES, MOST_ROW_BYTES, Start, row_bytes

Unit = Literal["line", "paragraph", "document"]
#: Lines that follow each other and have something.
PARAGRAPH = re.compile(rb"(?:^[ \t\r]*[^ \t\r\n][^\n]*\n?)+", re.MULTILINE)
CUTTERS: dict[str, type[Cutter]] = {
    "line": LineCutter,
    "paragraph": ParagraphCutter,
    "document": DocumentCutter,
}


class ReadText(TextReader):
    r"""Reads text files, also compressed (.gz, .zst, .bz2, .xz): a row for each line, paragraph or file.

    Args:
        unit: "line": every line, empty ones too, without its end (``\n`` or ``\r\n``). "paragraph": lines
            between blank ones, joined by ``\n``. "document": the whole file as it is.
        output_column: the name of the column.
        block_rows, max_row_bytes, errors, on_error, index, storage_options: as in ``read_json``.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "notes.txt"
    >>> _ = path.write_text("one\ntwo\n\nthree\n")
    >>> [row["text"] for row in tp.read_text(path)]
    ['one', 'two', '', 'three']
    >>> [row["text"] for row in tp.read_text(path, "paragraph")]
    ['one\ntwo', 'three']
    """

    unit: Unit = "line"
    _: KW_ONLY
    output_column: ColumnName = "text"
    block_rows: int | None = None
    max_row_bytes: Annotated[int | str, row_bytes] = MAX_ROW_BYTES
    errors: Literal["strict", "replace"] = "strict"
    on_error: OnBadRow = "raise"
    index: str | os.PathLike[str] | bool | None = None
    storage_options: Mapping[str, Any] | None = None

    @property
    def form(self) -> TextFormat:
        return PlainText(self.options)


class PlainText(TextFormat):
    """Text files as a format: lines, paragraphs or whole files."""

    name = "text"
    reader: ClassVar[str] = "read_text"

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.unit, self.column = options["unit"], options["output_column"]
        self.schema = pa.schema([(self.column, pa.string())])

    def start(self, head: bytes, whole: bool, path: str) -> Start:
        return Start(len(BOM) if head.startswith(BOM) else 0)

    def cutter(self, start: Start) -> Cutter:
        return CUTTERS[self.unit]()

    def parse(
        self, data: bytes, start: Start, schema: pa.Schema | None, strict: bool = False
    ) -> pa.Table:
        if self.unit == "document":
            texts = _texts(data, np.array([0, len(data)]))
        else:
            data = data.replace(b"\r\n", b"\n") if b"\r" in data else data
            texts = _lines(data) if self.unit == "line" else _paragraphs(data)
        return pa.table({self.column: texts}, schema=self.schema)


def _texts(content: bytes, offsets: IntArray) -> pa.Array:
    if len(content) > MOST_ROW_BYTES:  # once U+FFFD has taken the place of single bytes
        raise pa.ArrowInvalid(f"the text has {len(content):,} bytes, and Arrow holds 2 GB")
    kept = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.string(), len(offsets) - 1, kept)


def _lines(data: bytes) -> pa.Array:
    newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == FEED)
    offsets = np.append(0, newlines - np.arange(len(newlines)))
    if data and data[-1] != FEED:
        offsets = np.append(offsets, len(data) - len(newlines))
    return _texts(data.replace(b"\n", b""), offsets)


def _paragraphs(data: bytes) -> pa.Array:
    paragraphs = [part.rstrip(b"\n") for part in PARAGRAPH.findall(data)]
    return _texts(b"".join(paragraphs), np.cumsum([0, *map(len, paragraphs)]))
