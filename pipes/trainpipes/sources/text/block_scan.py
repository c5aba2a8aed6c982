from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from trainpipes.engine.layout import IntArray
from trainpipes.sources.compressed.streams import Entry, Stream
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.format import Layout, packed, unpacked
from trainpipes.sources.text.cutters import Cutter

if TYPE_CHECKING:
    from trainpipes.sources.text.format import TextFormat

#: Bytes of a piece, about. Smaller ones cost a request each, larger ones memory in each reader.
PIECE_BYTES = 4 << 20
#: Bytes at each end of a piece that are checked when it is read.
END_BYTES = 1024
#: First bytes that a format is shown, and most of them, if it asks for more.
HEAD_BYTES, MOST_HEAD_BYTES = 64 << 10, 16 << 20
UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Start:
    """The first row's place, the columns' names, and the delimiter or "array", by the first bytes."""

    at: int = 0
    names: tuple[str, ...] = ()
    kind: str = ""


def check_of(data: bytes | memoryview) -> int:
    """A checksum of the first and last 1,024 bytes: cheap enough for every read."""
    return zlib.crc32(data[-END_BYTES:], zlib.crc32(data[:END_BYTES]))


def scan(stream: Stream, compression: str, form: TextFormat, path: str, size: int) -> Layout:
    head, whole, start = b"", False, None
    while start is None:
        more = stream.read()
        head, whole = head + more, not more
        if len(head) < HEAD_BYTES and not whole:
            continue
        if head[:2] in UTF16:
            kind = "UTF-32" if head[2:4] == b"\0\0" else "UTF-16"
            raise BadFileError(
                f"its text is {kind}: write it as UTF-8, as by iconv -f {kind.lower()} -t utf-8"
            )
        start = form.start(head, whole, path)
        if start is None and (whole or len(head) > MOST_HEAD_BYTES):
            raise BadFileError(f"not {form.name}: its first {len(head):,} bytes hold no line end")
    line = head.count(b"\n", 0, start.at) + 1
    entries = stream.entries if compression else None
    begin = _Mark(start.at, 0, 0, line, b"")
    found = _Scan(entries, form.cutter(start), begin, form.block_rows, form.max_row_bytes)
    found.add(head[start.at :])
    while chunk := stream.read():
        found.add(chunk)
    found.finish()
    pieces = np.array(found.pieces, dtype=np.int64).reshape(-1, 6)
    stops, rows, lines, checks, entered, places = np.ascontiguousarray(pieces.T)
    extra = packed(
        compression=compression,
        at=start.at,
        names=list(start.names),
        kind=start.kind,
        lines_before=line - 1,
        size=size,
        lines=lines,
        checks=checks,
        entries=entered,
        places=places,
    )
    begins = np.append(start.at, stops)[: len(stops)]
    return Layout(rows, begins, stops, pa.schema([]), extra)


@dataclass(frozen=True)
class _Mark:
    """A place in a file: rows and lines before it, and the last bytes before it."""

    at: int
    rows: int
    lines: int
    line: int
    tail: bytes


@dataclass
class _Scan:
    _entries: list[Entry] | None
    _cutter: Cutter
    _begin: _Mark  # of the piece at hand
    _block_rows: int | None
    _most: int

    def __post_init__(self) -> None:
        self.pieces: list[tuple[int, ...]] = []
        # Where the last row ends, and what was read.
        self._row = self._end = self._begin
        self._line = self._begin.line
        self._head = b""  # the first bytes of the piece

    def add(self, chunk: bytes) -> None:
        data = np.frombuffer(chunk, np.uint8)
        newlines = np.flatnonzero(data == 10)
        stops = self._cutter.stops(data, newlines)
        before = self._end

        def mark(row: int, stop: int) -> _Mark:
            lines = before.lines + int(np.searchsorted(newlines, stop))
            tail = (before.tail + chunk[max(0, stop - END_BYTES) : stop])[-END_BYTES:]
            line = self._line + lines + _blank_lines(chunk, stop)
            return _Mark(before.at + stop, before.rows + row + 1, lines, line, tail)

        begins = np.append(self._row.at - before.at, stops)
        long = np.flatnonzero(np.append(stops, len(chunk)) - begins > self._most)
        if len(long):
            row = int(long[0]) - 1
            line = (self._row if row < 0 else mark(row, int(stops[row]))).line
            raise BadFileError(
                f"line {line:,}: a row here has more than {self._most:,} bytes: this is not text, or has no "
                "line ends; for rows of that size give max_row_bytes="
            )
        self._head += chunk[: END_BYTES - len(self._head)]
        while (row := self._last_row(stops)) < len(stops):
            stop = int(stops[row])
            self._close(mark(row, stop))
            self._head = chunk[stop : stop + END_BYTES]
        if len(stops):
            self._row = mark(len(stops) - 1, int(stops[-1]))
        self._end = mark(len(stops) - 1, len(chunk))

    def _last_row(self, stops: IntArray) -> int:
        begin, before = self._begin, self._end
        last = int(np.searchsorted(stops, begin.at + PIECE_BYTES - before.at))
        if self._block_rows is None:
            return last
        left = self._block_rows - begin.rows % self._block_rows
        return min(last, begin.rows + left - before.rows - 1)

    def _close(self, end: _Mark) -> None:
        begin, entries = self._begin, self._entries
        size, entry = end.at - begin.at, (begin.at, begin.at)
        if entries is not None:
            passed = bisect_right(entries, begin.at, key=itemgetter(1))
            del entries[: max(0, passed - 1)]  # they can be many
            entry = entries[0] if entries else (0, 0)
        tail = end.tail[max(0, len(end.tail) - size) :]
        check = zlib.crc32(tail, zlib.crc32(self._head[:size]))
        self.pieces.append((end.at, end.rows - begin.rows, end.lines - begin.lines, check, *entry))
        self._begin = end

    def finish(self) -> None:
        try:
            more = self._cutter.finish()
        except BadFileError as error:
            raise BadFileError(f"line {self._row.line:,}: {error}") from error
        if more:
            self._close(replace(self._end, rows=self._end.rows + 1))
        elif self._row.rows > self._begin.rows:
            self._close(self._row)


def _blank_lines(chunk: bytes, start: int) -> int:
    text = chunk[start : start + END_BYTES]
    return text.count(b"\n", 0, len(text) - len(text.lstrip(b", \t\r\n")))


@dataclass(frozen=True, eq=False, kw_only=True)
class TextLayout(Layout):
    """Each piece's line feeds before it, checksum, and member's start; and the rows whose types were found,
    with their bytes by column.
    """

    compression: str
    head: Start
    lines: IntArray
    checks: IntArray
    entries: IntArray
    places: IntArray
    size: int
    sampled: tuple[int, list[float]] | None = None

    @staticmethod
    def of(layout: Layout) -> TextLayout:
        extra = unpacked(layout.extra)
        lines = extra.pop("lines")
        extra["lines"] = extra.pop("lines_before") + np.cumsum(lines) - lines
        extra["head"] = Start(extra.pop("at"), tuple(extra.pop("names")), extra.pop("kind"))
        return TextLayout(
            layout.rows, layout.start, layout.stop, layout.schema, layout.extra, **extra
        )

    def with_types(self, schema: pa.Schema, rows: int, sizes: Sequence[float]) -> Layout:
        extra = packed(**{**unpacked(self.extra), "sampled": [rows, list(sizes)]})
        return Layout(self.rows, self.start, self.stop, schema, extra)

    def first_pieces(self, block_rows: int | None) -> IntArray:
        """First pieces of blocks, and their number. Without ``block_rows``, a piece in which a member begins
        ends a block.
        """
        count = len(self.rows)
        found = [0] if count else []
        if block_rows is not None and count:
            counted = np.cumsum(self.rows[:-1])
            found += (1 + np.flatnonzero(counted % block_rows == 0)).tolist()
        elif block_rows is None:
            for piece in range(1, count):
                if self.places[piece] > self.start[found[-1]]:
                    found.append(piece)
        return np.array([*found, count], dtype=np.int64)

    def largest_block(self, block_rows: int | None) -> int:
        """Bytes of the largest block, with what is decompressed to come to it."""
        firsts = self.first_pieces(block_rows)
        return int((self.stop[firsts[1:] - 1] - self.places[firsts[:-1]]).max(initial=0))

    def edges(self, block_rows: int | None) -> IntArray:
        found: IntArray = np.append(0, np.cumsum(self.rows))[self.first_pieces(block_rows)]
        return found
