"""Reads samples of tar archives in order.

A ``TarReader`` is one place in the archives, for one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from trainpipes.errors import DataError
from trainpipes.kinds.source import Place
from trainpipes.sources.compressed.streams import open_stream
from trainpipes.sources.files.block_reader import explained
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.file_bytes import open_bytes
from trainpipes.sources.files.file_errors import changed
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.remote.ahead import Ahead
from trainpipes.sources.remote.retry import Requests
from trainpipes.sources.tar.layout import BLOCK, Forward

if TYPE_CHECKING:
    from trainpipes.sources.tar.read_webdataset import TarFiles


class TarReader:
    """One place in tar archives. Not for two threads at once.

    Args:
        source: the archives and blocks.
    """

    def __init__(self, source: TarFiles) -> None:
        self._source = source
        self._requests = Requests(source.files.retry_seconds)
        self._file = -1
        self._stream: Forward | None = None  # of a compressed archive
        self._opened: Any = None
        sizes = source.block_bytes
        self._ahead = Ahead(
            self._fetch_block, lambda block: float(sizes[block]), source.files.prefetch_bytes
        )
        self._held: tuple[int, tuple[memoryview, int]] | None = None  # a block that was fetched

    def expect(self, blocks: Sequence[int]) -> None:
        """Say which blocks will be read next, in order: those on other machines are fetched, several side
        by side."""
        source = self._source
        there = []
        for block in blocks:
            file = int(source.file_of_block[block])
            held = self._held is not None and self._held[0] == block
            if not (held or source.index.compressions[file] or is_local(source.files.system(file))):
                there.append(block)
        self._ahead.expect(there)

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        """Rows ``start`` to ``stop`` of a block.

        Raises:
            DataError: they cannot be had.
            UnreachableError: the server does not answer, or denies access.
        """
        source = self._source
        if start == stop:
            return pa.Table.from_batches([], source.schema)
        file, place = int(source.file_of_block[block]), source.place(block, start)
        first = int(source.index.first_row[file] + source.begins[block])
        rows = range(first + start, first + stop)
        what = "the samples here cannot be read"
        try:
            with explained(place, what, source.index.kept_in, (BadFileError, EOFError)):
                if source.index.compressions[file]:
                    content, at = self._decompressed(file, rows, place)
                elif is_local(source.files.system(file)):
                    content, at = source.local(file, place), 0
                else:
                    content, at = self._fetched(block)
                return source.table(rows, file, content, at, place)
        except DataError:
            self.close()
            raise

    def _fetched(self, block: int) -> tuple[memoryview, int]:
        """The bytes of a block of an archive on another machine, and where they begin."""
        if self._held is None or self._held[0] != block:
            found = self._ahead.take(block)
            self._held = block, self._fetch_block(block) if found is None else found
        return self._held[1]

    def _fetch_block(self, block: int) -> tuple[memoryview, int]:
        source = self._source
        file = int(source.file_of_block[block])
        first = int(source.index.first_row[file] + source.begins[block])
        start, stop = source.index.span(first, first + int(source.lengths[block]))
        start = max(0, start - BLOCK)  # with the first header
        return open_bytes(source.files, file, self._requests).read([(start, stop)])[0], start

    def _decompressed(self, file: int, rows: range, place: Place) -> tuple[memoryview, int]:
        """The bytes of samples of a compressed archive, and where they begin."""
        source = self._source
        start, stop = source.index.span(rows.start, rows.stop)
        if self._stream is None or self._file != file or self._stream.at > start:
            self.close()
            self._opened = open_bytes(source.files, file, self._requests).stream()
            kind = source.index.compressions[file]
            self._file, self._stream = file, Forward(open_stream(self._opened, kind))
            if rows.start > source.index.first_row[file]:
                source.read_again.add(start)
        found = b""
        if self._stream.skip(start - self._stream.at):
            found = self._stream.take(stop - start)
        if len(found) < stop - start:
            raise changed(place, "it has become shorter")
        return memoryview(found), start

    def close(self) -> None:
        """Let go of what is open."""
        self._stream, self._file, self._held = None, -1, None
        if self._opened is not None:
            with closing(self._opened):
                self._opened = None
