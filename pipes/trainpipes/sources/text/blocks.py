"""Files of text as blocks of rows: what ``read_json``, ``read_csv`` and ``read_text`` have in common.

A file is read once, by ``block_scan``, which cuts it into pieces of some MB that can be parsed by themselves.
A block is one piece; with ``block_rows``, or in a compressed file that cannot be entered everywhere, several.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.progress import Progress
from trainpipes._internal.text import amount
from trainpipes.engine.layout import IntArray
from trainpipes.sources.compressed.streams import (
    Decompressed,
    ReadAgain,
    Source,
    kind_by_content,
    kind_by_name,
    open_stream,
)
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.file_bytes import FileBytes, as_bytes
from trainpipes.sources.files.format import Format, Layout, OtherBytesError, packed, unpacked
from trainpipes.sources.files.index_store import Scan
from trainpipes.sources.text.block_scan import PIECE_BYTES, check_of, scan
from trainpipes.sources.text.format import Piece, Start, TextFormat
from trainpipes.sources.text.row_errors import bad_row, bad_utf8, is_utf8

#: What is kept of each piece besides; see ``Pieces``.
PIECES = ("lines", "checks", "entries", "places")
#: How much larger than a piece a compressed block is, at which ``explain()`` says how to make it smaller.
LARGE = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class TextLayout(Layout):
    """The pieces of a file.

    Args:
        compression: what it is compressed with; "" for nothing.
        head: what its first bytes say.
        lines: line feeds before each piece, int64 ``[pieces]``.
        checks: checksum of each, by ``check_of``.
        entries: where in the file the member begins that each is read from.
        places: where in the decompressed bytes that is.
        size: bytes of the file.
        sampled: rows whose types were found, and bytes of these in memory, of each column; None if no types
            were looked for.
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
        """The layout that an index keeps."""
        extra = unpacked(layout.extra)
        lines = extra.pop("lines")
        extra["lines"] = extra.pop("lines_before") + np.cumsum(lines) - lines
        extra["head"] = Start(extra.pop("at"), tuple(extra.pop("header")))
        return TextLayout(
            layout.rows, layout.start, layout.stop, layout.schema, layout.extra, **extra
        )

    def with_types(self, schema: pa.Schema, rows: int, sizes: Sequence[float]) -> Layout:
        """The layout with what was found of its types, to be kept.

        Args:
            schema: columns and types of its rows.
            rows: rows that were looked at.
            sizes: bytes of these in memory, of each column.
        """
        extra = packed(**{**unpacked(self.extra), "sampled": [rows, list(sizes)]})
        return Layout(self.rows, self.start, self.stop, schema, extra)

    def first_pieces(self, block_rows: int | None) -> IntArray:
        """Numbers of the pieces that blocks begin with, and that of all.

        Without ``block_rows``, a block ends after the first piece that has a member's beginning within the
        block, so that less than a block must be decompressed to come to a block's first row. A file of one
        member is one block.
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

    def edges(self, block_rows: int | None) -> IntArray:
        """The first row of each block, and the number of rows."""
        found: IntArray = np.append(0, np.cumsum(self.rows))[self.first_pieces(block_rows)]
        return found


class TextFile:
    """An open file of text.

    Args:
        data: its bytes.
        layout: its pieces.
        again: counts what is decompressed only to reach later bytes.
    """

    def __init__(self, data: FileBytes, layout: TextLayout, again: ReadAgain) -> None:
        self._data, self.layout, self.name = data, layout, data.name
        self._stream = Decompressed(data, layout.compression, again) if layout.compression else None

    def content(self, number: int) -> bytes:
        """The bytes of a piece, decompressed.

        Raises:
            OtherBytesError: they are not what they were.
            BadFileError: they cannot be decompressed.
        """
        layout = self.layout
        start, stop = int(layout.start[number]), int(layout.stop[number])
        if self._stream is None:
            data = as_bytes(self._data.read([(start, stop)])[0])
        else:
            entry = int(layout.entries[number]), int(layout.places[number])
            data = self._stream.read(start, stop, entry)
            if number == len(layout.rows) - 1:
                self._stream.finish()
        if len(data) != stop - start or check_of(data) != int(layout.checks[number]):
            raise OtherBytesError("it has as many bytes as before, and others")
        return data

    def where(self, number: int) -> Piece:
        """Where a piece stands."""
        layout = self.layout
        before = int(layout.rows[:number].sum())
        line, begin = int(layout.lines[number]), int(layout.start[number])
        return Piece(self.name, layout.head, line, begin, before, bool(layout.compression))

    def close(self) -> None:
        """Let go of the file."""
        if self._stream is not None:
            self._stream.close()


class TextBlocks(Format):
    """Blocks of rows of text.

    Args:
        form: where rows end, and how they are parsed.
        schema: columns and types to hold to; None while they are looked for.
        strict: whether a column that is not in the schema is an error.
        replace: put U+FFFD in place of what is not UTF-8.
        block_rows: rows in a block; None to cut by bytes.
    """

    known_by_blocks = True

    def __init__(
        self,
        form: TextFormat,
        schema: pa.Schema | None = None,
        strict: bool = False,
        replace: bool = False,
        block_rows: int | None = None,
    ) -> None:
        self.form, self.schema, self.strict = form, schema, strict
        self.replace, self.block_rows = replace, block_rows
        self.name = form.name
        self.again = ReadAgain()

    def scan(self, file: FileBytes) -> Layout:
        return self._scanned(file, None)

    def look(self, job: Scan) -> Layout:
        """``scan``, with progress by bytes."""
        return self._scanned(job.data, job.progress)

    def _scanned(self, data: FileBytes, progress: Progress | None) -> Layout:
        head = bytes(data.read([(0, min(data.size, 16))])[0])
        compression, named = kind_by_content(head), kind_by_name(data.name)
        if named and not compression and data.size:  # Arrow writes nothing where there are no rows
            raise BadFileError(f"its name says {named}, and it starts with {head[:6]!r}")
        with closing(data.stream()) as source:
            stream = open_stream(_Told(source, progress), compression)
            pieces = scan(stream, bool(compression), self.form, data.name, self.block_rows)
        stops = np.array(pieces.stops, dtype=np.int64)
        begins = np.append(pieces.start.at, stops[:-1]) if len(stops) else stops
        extra = packed(
            compression=compression,
            at=pieces.start.at,
            header=list(pieces.start.header),
            lines_before=pieces.lines_before,
            size=data.size,
            **{name: np.array(getattr(pieces, name), dtype=np.int64) for name in PIECES},
        )
        return Layout(np.array(pieces.rows, dtype=np.int64), begins, stops, pa.schema([]), extra)

    def open(self, data: FileBytes, layout: Layout) -> TextFile:
        assert isinstance(layout, TextLayout)
        return TextFile(data, layout, self.again)

    def ranges(
        self, layout: Layout, block: int, columns: Sequence[str] | None
    ) -> list[tuple[int, int]]:
        assert isinstance(layout, TextLayout)
        stop = int(layout.stop[block])
        if not layout.compression:
            return [(int(layout.start[block]), stop)]
        behind = np.flatnonzero(layout.places[block + 1 :] >= stop)
        end = layout.entries[block + 1 + behind[0]] if len(behind) else layout.size
        return [(int(layout.entries[block]), int(end))]

    def decode(
        self, data: TextFile, layout: Layout, block: int, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        yield from self.table(data, block).to_batches()

    def table(self, file: TextFile, number: int) -> pa.Table:
        """The rows of a piece.

        Raises:
            UnreadableError: a row is broken; names the line.
            SchemaError: a row does not fit the schema.
            OtherBytesError: it is not what it was.
        """
        text, start = self._text(file, number), file.layout.head
        problem: Exception | None = None
        try:
            found = self.form.parse(text, start, file.name, self.schema, self.strict)
            if len(found) == int(file.layout.rows[number]):
                return found
        except (pa.ArrowException, UnicodeDecodeError) as error:
            problem = error
        raise self._bad(file, number, text) from problem

    def infer(self, file: TextFile, number: int) -> tuple[pa.Schema, list[float]]:
        """The columns and types of a piece's rows, and the bytes of each column in memory."""
        text = self._text(file, number)
        try:
            return self.form.infer(text, file.layout.head, file.name)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise self._bad(file, number, text) from error

    def _text(self, file: TextFile, number: int) -> bytes:
        """The bytes of a piece, which are UTF-8."""
        data = file.content(number)
        if is_utf8(data):
            return data
        if self.replace:
            return data.decode("utf-8", "replace").encode()
        raise bad_utf8(file.where(number), self.form, data)

    def _bad(self, file: TextFile, number: int, text: bytes) -> Exception:
        said = bad_row(file.where(number), self.form, text, self.schema, self.strict)
        return OtherBytesError("its rows are others than before") if said is None else said

    def block_key(self, layout: Layout, blocks: range) -> list[Any]:
        assert isinstance(layout, TextLayout)
        said = str(self.schema).encode("utf-8", "backslashreplace")
        checks = layout.checks[blocks.start : blocks.stop].tolist()
        return [checks, hashlib.sha256(said).hexdigest()[:16], self.replace]

    def describe(self, layouts: Sequence[Layout]) -> list[tuple[str, str]]:
        compressed = [each for each in layouts if isinstance(each, TextLayout) and each.compression]
        if not compressed:
            return []
        largest = np.array([self._largest(each) for each in compressed])
        said = "can be read from every few MB on"
        if (largest > LARGE * PIECE_BYTES).any():
            said = (
                f"{(largest > LARGE * PIECE_BYTES).sum():,} of {len(layouts):,} files can only be read from "
                f"few places on, up to {amount(largest.max())} apart: each shard, and each resume, reads "
                "from the last such place. Write more files, or files of several members, by bgzip or pzstd"
            )
        lines = [("compressed", said)]
        if self.again.bytes:
            lines.append(("read again", f"{amount(self.again.bytes)} so far, in this process"))
        return lines

    def _largest(self, layout: TextLayout) -> int:
        """Bytes of the largest block, with what is decompressed to come to it."""
        firsts = layout.first_pieces(self.block_rows)
        if len(firsts) < 2:
            return 0
        ends = layout.stop[firsts[1:] - 1]
        return int((ends - layout.places[firsts[:-1]]).max())


class _Told:
    """The bytes of a file, with progress."""

    def __init__(self, source: Source, progress: Progress | None) -> None:
        self._source, self._progress = source, progress

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        if self._progress is not None:
            self._progress.advance(len(data))
        return data
