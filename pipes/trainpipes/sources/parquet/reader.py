"""Reads rows of Parquet row groups in order, a little at a time, and keeps its place.

A row group is decoded as a stream: of each column one page and one read buffer are in memory, and
one batch of rows. The whole group never is.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from trainpipes.columns.arrays import replaced
from trainpipes.errors import DataChangedError, DataError, TrainpipesError, UnreachableError
from trainpipes.kinds.source import Place
from trainpipes.sources.files.each_file import BadFileError, reason
from trainpipes.sources.files.file_bytes import open_bytes
from trainpipes.sources.files.file_errors import changed, gone, located, unreachable, unreadable
from trainpipes.sources.files.index_store import forget
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.files.range_file import HELD_BYTES
from trainpipes.sources.files.schema import cast_to
from trainpipes.sources.parquet.file import ChangedError, ParquetFile
from trainpipes.sources.parquet.folders import repeated
from trainpipes.sources.parquet.index import ParquetIndex, parse_footer, read_footer
from trainpipes.sources.remote.ahead import Ahead
from trainpipes.sources.remote.retry import Requests

if TYPE_CHECKING:
    from trainpipes.sources.parquet.read_parquet import ParquetSource

GONE = "gone"
#: Bytes of a row group that is worth a request of its own.
LARGE = 1 << 20


def change_of(files: FileList, index: ParquetIndex, file: int, requests: Requests) -> str:
    """What has changed about a file: the saved and the present value. "gone" if it is not there;
    nothing if it is the same, or cannot be read.

    Raises:
        DataChangedError: it is not the one that was listed.
        UnreachableError: the server does not say.
    """
    try:
        footer = read_footer(open_bytes(files, file, requests))
        if index.is_footer(file, footer):
            return ""
    except FileNotFoundError:
        return GONE
    except BadFileError as error:
        return reason(error)
    except OSError as error:
        if isinstance(error, UnreachableError | DataChangedError):
            raise
        return ""
    try:
        metadata = parse_footer(footer)
    except (pa.ArrowException, OSError) as error:
        return reason(error)
    saved = index.rows[index.groups(file)].tolist()
    rows = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
    if len(rows) != len(saved):
        return f"it had {len(saved)} row groups, and has {len(rows)}"
    for number, (old, new) in enumerate(zip(saved, rows, strict=True)):
        if old != new:
            return f"its row group {number} had {old:,} rows, and has {new:,}"
    return "it has as many bytes and rows as before, and another footer"


#: Bytes of footers that stay parsed.
FOOTER_BYTES = 8 << 20


class Footers:
    """Parsed footers of the files opened last, shared by the readers of a process.

    Row groups in shuffled order open another file each. For files of 200 row groups of 1,000 rows, to
    parse the footer again would be three quarters of the work. Every use is checked against the
    file's own footer. Pickled, it is empty.
    """

    def __init__(self) -> None:
        self._parsed: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return Footers, ()

    def known(self, file: int) -> Any:
        """The parsed footer of a file; None if it is not here."""
        with self._lock:
            if file not in self._parsed:
                return None
            self._parsed.move_to_end(file)
            return self._parsed[file][0]

    def parse(self, file: int, footer: bytes) -> Any:
        """The parsed footer of a file, which must be the one in the index."""
        found = self.known(file)
        if found is not None:
            return found
        found = parse_footer(footer)
        with self._lock:
            if file not in self._parsed:
                self._parsed[file] = found, len(footer)
                self._bytes += len(footer)
            while self._bytes > FOOTER_BYTES:
                self._bytes -= self._parsed.popitem(last=False)[1][1]
        return found


class ParquetReader:
    """One place in a Parquet source. Not for two threads at once.

    Args:
        source: the files and row groups.
    """

    def __init__(self, source: ParquetSource) -> None:
        self._source = source
        self._file: ParquetFile | None = None
        self._folder: dict[
            str, pa.Array
        ] = {}  # values that names of folders give the open file's rows
        self._block = -1
        self._row = 0
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None
        self._requests = Requests(source.files.retry_seconds)
        weakref.finalize(self, self._requests.stop)
        opened_ahead = partial(_opened_ahead, source, self._requests)
        self._ahead = Ahead(opened_ahead, partial(_bytes_of, source), source.files.prefetch_bytes)

    def expect(self, blocks: Sequence[int]) -> None:
        """Say which row groups will be read next, in order. Those of remote files are fetched at once,
        several side by side; where small ones follow each other in one file, ``read`` sees to that."""
        files, of_block = self._source.files, self._source.file_of_block
        apart = [
            block
            for n, block in enumerate(blocks)
            if not is_local(files.system(int(of_block[block])))
            and (
                _bytes_of(self._source, block) >= LARGE
                or n == 0
                or block != blocks[n - 1] + 1
                or of_block[block] != of_block[block - 1]
            )
        ]
        self._ahead.expect(apart if len(apart) > 1 else [])

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        """Rows ``start`` to ``stop`` of a row group.

        Costs nothing extra where the last call ended. Rows between the place and ``start`` are
        decoded and dropped; for an earlier place the row group is opened anew.

        Raises:
            MissingFilesError: the file is gone.
            DataChangedError: the file is no longer the one that was listed.
            UnreadableError: the row group cannot be decoded.
            UnreachableError: the server does not answer, or denies access.
        """
        length = int(self._source.lengths[block])
        if not 0 <= start <= stop <= length:
            raise IndexError(f"rows {start} to {stop} of a row group with {length} rows")
        schema = self._source.schema
        if start == stop:
            return pa.Table.from_batches([], schema)
        try:
            if block != self._block or start < self._row:
                self._begin(block)
            while self._row < start:
                self._take(start - self._row)
            parts = []
            while self._row < stop:
                parts.append(self._take(stop - self._row))
        except BaseException as error:
            row = self._row if block == self._block else start
            self.close()  # its place is not certain any more
            failed = self._explain(block, row, error)
            if failed is None:
                raise
            raise failed from error
        return pa.Table.from_batches(parts, schema)

    def close(self) -> None:
        """Let go of the open file."""
        self._batches, self._rest = iter(()), None
        if self._file is not None:
            self._file.close()
            self._file = None
        self._block = -1
        self._row = 0

    def _begin(self, block: int) -> None:
        """Go to the first row of a row group."""
        file = int(self._source.file_of_block[block])
        ahead = self._ahead.take(block)
        opened = ahead is None and self._file is not None and file == self._file.file
        if not opened:
            self.close()
            self._file = ahead or ParquetFile(self._source, file, self._requests)
        assert self._file is not None
        self._block, self._row, self._rest = block, 0, None
        self._folder = self._source.folders.values(file)
        self._batches = self._file.batches(block, opened)

    def _take(self, rows: int) -> pa.RecordBatch:
        """The next rows of the row group, as many as come easily and no more than ``rows``."""
        batch = self._rest
        if batch is None or not len(batch):
            try:
                found = next(self._batches)
                assert self._file is not None
                self._file.check()
                batch = self._fit(found)
            except StopIteration:
                raise _Short from None
        taken = batch.slice(0, rows)
        self._rest = batch.slice(rows) if rows < len(batch) else None
        self._row += len(taken)
        return taken

    def _fit(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch in the source's schema."""
        columns = []
        for field in self._source.schema:
            if field.name in self._folder:
                columns.append(repeated(self._folder[field.name], len(batch)))
                continue
            place = batch.schema.get_field_index(field.name)
            if place < 0:
                raise ChangedError
            column = cast_to(batch.column(place), field, self._place)
            columns.append(replaced(column) if self._source.replace else column)
        return pa.RecordBatch.from_arrays(columns, schema=self._source.schema)

    def _place(self) -> Place:
        return self._source.place(self._block, self._row)

    def _explain(self, block: int, row: int, error: BaseException) -> TrainpipesError | None:
        """What has become of the file, or what is wrong with its contents; None for errors that are not
        about either, or say it themselves."""
        unplaced = isinstance(error, DataChangedError) and error.row_group is None
        if not unplaced and isinstance(error, DataError | MemoryError):
            return None
        if not isinstance(error, Exception):
            return None
        source = self._source
        place = source.place(block, row)
        file = int(source.file_of_block[block])
        try:
            if isinstance(error, UnreachableError | DataChangedError):
                raise error
            change = change_of(source.files, source.index, file, self._requests)
        except UnreachableError as failed:
            return unreachable(place, failed)
        except DataChangedError as failed:
            return located(place, failed)
        forget(source.index.kept_in)  # it may be what is wrong
        if isinstance(error, ChangedError):
            change = change or "it changed while it was read"
        if isinstance(error, FileNotFoundError) or change == GONE:
            return gone(place)
        if change:
            return changed(place, change)
        short = isinstance(error, _Short)
        said = "it ends before the rows that its footer counts" if short else reason(error)
        return unreadable(place, f"the data here cannot be decoded: {said}")


class _Short(Exception):
    """A row group has fewer rows than the footer counts."""


def _opened_ahead(source: ParquetSource, requests: Requests, block: int) -> ParquetFile:
    """The file of a row group, which is fetched; in any thread."""
    held = max(HELD_BYTES, source.files.prefetch_bytes // 2)
    opened = ParquetFile(source, int(source.file_of_block[block]), requests, held)
    opened.fetch(block)
    return opened


def _bytes_of(source: ParquetSource, block: int) -> float:
    """Compressed bytes of a row group, about."""
    file, sizes = int(source.file_of_block[block]), source.index.group_bytes
    whole = max(1, int(sizes[source.index.groups(file)].sum()))
    return float(sizes[block] / whole * source.index.sizes[file])
