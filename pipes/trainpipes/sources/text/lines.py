"""Text as rows: its lines, its paragraphs, or whole documents.

Lines are cut by Arrow and NumPy, with no Python object for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from trainpipes.engine.layout import IntArray
from trainpipes.sources.text.format import (
    MOST_ROW_BYTES,
    Bytes,
    Cutter,
    Start,
    TextFormat,
)
from trainpipes.sources.text.row_errors import BOM

Unit = Literal["line", "paragraph", "document"]

FEED, RETURN, SPACE, TAB = 10, 13, 32, 9


class LineCutter:
    """Rows are lines.

    Args:
        filled: whether lines of nothing but white space are none.
    """

    def __init__(self, filled: bool) -> None:
        self._filled_only = filled
        self._more = False  # the line at hand has something

    def stops(self, data: Bytes, newlines: IntArray) -> IntArray:
        if not self._filled_only:
            self._more = bool(data[-1] != FEED) if len(data) else self._more
            found: IntArray = newlines + 1
            return found
        filled, self._more = filled_lines(data, newlines, self._more)
        ends: IntArray = newlines[filled]
        return ends + 1

    def finish(self) -> bool:
        return self._more


def filled_lines(
    data: Bytes, newlines: IntArray, begun: bool
) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], bool]:
    """Which lines hold more than white space, bool ``[lines]``, and whether what follows the last does.

    Args:
        data: bytes of lines.
        newlines: where they end.
        begun: whether something of the first line was before these bytes.
    """
    starts = np.append(0, newlines + 1)
    ends = np.append(newlines, len(data))
    filled = starts < ends
    first = data[np.minimum(starts, max(0, len(data) - 1))] if len(data) else np.zeros(1, np.uint8)
    is_space = (first == SPACE) | (first == TAB) | (first == RETURN)
    for line in np.flatnonzero(filled & is_space).tolist():
        filled[line] = bool(data[starts[line] : ends[line]].tobytes().strip(b" \t\r"))
    filled[0] |= begun
    return filled[:-1], bool(filled[-1])


class _ParagraphCutter:
    """Rows are stretches of filled lines; a line of white space ends one."""

    def __init__(self) -> None:
        self._more = False  # the line at hand has something
        self._open = False  # the line before it had

    def stops(self, data: Bytes, newlines: IntArray) -> IntArray:
        filled, self._more = filled_lines(data, newlines, self._more)
        before = np.append(self._open, filled)
        self._open = bool(before[-1])
        found: IntArray = newlines[~filled & before[:-1]] + 1
        return found

    def finish(self) -> bool:
        return self._more or self._open


class _DocumentCutter:
    """The file is one row."""

    def stops(self, data: Bytes, newlines: IntArray) -> IntArray:
        return newlines[:0]

    def finish(self) -> bool:
        return True


@dataclass(frozen=True)
class PlainText(TextFormat):
    """Text.

    Args:
        unit: what a row is.
        column: the name of the column that rows are in.
        max_row_bytes: of a row at most.
    """

    name: ClassVar[str] = "text"
    reader: ClassVar[str] = "read_text"

    unit: Unit = "line"
    column: str = "text"
    max_row_bytes: int = MOST_ROW_BYTES

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "unit": self.unit}

    @property
    def fixed_schema(self) -> pa.Schema:
        return pa.schema([(self.column, pa.string())])

    def start(self, head: bytes, whole: bool, path: str) -> Start:
        return Start(len(BOM) if head.startswith(BOM) else 0)

    def cutter(self, start: Start, path: str) -> Cutter:
        if self.unit == "line":
            return LineCutter(filled=False)
        return _ParagraphCutter() if self.unit == "paragraph" else _DocumentCutter()

    def parse(
        self, data: bytes, start: Start, path: str, schema: pa.Schema | None, strict: bool = False
    ) -> pa.Table:
        if self.unit == "document":
            texts = _texts(data, np.array([0, len(data)]))
        else:
            data = data.replace(b"\r\n", b"\n") if b"\r" in data else data
            texts = _lines(data) if self.unit == "line" else _paragraphs(data)
        return pa.table({self.column: texts}, schema=self.fixed_schema)


def _texts(content: bytes, offsets: IntArray) -> pa.Array:
    """Texts that lie one after the other."""
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
    view = np.frombuffer(data, np.uint8)
    newlines = np.flatnonzero(view == FEED)
    filled, more = filled_lines(view, newlines, False)
    edges = np.diff(np.concatenate([[False], filled, [more], [False]]).astype(np.int8))
    starts = np.append(0, newlines + 1)[np.flatnonzero(edges == 1)]
    ends = np.append(newlines, len(data))[np.flatnonzero(edges == -1) - 1]
    depth = np.zeros(len(data) + 1, np.int8)
    depth[starts] += 1
    depth[ends] -= 1
    inside = np.cumsum(depth[:-1], dtype=np.int8).astype(np.bool_)
    return _texts(view[inside].tobytes(), np.append(0, np.cumsum(ends - starts)))
