"""Where rows end in consecutive parts of a file, and which rows are refused since Arrow would change them, or
not survive: integers that it would round to float64 (from 2^63 on, and those beside fractions), JSON that
nests too deep, for which it takes minutes, or ends the process, and rows that are null.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.checks import IntArray
from trainpipes.columns.arrays import one_chunk, to_arrow, to_numpy
from trainpipes.errors import cut
from trainpipes.sources.files.formats import BadFileError

FEED, RETURN, COMMA, SLASH, QUOTE = b'\n\r,\\"'
WHITE = b" \t\r\n"
NONE = np.zeros(0, np.int64)
#: Bytes that are compared at a time: the results stay in the processor's cache.
SLICE_BYTES = 120 << 10
#: What each byte adds to the depth of brackets; 0 for a comma, which is looked at, too.
DEPTH = np.zeros(256, np.int8)
DEPTH[list(b"[{")] = 1
DEPTH[list(b"]}")] = -1
BLANK = np.zeros(256, np.bool_)
BLANK[list(b" \t\r")] = True
LOOKED_AT = DEPTH != 0
LOOKED_AT[COMMA] = True


class Cutter(ABC):
    """Finds where rows end. ``before`` are a few bytes that stand for the part of a row that came before."""

    before = b""
    inside = False  # a quoted cell

    def stops(self, part: bytes) -> tuple[IntArray, IntArray]:
        """The places behind the rows that end in this part, and of its line feeds, int64."""
        if not part:
            return NONE, NONE
        data, known = self.before + part, len(self.before)
        feeds = _places(data, FEED)
        return self.ends(data, feeds) + (1 - known), feeds[feeds >= known] - known

    @abstractmethod
    def ends(self, data: bytes, feeds: IntArray) -> IntArray:
        """The last bytes of rows in ``before`` and a part behind it; sets the bytes before the next part."""

    def finish(self) -> bool:
        """Whether a row follows the last stop, at the end of the file."""
        return bool(self.before)


class LineCutter(Cutter):
    """Each line is a row."""

    def ends(self, data: bytes, feeds: IntArray) -> IntArray:
        self.before = b"" if data.endswith(b"\n") else b"x"
        return feeds


class FilledLineCutter(Cutter):
    """Each line that is not blank is a row."""

    def ends(self, data: bytes, feeds: IntArray) -> IntArray:
        filled = _filled(data, feeds)
        self.before = b"x" if filled[-1] else b""
        line_ends: IntArray = feeds[filled[:-1]]
        return line_ends


class ParagraphCutter(Cutter):
    """Rows are paragraphs, which blank lines end."""

    def ends(self, data: bytes, feeds: IntArray) -> IntArray:
        filled = _filled(data, feeds)
        follows = np.append(False, filled[:-1])  # lines that are filled
        self.before = b"x" if filled[-1] else b"x\n" if follows[-1] else b""
        paragraph_ends: IntArray = feeds[~filled[:-1] & follows[:-1]]
        return paragraph_ends


class DocumentCutter(Cutter):
    """The file is a single row."""

    before = b"x"

    def ends(self, data: bytes, feeds: IntArray) -> IntArray:
        return NONE


class RecordCutter(Cutter):
    """Rows are records. As in Arrow, a quoted cell begins with a quote, and two quotes in it are one."""

    def __init__(self, delimiter: str, quote: str | None) -> None:
        self._delimiter = delimiter.encode()
        self._quote = b"" if quote is None else quote.encode()

    def ends(self, data: bytes, feeds: IntArray) -> IntArray:
        view, ends, edges = np.frombuffer(data, np.uint8), feeds, NONE
        if self._quote and self._quote in data:
            edges = self._edges(data, view)
            ends = ends[np.searchsorted(edges, ends) % 2 == 0]
        self.inside = len(edges) % 2 == 1
        starts = np.append(0, ends + 1)
        lengths = np.append(ends, len(data)) - starts
        only_return = (lengths == 1) & (view[np.minimum(starts, len(data) - 1)] == RETURN)
        filled = (lengths > 0) & ~only_return
        if self.inside:
            self.before = self._delimiter + self._quote
        elif not filled[-1]:
            self.before = b"\r" if lengths[-1] else b""
        elif len(edges) and edges[-1] == len(data) - 1:
            self.before = self._quote * 2
        else:
            self.before = self._delimiter if data.endswith(self._delimiter) else b"\xff"
        record_ends: IntArray = ends[filled[:-1]]
        return record_ends

    def _edges(self, data: bytes, view: npt.NDArray[np.uint8]) -> IntArray:
        """Quotes that begin and end cells, in turns; others are within unquoted cells."""
        quotes = _places(data, ord(self._quote))
        begins = quotes[::2]
        marks = [FEED, *self._delimiter, *self._quote]
        good = np.zeros(256, np.bool_)
        good[marks] = True
        if (good[view[np.maximum(begins, 1) - 1]] | (begins == 0)).all():
            return quotes
        edges: list[int] = []
        ended, inside = -1, False
        for at in quotes.tolist():
            if inside:
                inside, ended = False, at
            elif at == 0 or ended == at - 1 or data[at - 1] in marks[:2]:
                inside = True
            else:
                continue
            edges.append(at)
        return np.array(edges, np.int64)

    def finish(self) -> bool:
        if self.inside:
            raise BadFileError("cut off: a quoted cell has no end")
        return self.before not in (b"", b"\r")


class ArrayCutter(Cutter):
    """Rows are the objects of an array, behind its first bracket."""

    def __init__(self) -> None:
        self._depth = self._rows = self._commas = 0
        self._filled = False  # it holds something
        self.ended: int | None = None  # where its last bracket is, in the part at hand
        self.quotes = self.commas = self.depths = NONE  # in that part

    def ends(self, data: bytes, feeds: IntArray) -> IntArray:
        if self.ended is not None:
            return self._nothing_more(data)
        written = data
        if b"\\" in data:
            data = data.replace(b"\\\\", b"  ")
            data = data.replace(b'\\"', b"  ")
        escapes = data.endswith(b"\\")
        view = np.frombuffer(data, np.uint8)
        self.quotes = _places(data, QUOTE)
        seen = np.flatnonzero(LOOKED_AT[view])
        seen = seen[np.searchsorted(self.quotes, seen) % 2 == 0]
        change = DEPTH[view[seen]]
        depth = np.cumsum(change, dtype=np.int64) + self._depth
        if len(depth) and depth.min() < 0:
            last = int(np.argmax(depth < 0))
            self.ended = int(seen[last])
            self._nothing_more(written[self.ended + 1 :])
            seen, change, depth = seen[:last], change[:last], depth[:last]
        self.before = b'"' * (len(self.quotes) % 2) + b"\\" * escapes
        self._depth, self.depths = int(depth[-1]) if len(depth) else self._depth, depth
        ends: IntArray = seen[(depth == 0) & (change < 0)]
        self.commas = seen[(depth == 0) & (change == 0)]
        self._filled = self._filled or bool(data[: self.ended].strip(WHITE))
        self._rows += len(ends)
        self._commas += len(self.commas)
        return ends

    def _nothing_more(self, data: bytes) -> IntArray:
        if rest := data.strip(WHITE):
            raise BadFileError(f"there is more after the array's end: {cut(repr(rest[:100]), 60)}")
        return NONE

    def finish(self) -> bool:
        if self.ended is None:
            raise BadFileError("cut off: its array has no end")
        if self._commas != max(0, self._rows - 1) or self._filled > self._rows:
            raise BadFileError(
                f"its array has {self._rows:,} objects and {self._commas:,} commas between: rows are "
                "objects, {...}"
            )
        return False


def _places(data: bytes, byte: int) -> IntArray:
    text, places = np.frombuffer(data, np.uint8), [NONE]
    for at in range(0, len(data), SLICE_BYTES):
        places.append((text[at : at + SLICE_BYTES] == byte).nonzero()[0] + at)
    return np.concatenate(places)


def _filled(data: bytes, feeds: IntArray) -> Any:
    """Which lines, and the bytes after the last, hold more than white space."""
    starts, stops = np.append(0, feeds + 1), np.append(feeds, len(data))
    filled = starts < stops
    first = np.frombuffer(data, np.uint8)[np.minimum(starts, len(data) - 1)]
    for line in np.flatnonzero(filled & BLANK[first]).tolist():
        filled[line] = bool(data[starts[line] : stops[line]].strip(b" \t\r"))
    return filled


#: Up to here each integer is a float of its own.
LARGEST = float(1 << 53)
#: The first integer that int64 does not hold: it came as a float only for that.
INT64 = 1 << 63
#: A long integer, which is no part of a fraction or of a number with an exponent.
INTEGER = re.compile(rb"(?<![\d.])\d{16,}(?![\d.eE])")

#: Digits of an integer beyond all floats; Python refuses to convert some thousands.
MOST_DIGITS = 400
#: Some columns of some rows, with their integers as they are written.
Written = Callable[[list[str], IntArray], Iterable[Any]]


class RoundedError(pa.ArrowInvalid):  # type: ignore[misc]  # pyarrow has no types
    """A row has an integer that its column would round."""

    def __init__(self, row: int, said: str) -> None:
        super().__init__(said)
        self.row = row


def integer(text: str) -> int:
    """An integer as it is written; the first digits of one that is beyond all floats, as these are."""
    number = text.strip()
    digits = number.lstrip("+-").lstrip("0")[:MOST_DIGITS] or "0"
    return -int(digits) if number.startswith("-") else int(digits)


def refuse_rounded(table: pa.Table, data: bytes, written: Written) -> None:
    large = {name: _large_floats(table.column(name)) for name in table.column_names}
    names = [name for name, rows in large.items() if len(rows)]
    if not names or not INTEGER.search(data):
        return
    rows = np.unique(np.concatenate([large[name] for name in names]))
    read = table.select(names).take(to_arrow(rows)).to_pylist()
    for row, text, other in zip(rows.tolist(), written(names, rows), read, strict=False):
        for name in names:
            odd = _rounded(text.get(name), other[name])
            if odd is not None:
                raise RoundedError(
                    row,
                    f"column {name!r} has the integer {cut(str(odd), 40)}, of a size that a column of floats "
                    "would round; say its type by schema=, such as uint64, or float64 to have it rounded",
                )


def _large_floats(column: Any) -> IntArray:
    """Rows with a float of 2^53 or more, positive or negative, int64."""
    kind, types = column.type, pa.types
    if types.is_floating(kind):
        ends = pc.min_max(column).as_py().values()
        if all(end is None or abs(end) < LARGEST for end in ends):
            return NONE  # without importing pandas
        return np.flatnonzero(np.abs(to_numpy(one_chunk(column.fill_null(0)))) >= LARGEST)
    if types.is_struct(kind):
        return np.concatenate([NONE, *map(_large_floats, column.flatten())])
    if types.is_list(kind):
        inner = _large_floats(pc.list_flatten(column))
        return to_numpy(one_chunk(pc.list_parent_indices(column)))[inner] if len(inner) else NONE
    return NONE


def _rounded(value: Any, read: Any) -> int | None:
    if isinstance(value, int) and isinstance(read, float):
        return value if value != read or not -INT64 <= value < INT64 else None
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict) and isinstance(read, dict):
        pairs = [(value[name], read[name]) for name in value.keys() & read.keys()]
    elif isinstance(value, list) and isinstance(read, list):
        pairs = zip(value, read, strict=False)
    rounded = (_rounded(*pair) for pair in pairs)
    return next((odd for odd in rounded if odd is not None), None)


# Depth, and rows of null

#: Brackets within each other, the row's own among them: more levels than this Arrow's messages do not have.
MOST_DEPTH = 64
#: Opening brackets of a line that is looked at: Arrow parses fewer in no time, however they nest.
MANY = 512
#: Bytes that are looked at at a time: they stay in the cache of the processor.
STEP_BYTES = 512 << 10
#: An opening brace, the bit by which an opening bracket differs from it, and all but these and quotes.
OPENS, LIKE = ord("{"), ord("{") ^ ord("[")
OTHERS = bytes(byte for byte in range(256) if byte not in b'{}[]"')
NULL_ROW = re.compile(rb"^[ \t\r]*null", re.MULTILINE)


def check_depth(lines: bytes) -> None:
    if not lines:
        return
    view = np.frombuffer(lines, np.uint8)
    steps = range(0, len(lines), STEP_BYTES)
    ends = np.concatenate([np.flatnonzero(view[n : n + STEP_BYTES] == FEED) + n for n in steps])
    if not lines.endswith(b"\n"):
        ends = np.append(ends, len(lines))
    starts = np.append(0, ends[:-1] + 1)
    if (ends - starts > 2 * MANY).any():
        opening = np.flatnonzero((view | LIKE) == OPENS)
        counts = np.diff(np.searchsorted(opening, ends), prepend=0)
        for line in np.flatnonzero(counts > MANY).tolist():
            refuse_deep(_depth(lines[starts[line] : ends[line]]))
    first, last = view[starts], view[ends - 1]
    if not (np.isin(first, list(b"{\r\n")) & np.isin(last, list(b"}\r\n"))).all():
        refuse_null(lines)
        refuse_deep(_depth(lines))  # a row may go over several lines


def refuse_null(lines: bytes) -> None:
    """Arrow makes a row of nulls of it, and ends the process where it is the first."""
    if NULL_ROW.search(lines):
        raise pa.ArrowInvalid("a row is null, and no object")


def check_types(types: Iterable[pa.DataType], lines: bytes) -> None:
    level, deep = list(types), 0
    while level := [kind.field(n).type for kind in level for n in range(kind.num_fields)]:
        deep += 1
    if deep >= MOST_DEPTH:
        for line in lines.splitlines():
            refuse_deep(_depth(line))


def _depth(lines: bytes) -> IntArray:
    """How deep rows nest behind each bracket outside of texts, int64 ``[brackets]``."""
    if b"\\" in lines:
        lines = lines.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = lines.translate(None, OTHERS)
    if 2 * marks.count(b'""') < marks.count(b'"'):  # there are brackets in texts
        marks = b"".join(marks.replace(b'""', b"").split(b'"')[::2])
    view = np.frombuffer(marks.translate(None, b'"'), np.uint8)
    return np.cumsum(np.where(view | LIKE == OPENS, 1, -1))


def refuse_deep(depth: IntArray) -> None:
    if len(depth) and depth.max() > MOST_DEPTH:
        raise pa.ArrowInvalid(
            f"it nests deeper than {MOST_DEPTH} brackets and braces, the most that is read; keep such a "
            "value as text, by json.dumps()"
        )
