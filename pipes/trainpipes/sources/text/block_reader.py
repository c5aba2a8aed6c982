"""One place in files of text: reads rows of blocks, parses some MB at a time, and says what is wrong.

Made by ``BlockSource.reader``; used by one thread at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from trainpipes.errors import DataChangedError, DataError, TrainpipesError, UnreachableError
from trainpipes.sources.files.each_file import reason
from trainpipes.sources.files.file_bytes import open_bytes
from trainpipes.sources.files.file_errors import changed, gone, located, unreachable, unreadable
from trainpipes.sources.files.index_store import forget
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.remote.ahead import Ahead
from trainpipes.sources.remote.retry import Requests
from trainpipes.sources.text.piece_reader import Held, OtherBytesError, PieceReader

if TYPE_CHECKING:
    from trainpipes.sources.text.blocks import BlockSource

#: Bytes of a block that are fetched before they are read in any case; of much larger ones, a part at
#: a time.
FETCH_BYTES = 16 << 20


class BlockReader:
    """One place in files of text. Not for two threads at once.

    Args:
        source: the files and blocks.
    """

    def __init__(self, source: BlockSource) -> None:
        self._source = source
        self._requests = Requests(source.files.retry_seconds)
        weakref.finalize(self, self._requests.stop)
        self._pieces = PieceReader(
            source.files, source.index, source.form, self._requests, source.replace
        )
        fetch = partial(_fetch, source, self._requests)
        most = source.files.prefetch_bytes
        self._ahead = Ahead(fetch, lambda block: float(np.diff(source.fetched(block))[0]), most)
        self._largest = max(FETCH_BYTES, most // 4)
        self._piece, self._table = -1, None  # the one that was read last
        self._block = -1

    def expect(self, blocks: Sequence[int]) -> None:
        """Say which blocks will be read next, in order. Those of remote files are fetched at once, several
        side by side; of large ones a part at a time, when they are read."""
        source = self._source
        files = source.files
        remote = [
            block
            for block in blocks
            if not is_local(files.system(int(source.file_of_block[block])))
        ]
        self._ahead.expect([b for b in remote if np.diff(source.fetched(b))[0] <= self._largest])

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        """Rows ``start`` to ``stop`` of a block.

        Parses some MB at a time, and keeps what it has parsed last. Of a compressed file, what is between
        its place and ``start`` is decompressed and dropped.

        Raises:
            MissingFilesError: the file is gone.
            DataChangedError: the file is no longer the one that was listed.
            UnreadableError: a row cannot be read; names its line.
            SchemaError: a row does not fit the schema; names its line.
            UnreachableError: the server does not answer, or denies access.
        """
        source, index = self._source, self._source.index
        length = int(source.lengths[block])
        if not 0 <= start <= stop <= length:
            raise IndexError(f"rows {start} to {stop} of a block with {length} rows")
        first, last = index.piece_of_block[block : block + 2].tolist()
        ends = np.cumsum(index.rows[first:last])
        parts: list[pa.Table] = []
        passed = self._pieces.passed
        try:
            if block != self._block:
                self._block = block
                self._pieces.held = self._ahead.take(block)
            while start < stop:
                number = int(np.searchsorted(ends, start, side="right"))
                piece, before = first + number, int(ends[number] - index.rows[first + number])
                if piece != self._piece:
                    self._table = None  # before the next one is here
                    self._table = self._pieces.table(piece, source.schema, source.strict)
                    self._piece = piece
                assert self._table is not None
                end = min(stop, int(ends[number]))
                parts.append(self._table.slice(start - before, end - start))
                start = end
        except BaseException as error:
            self.close()
            failed = self._explain(block, start, error)
            if failed is None:
                raise
            raise failed from error
        source.read_again.add(self._pieces.passed - passed)
        return pa.concat_tables(parts) if parts else pa.Table.from_batches([], source.schema)

    def close(self) -> None:
        """Let go of the open file."""
        self._pieces.close()
        self._piece, self._table = -1, None
        self._block = -1

    def _explain(self, block: int, row: int, error: BaseException) -> TrainpipesError | None:
        """What has become of the file; None for errors that are not about it, or say it themselves."""
        unplaced = isinstance(error, DataChangedError) and error.row is None
        if not unplaced and isinstance(error, DataError | MemoryError):
            return None
        if not isinstance(error, Exception):
            return None
        source = self._source
        place = source.place(block, row)
        file = int(source.file_of_block[block])
        try:
            if isinstance(error, UnreachableError | DataChangedError | FileNotFoundError):
                raise error
            open_bytes(source.files, file, self._requests).read(
                [(0, min(1, int(source.sizes[file])))]
            )
        except UnreachableError as failed:
            return unreachable(place, failed)
        except DataChangedError as failed:
            return located(place, failed)
        except FileNotFoundError:
            return gone(place)
        forget(source.index.kept_in)  # it may be what is wrong
        if isinstance(error, OtherBytesError):
            return changed(place, "it has as many bytes as before, and others")
        return unreadable(place, f"the data here cannot be read: {reason(error)}")


def _fetch(source: BlockSource, requests: Requests, block: int) -> Held:
    """The bytes of a block; in any thread."""
    file = int(source.file_of_block[block])
    start, stop = source.fetched(block)
    return Held(file, start, open_bytes(source.files, file, requests).read([(start, stop)])[0])
