"""Reads pieces of files of text: their bytes, checked against the index, and what they hold as columns.

A ``PieceReader`` is one place in the files, for one thread at a time: of a compressed file it keeps a stream
open and goes on where the last piece ended.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trainpipes.errors import TrainpipesError
from trainpipes.sources.compressed.streams import Stream, open_stream
from trainpipes.sources.files.file_bytes import open_bytes
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.remote.retry import Requests
from trainpipes.sources.text.block_index import BlockIndex
from trainpipes.sources.text.block_scan import check_of
from trainpipes.sources.text.format import TextFormat
from trainpipes.sources.text.row_errors import bad_row, bad_utf8, is_utf8


class OtherBytesError(Exception):
    """A piece is not what it was when its index was made."""


@dataclass(frozen=True)
class Held:
    """Bytes of a file, compressed as they are, that were fetched before they are read."""

    file: int
    start: int
    data: memoryview


class PieceReader:
    """Reads pieces.

    Args:
        files: the files.
        index: their pieces.
        form: their format.
        requests: makes those to servers.
        replace: put U+FFFD in place of what is not UTF-8.

    Attributes:
        held: bytes that are here already.
        passed: bytes decompressed so far only to reach a later piece.
    """

    def __init__(
        self,
        files: FileList,
        index: BlockIndex,
        form: TextFormat,
        requests: Requests,
        replace: bool = False,
    ) -> None:
        self._files, self._index, self._form = files, index, form
        self._requests, self._replace = requests, replace
        self.held: Held | None = None
        self.passed = 0
        self._file, self._at = -1, 0  # of the open stream
        self._over: Held | None = None  # the bytes that it is over, if they are here
        self._source: Any = None
        self._stream: Stream | None = None
        self._rest = b""

    def close(self) -> None:
        """Let go of the open file."""
        if self._source is not None:
            self._source.close()
        self._source = self._stream = None
        self._file, self._rest = -1, b""
        self.held = None

    def table(self, piece: int, schema: pa.Schema, strict: bool) -> pa.Table:
        """The rows of a piece.

        Args:
            piece: which.
            schema: columns, and types to hold to.
            strict: whether a column that is not in the schema is an error.

        Raises:
            UnreadableError: a row is broken; names the line.
            SchemaError: a row does not fit the schema.
            OtherBytesError: it is not what it was.
        """
        data = self._text(piece)
        file = self._index.file_of(piece)
        start, path = self._index.starts[file], self._files.names[file]
        problem: Exception | None = None
        try:
            found = self._form.parse(data, start, path, schema, strict)
            if len(found) == int(self._index.rows[piece]):
                return found
        except (pa.ArrowException, UnicodeDecodeError) as error:
            problem = error
        raise self._bad(piece, data, schema, strict) from problem

    def infer(self, piece: int) -> tuple[pa.Schema, list[float]]:
        """The columns and types of a piece's rows, and the bytes of each column in memory."""
        data = self._text(piece)
        file = self._index.file_of(piece)
        try:
            return self._form.infer(data, self._index.starts[file], self._files.names[file])
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise self._bad(piece, data, None, False) from error

    def _bad(
        self, piece: int, data: bytes, schema: pa.Schema | None, strict: bool
    ) -> TrainpipesError | OtherBytesError:
        said = bad_row(self._files, self._index, self._form, piece, data, schema, strict)
        return OtherBytesError() if said is None else said

    def _text(self, piece: int) -> bytes:
        """The bytes of a piece, which are UTF-8."""
        data = self.content(piece)
        if is_utf8(data):
            return data
        if self._replace:
            return data.decode("utf-8", "replace").encode()
        raise bad_utf8(self._files, self._index, self._form, piece, data)

    def content(self, piece: int) -> bytes:
        """The bytes of a piece, decompressed.

        Raises:
            OtherBytesError: they are not what they were.
            BadFileError: they cannot be decompressed.
        """
        index = self._index
        file, start, stop = index.file_of(piece), int(index.begins[piece]), int(index.stops[piece])
        if index.compressions[file]:
            data = self._decompressed(file, piece, start, stop)
        else:
            data = self._plain(file, start, stop)
        if len(data) != stop - start or check_of(data) != int(index.checks[piece]):
            raise OtherBytesError
        return data

    def _plain(self, file: int, start: int, stop: int) -> bytes:
        held = self.held
        if held is not None and held.file == file:
            if (start, stop) == (held.start, held.start + len(held.data)):
                return bytes(held.data)
            if held.start <= start and stop <= held.start + len(held.data):
                return bytes(held.data[start - held.start : stop - held.start])
        return bytes(open_bytes(self._files, file, self._requests).read([(start, stop)])[0])

    def _decompressed(self, file: int, piece: int, start: int, stop: int) -> bytes:
        place = int(self._index.places[piece])
        goes_on = self._stream is not None and file == self._file and self._over is self.held
        if not (goes_on and place <= self._at <= start):
            self._open(file, int(self._index.entries[piece]), place)
        assert self._stream is not None
        parts = []
        while self._at < stop:
            if not self._rest:
                self._rest = self._stream.read()
                if not self._rest:
                    break
            if self._at < start:
                skipped = min(len(self._rest), start - self._at)
                self._rest = self._rest[skipped:]
                self._at += skipped
                self.passed += skipped
            part = self._rest[: stop - self._at] if self._at >= start else b""
            self._rest = self._rest[len(part) :]
            self._at += len(part)
            parts.append(part)
        if piece + 1 == self._index.pieces(file).stop:
            while self._stream.read():  # blank lines, and the checksum of the last member
                pass
        return b"".join(parts)

    def _open(self, file: int, entry: int, place: int) -> None:
        held = self.held
        self.close()
        self.held = self._over = held
        if held is not None and held.file == file and held.start == entry:
            self._source = io.BytesIO(held.data)
        else:
            self._source = open_bytes(self._files, file, self._requests).stream(entry)
        self._stream = open_stream(self._source, self._index.compressions[file], (entry, place))
        self._file, self._at = file, place
