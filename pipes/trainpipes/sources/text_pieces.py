"""How a reader's options cut text into rows: where they begin and end, and how they are parsed; and
pieces of a file of text: whole rows of some MB, and as many rows as a block has at most.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import IntArray, byte_count, require
from trainpipes.columns.types import Rule
from trainpipes.interfaces.quarantine import leaves_out
from trainpipes.sources.compressed import Entry, ReadAgain, Stream
from trainpipes.sources.files import formats
from trainpipes.sources.files.formats import BadFileError
from trainpipes.sources.text_cutters import Cutter

#: Bytes of a row, unless a reader says otherwise; and the most that Arrow holds in a text.
MAX_ROW_BYTES, MOST_ROW_BYTES = "256MB", 2_000_000_000
#: What some programs write before UTF-8.
BOM = b"\xef\xbb\xbf"


class Start(NamedTuple):
    """The first row's place, the columns' names, and the delimiter or "array", by the first bytes."""

    at: int = 0
    names: Sequence[str] = ()
    kind: str = ""


def row_bytes(value: Any, option: str) -> int:
    most = byte_count(value, option)
    rule = f"a number of bytes up to {MOST_ROW_BYTES:,}, which Arrow holds in a text"
    require(most <= MOST_ROW_BYTES, option, rule, value)
    return most


def other_mark(names: Sequence[str]) -> str:
    """What seems to part the names in a first line that has only one, if anything."""
    return next((mark for mark in ";|\t" if len(names) == 1 and mark in names[0]), "")


class TextRows(formats.Format):
    """A format of rows in text, by the options of a reader; ``rule`` defines a row, bytes of
    ``between`` may surround a row; with ``names_columns`` a file may lack a column. ``schema`` is that of all
    rows once it is known, ``inferred`` if it is not the user's; only ``strict`` refuses columns it lacks.
    """

    known_by_blocks = True
    reader: ClassVar[str]
    rule: ClassVar[str] = "rows are text"
    between: ClassVar[bytes] = b"\r\n"
    names_columns: ClassVar[bool] = False
    #: How types of files, and of parts of a file, are united.
    type_rule: ClassVar[Rule] = "files"
    #: The type of a column without a single value.
    empty: ClassVar[pa.DataType] = pa.null()

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.block_rows: int | None = options["block_rows"]
        self.max_row_bytes = row_bytes(options["max_row_bytes"], "max_row_bytes")
        self.inferred = "schema" in options and options["schema"] is None
        self.schema: pa.Schema | None = None
        self.strict, self.replace = False, options["errors"] == "replace"
        self.leaves_out = leaves_out(options["on_error"])
        self.again = ReadAgain()

    def rule_for(self, row: bytes, start: Start) -> str:
        """The rule, with what is seen to be wrong with a row."""
        return self.rule

    @abstractmethod
    def start(self, head: bytes, whole: bool, path: str) -> Start | None:
        """Where the rows of a file begin; None if more bytes must be seen. Raises BadFileError."""

    @abstractmethod
    def cutter(self, start: Start) -> Cutter:
        """A cutter for a file's rows, from the first of them or any other on."""

    @abstractmethod
    def parse(
        self, data: bytes, start: Start, schema: pa.Schema | None, strict: bool = False
    ) -> pa.Table:
        """Rows as columns, of inferred types if ``schema`` is None. Raises pyarrow.ArrowException."""

    def infer(self, data: bytes, start: Start) -> tuple[pa.Schema, list[float]]:
        """The columns and types of rows, and the bytes of each column in memory."""
        table = self.parse(data, start, None)
        sizes = [float(column.nbytes) for column in table.columns]
        return pa.schema([self.as_written(field) for field in table.schema]), sizes

    def as_written(self, field: pa.Field) -> pa.Field:
        """A field that was found, in the type that the file means."""
        return field


#: Bytes of a piece, about. Smaller ones cost a request each, larger ones memory in each reader.
PIECE_BYTES = 4 << 20
#: Bytes at each end of a piece that are checked when it is read.
END_BYTES = 1024
#: First bytes that a format is shown, and most of them, if it asks for more.
HEAD_BYTES, MOST_HEAD_BYTES = 64 << 10, 16 << 20
#: In place of the checksum of a piece that is a row to be left out.
UNREAD = -1
UTF16 = (b"\xff\xfe", b"\xfe\xff")


def check_of(data: bytes | memoryview) -> int:
    """A checksum of the first and last 1,024 bytes: cheap enough for every read."""
    return zlib.crc32(data[-END_BYTES:], zlib.crc32(data[:END_BYTES]))


def scan(stream: Stream, compression: str, form: TextRows, path: str, size: int) -> formats.Layout:
    head, start = _head(stream, form, path)
    cutter, content = form.cutter(start), zlib.crc32(head)
    pieces = _Pieces(form, stream.entries, start.at, head.count(b"\n", 0, start.at))
    if part := head[start.at :]:
        pieces.add(part, *cutter.stops(part))
    while part := stream.read():
        content = zlib.crc32(part, content)
        pieces.add(part, *cutter.stops(part))
    try:
        pieces.end(cutter.finish())
    except BadFileError as error:
        if not (form.leaves_out and cutter.inside):
            raise BadFileError(f"line {pieces.line:,}: {error}") from error
        pieces.end(True, good=False)
    names = ("start", "stop", "rows", "lines", "checks", "entries", "places", "opens")
    noted = np.array(pieces.noted, dtype=np.int64).reshape(-1, len(names)).T
    columns = dict(zip(names, np.ascontiguousarray(noted), strict=True))
    begins, stops, rows = (columns.pop(name) for name in names[:3])
    extra = formats.packed(
        compression=compression, head=start, size=size, content=content, **columns
    )
    return formats.Layout(rows, begins, stops, pa.schema([]), extra)


def _head(stream: Stream, form: TextRows, path: str) -> tuple[bytes, Start]:
    head, start = b"", None
    while start is None:
        more = stream.read()
        head += more
        if more and len(head) < HEAD_BYTES:
            continue
        if head[:2] in UTF16:
            kind = "UTF-32" if head[2:4] == b"\0\0" else "UTF-16"
            raise BadFileError(
                f"its text is {kind}: write it as UTF-8, as by iconv -f {kind.lower()} -t utf-8"
            )
        start = form.start(head, not more, path)
        if start is None and (not more or len(head) > MOST_HEAD_BYTES):
            raise BadFileError(f"not {form.name}: its first {len(head):,} bytes hold no line end")
    return head, start


class _Pieces:
    """Notes on pieces; and the rows of the current piece, and the line of the current row."""

    def __init__(self, form: TextRows, entries: list[Entry], at: int, newlines: int) -> None:
        self.noted: list[tuple[int, ...]] = []
        self._form, self._entries = form, entries
        # Of what was read: bytes, line feeds, and rows in whole pieces.
        self._at, self._newlines, self._whole = at, newlines, 0
        self._row, self.line = at, newlines + 1
        self._huge = max(form.max_row_bytes, PIECE_BYTES) if form.leaves_out else None
        # Of the piece, where the row at hand begins: its first and last bytes, place, line feeds.
        self._before_row = b"", b"", at, newlines
        self._block = -1  # where its first piece begins
        self._open()

    def _open(self) -> None:
        self._begin, self._lines, self.rows = self._at, self._newlines, 0
        self._first = self._last = b""

    def add(self, part: bytes, stops: IntArray, feeds: IntArray) -> None:
        """Bytes, and where rows end in them, and lines."""
        while self._huge is not None:  # rows beyond it are pieces of their own, and left out unread
            begins = np.append(self._row - self._at, stops)
            huge = np.flatnonzero(np.diff(begins) > self._huge)
            if not len(huge):
                break
            row = int(huge[0])
            begin, stop = max(0, int(begins[row])), int(stops[row])
            if row:
                self._add(part[:begin], stops[:row], feeds[feeds < begin])
            lines = int((feeds < stop).sum() - (feeds < begin).sum())
            self._add_unread(self._at + stop - begin, self._newlines + lines)
            part, stops, feeds = part[stop:], stops[row + 1 :] - stop, feeds[feeds >= stop] - stop
        self._add(part, stops, feeds)

    def _add_unread(self, stop: int, newlines: int) -> None:
        """The row at hand ends at a place, and is a piece of its own."""
        if self.rows:
            self._first, self._last, self._at, self._newlines = self._before_row
            self.close()
        self._at, self._newlines, self.rows = stop, newlines, 1
        self.close(UNREAD)
        self._row, self.line = stop, newlines + 1
        self._before_row = b"", b"", stop, newlines

    def end(self, has_row: bool, good: bool = True) -> None:
        """The file ends, with a row behind the last stop or without."""
        huge = self._huge is not None and self._at - self._row > self._huge
        if has_row and (huge or not good):
            self._add_unread(self._at, self._newlines)
            return
        self.rows += has_row
        if self.rows:
            self.close()

    def _add(self, part: bytes, stops: IntArray, feeds: IntArray) -> None:
        before, newlines, begin, done = self._at, self._newlines, 0, 0

        def line_at(place: int) -> int:
            """The line of the first row that begins at or behind a place."""
            text = part[place : place + END_BYTES]
            blank = len(text) - len(text.lstrip(b", \t\r\n"))
            return newlines + int(np.searchsorted(feeds, place + blank)) + 1

        def take(stop: int, rows: int) -> None:
            size = stop - begin
            self._first += part[begin : begin + min(size, END_BYTES - len(self._first))]
            self._last = (self._last + part[stop - min(size, END_BYTES) : stop])[-END_BYTES:]
            self._at, self.rows = before + stop, self.rows + rows
            self._newlines = newlines + int(np.searchsorted(feeds, stop))

        most, begins = self._form.max_row_bytes, np.append(self._row - before, stops)
        long = np.flatnonzero(np.append(stops, len(part)) - begins > most)
        if len(long) and self._huge is None:
            line = line_at(int(begins[long[0]])) if long[0] else self.line
            raise BadFileError(
                f"line {line:,}: a row here has more than {most:,} bytes: this is not text, or has no "
                "line ends; for rows of that size give max_row_bytes="
            )
        while (row := self._last_row(stops, before, done)) < len(stops):
            stop = int(stops[row])
            take(stop, row + 1 - done)
            self.close()
            begin, done = stop, row + 1
        if len(stops):
            take(int(stops[-1]), len(stops) - done)
            begin = int(stops[-1])
            self._before_row = self._first, self._last, self._at, self._newlines
        take(len(part), 0)
        if len(stops):
            self._row, self.line = before + int(stops[-1]), line_at(int(stops[-1]))

    def _last_row(self, stops: IntArray, before: int, done: int) -> int:
        """The row of a part with which the piece at hand ends."""
        last = int(np.searchsorted(stops, self._begin + PIECE_BYTES - before))
        if (rows := self._form.block_rows) is None:
            return last
        return min(last, done + rows - 1 - (self._whole + self.rows) % rows)

    def close(self, check: int | None = None) -> None:
        begin, entries, block_rows = self._begin, self._entries, self._form.block_rows
        del entries[: max(0, bisect_right(entries, begin, key=itemgetter(1)) - 1)]  # can be many
        entry, place = entries[0] if entries else (begin, begin)
        # Without a number of rows, blocks begin where a member does.
        opens = place > self._block if block_rows is None else self._whole % block_rows == 0
        self._block = begin if opens else self._block
        if check is None:
            check = zlib.crc32(self._last, zlib.crc32(self._first))
        self.noted.append(
            (begin, self._at, self.rows, self._lines, check, entry, place, int(opens))
        )
        self._whole += self.rows
        self._open()


@dataclass(frozen=True, eq=False, kw_only=True)
class TextLayout(formats.Layout):
    """Each piece's line feeds before it, checksum, member's start, and whether it begins a block; the
    CRC-32 of all; and the rows whose types were found, with their bytes by column.
    """

    compression: str
    head: Start
    size: int
    content: int
    lines: IntArray
    checks: IntArray
    entries: IntArray
    places: IntArray
    opens: IntArray
    sampled: tuple[int, list[float]] | None = None

    @staticmethod
    def of(layout: formats.Layout) -> TextLayout:
        extra = formats.unpacked(layout.extra)
        extra["head"] = Start(*extra["head"])
        return TextLayout(
            layout.rows, layout.start, layout.stop, layout.schema, layout.extra, **extra
        )

    def with_types(self, schema: pa.Schema, rows: int, sizes: Sequence[float]) -> formats.Layout:
        extra = formats.packed(**{**formats.unpacked(self.extra), "sampled": [rows, list(sizes)]})
        return formats.Layout(self.rows, self.start, self.stop, schema, extra)

    @property
    def _firsts(self) -> IntArray:
        """First pieces of blocks, and their number."""
        return np.append(np.flatnonzero(self.opens), len(self.opens))

    @property
    def edges(self) -> IntArray:
        edges: IntArray = np.append(0, np.cumsum(self.rows))[self._firsts]
        return edges

    @property
    def largest_block(self) -> int:
        """Bytes of the largest block, and of the bytes decompressed to come to it."""
        firsts = self._firsts
        return int((self.stop[firsts[1:] - 1] - self.places[firsts[:-1]]).max(initial=0))
