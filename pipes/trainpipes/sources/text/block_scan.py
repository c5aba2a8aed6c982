"""Cuts a file of text into pieces of whole rows: reads it once, and notes where each piece is.

A piece is what is parsed at once: some MB, or more if a row is longer. Of each is noted how many rows it has,
the line that it starts with, a checksum of its ends, and the compressed member that it can be read from.
Called by the threads that make an index; holds about 2 MB of the file.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from trainpipes.engine.layout import IntArray
from trainpipes.sources.compressed.streams import Entry, Stream
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.text.format import Cutter, Start, TextFormat

#: Bytes of a piece, about. Smaller ones cost a request each, larger ones memory in each reader.
PIECE_BYTES = 4 << 20
#: Bytes at each end of a piece that are checked when it is read.
END_BYTES = 1024
#: First bytes that a format is shown, and most of them, if it asks for more.
HEAD_BYTES, MOST_HEAD_BYTES = 64 << 10, 16 << 20
UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass
class Pieces:
    """The pieces of one file, in order; places are in its decompressed bytes.

    Args:
        start: what its first bytes say.
        stops: where each piece ends; it begins where the one before it ends, the first one at ``start``.
        rows: of each.
        lines: line feeds in each.
        checks: checksum of each, by ``check_of``.
        entries: of each, where in the file the member begins that it starts in.
        places: of each, where in the decompressed bytes that is.
        lines_before: line feeds before the first one.
    """

    start: Start
    stops: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    checks: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    lines_before: int = 0


def check_of(data: bytes | memoryview) -> int:
    """A checksum of a piece's first and last 1,024 bytes: cheap enough for every read."""
    return zlib.crc32(data[-END_BYTES:], zlib.crc32(data[:END_BYTES]))


def scan(
    stream: Stream, compressed: bool, form: TextFormat, path: str, block_rows: int | None
) -> Pieces:
    """The pieces of a file.

    Args:
        stream: its decompressed bytes, from the first one.
        compressed: whether they are decompressed; if not, they can be read from anywhere.
        form: what tells where rows end.
        path: the file's name.
        block_rows: rows in a block, which no piece goes beyond.

    Raises:
        BadFileError: it is no such file.
    """
    chunks = _chunks(stream)
    head, whole = b"", False
    start = None
    while start is None:
        more = next(chunks, b"")
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
    entries = stream.entries if compressed else None
    found = _Scan(entries, form.cutter(start, path), start, block_rows, form.max_row_bytes)
    found.pieces.lines_before = head.count(b"\n", 0, start.at)
    found.add(head[start.at :])
    for chunk in chunks:
        found.add(chunk)
    return found.finish()


def _chunks(stream: Stream) -> Iterator[bytes]:
    while chunk := stream.read():
        yield chunk


class _Scan:
    """A scan on its way: what is known of the piece at hand."""

    def __init__(
        self,
        entries: list[Entry] | None,
        cutter: Cutter,
        start: Start,
        block_rows: int | None,
        most: int,
    ) -> None:
        self.pieces = Pieces(start)
        self._entries, self._cutter, self._block_rows = entries, cutter, block_rows
        self._most = most
        self._at = start.at  # bytes seen
        self._first = start.at  # where the piece begins
        self._last = start.at  # where the last row ended
        self._rows = self._lines = 0  # of the piece so far; lines may be beyond its last row
        self._left = block_rows  # rows until the block's end
        self._head = self._tail = b""  # of the piece; the last bytes seen
        self._lines_after = 0  # line feeds behind the last row
        self._blank = 0  # of these before the next one
        self._end = b""  # the last bytes up to the end of the last row

    def add(self, chunk: bytes) -> None:
        """Go on with the next bytes."""
        data = np.frombuffer(chunk, np.uint8)
        newlines = np.flatnonzero(data == 10)
        base = self._at
        stops = self._cutter.stops(data, newlines)
        self._refuse_long(stops, newlines, chunk)
        self._head += chunk[: END_BYTES - len(self._head)]
        counted = done = 0  # line feeds counted, stops passed
        while done < len(stops):
            last = int(np.searchsorted(stops, self._first + PIECE_BYTES - base))
            if self._left is not None:
                last = min(last, done + self._left - self._rows - 1)
            if last >= len(stops):
                break
            stop = int(stops[last])
            lines = int(np.searchsorted(newlines, stop))
            self._rows += last + 1 - done
            self._lines += lines - counted
            self._close(base + stop, self._tail + chunk[max(0, stop - END_BYTES) : stop])
            self._head = chunk[stop : stop + END_BYTES]
            done, counted = last + 1, lines
        self._rows += len(stops) - done
        self._lines += len(newlines) - counted
        if len(stops):
            self._last = base + int(stops[-1])
            self._lines_after = len(newlines) - int(np.searchsorted(newlines, stops[-1]))
            stop = int(stops[-1])
            self._end = (self._tail + chunk[max(0, stop - END_BYTES) : stop])[-END_BYTES:]
            self._blank = _blank_lines(chunk, stop)
        else:
            self._lines_after += len(newlines)
        self._tail = (self._tail + chunk[-END_BYTES:])[-END_BYTES:]
        self._at = base + len(chunk)

    def _refuse_long(self, stops: IntArray, newlines: IntArray, chunk: bytes) -> None:
        """Raise if a row of the next bytes, or what is there of it, is longer than rows may be."""
        begins = np.append(self._last - self._at, stops)
        long = np.flatnonzero(np.append(stops, len(chunk)) - begins > self._most)
        if len(long):
            first = int(long[0])
            line = self._line
            if first:
                begin = int(begins[first])
                line += self._lines_after - self._blank + int(np.searchsorted(newlines, begin))
                line += _blank_lines(chunk, begin)
            raise BadFileError(
                f"line {line:,}: a row here has more than {self._most:,} bytes: this is not text, or has no "
                "line ends; for rows of that size give max_row_bytes="
            )

    def _close(self, stop: int, tail: bytes) -> None:
        """Note the piece that ends here."""
        found, first = self.pieces, self._first
        size = stop - first
        tail = tail[-min(size, END_BYTES) :] if size else b""
        entry, entries = (first, first), self._entries
        if entries is not None:
            passed = sum(1 for _ in takewhile(lambda one: one[1] <= first, entries))
            del entries[: max(0, passed - 1)]  # they can be many
            entry = entries[0] if entries else (0, 0)
        found.stops.append(stop)
        found.rows.append(self._rows)
        found.lines.append(self._lines)
        found.checks.append(zlib.crc32(tail, zlib.crc32(self._head[:size])))
        found.entries.append(entry[0])
        found.places.append(entry[1])
        if self._left is not None and self._block_rows is not None:
            self._left = self._left - self._rows or self._block_rows
        self._first, self._rows, self._lines = stop, 0, 0

    @property
    def _line(self) -> int:
        """The line, from 1, that the row at hand begins in."""
        lines = sum(self.pieces.lines) + self._lines - self._lines_after
        return self.pieces.lines_before + lines + self._blank + 1

    def finish(self) -> Pieces:
        """All pieces, at the end of the file."""
        try:
            more = self._cutter.finish()
        except BadFileError as error:
            raise BadFileError(f"line {self._line:,}: {error}") from error
        if more:
            self._rows += 1
            self._close(self._at, self._tail)
        elif self._rows:
            self._lines -= self._lines_after
            self._close(self._last, self._end)
        return self.pieces


def _blank_lines(chunk: bytes, start: int) -> int:
    """Line feeds from a place on, before anything of a row."""
    text = chunk[start : start + END_BYTES]
    return text.count(b"\n", 0, len(text) - len(text.lstrip(b", \t\r\n")))
