"""Reads rows of Parquet row groups in order, a little at a time, and keeps its place.

A row group is decoded as a stream: of each column one page and one read buffer are in memory, and
one batch of rows. The whole group never is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes.errors import (
    DataChangedError,
    DataError,
    MissingFilesError,
    SchemaError,
    UnreadableError,
)
from trainpipes.sources.index import parse_footer, reason
from trainpipes.sources.listing import is_local
from trainpipes.sources.parquet_change import GONE, change_of
from trainpipes.sources.parquet_size import arrow_bytes, leaves_of
from trainpipes.sources.remote import HELD_BYTES, RemoteFile

if TYPE_CHECKING:
    from trainpipes.sources.parquet import ParquetSource

__all__ = ["Footers", "ParquetReader"]

#: Bytes of rows that are decoded at a time, about, and the bounds of that in rows.
BATCH_BYTES = 1 << 20
BATCH_ROWS = (8, 65_536)
#: Bytes that a column is read by.
BUFFER_BYTES = 256 << 10
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

    def parse(self, file: int, footer: bytes) -> Any:
        """The parsed footer of a file, which must be the one in the index."""
        with self._lock:
            if file in self._parsed:
                self._parsed.move_to_end(file)
                return self._parsed[file][0]
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
        self._file = -1
        self._handle: Any = None
        self._parquet: Any = None
        self._remote: RemoteFile | None = None
        self._block = -1
        self._row = 0
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None
        self._leaves: list[int] = []
        self._expected = range(0)  # row groups that a remote file was told of

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        """Rows ``start`` to ``stop`` of a row group.

        Costs nothing extra where the last call ended. Rows between the place and ``start`` are
        decoded and dropped; for an earlier place the row group is opened anew.

        Raises:
            MissingFilesError: the file is gone.
            DataChangedError: the file is no longer the one that was listed.
            UnreadableError: the row group cannot be decoded.
        """
        length = int(self._source.lengths[block])
        if not 0 <= start <= stop <= length:
            raise IndexError(f"rows {start} to {stop} of a row group with {length} rows")
        schema = self._source.schema
        if start == stop:
            return schema.empty_table()
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
        self._parquet = self._remote = None
        if self._handle is not None:
            self._handle.close()
            self._handle = None
        self._file = self._block = -1
        self._row = 0
        self._expected = range(0)

    def _begin(self, block: int) -> None:
        """Go to the first row of a row group."""
        source = self._source
        file = int(source.file_of_block[block])
        opened = file == self._file
        if not opened:
            self.close()
            self._open(file)
        self._block, self._row, self._rest = block, 0, None
        group = block - int(source.index.first_group[file])
        metadata = self._parquet.metadata
        if self._remote is not None and block not in self._expected:
            self._expect(block, again=opened)
        row_bytes = arrow_bytes(metadata, group, self._leaves) / int(source.lengths[block])
        rows = int(np.clip(BATCH_BYTES // max(1.0, row_bytes), *BATCH_ROWS))
        self._batches = self._parquet.iter_batches(
            rows, row_groups=[group], columns=source.columns, use_threads=False
        )

    def _expect(self, block: int, again: bool) -> None:
        """Tell a remote file what will be read: this row group; more that follow, twice as many each
        time, while they are read one after the other; and the footer, if some time has passed since it
        was looked at."""
        assert self._remote is not None
        first = int(self._source.index.first_group[self._file])
        metadata = self._parquet.metadata
        most = block + (2 * len(self._expected) if block == self._expected.stop else 1)
        ranges, stop = _ranges(metadata, block - first, self._leaves), block + 1
        while stop < min(most, first + metadata.num_row_groups):
            more = ranges + _ranges(metadata, stop - first, self._leaves)
            if sum(end - start for start, end in more) > HELD_BYTES:
                break
            ranges, stop = more, stop + 1
        self._expected = range(block, stop)
        self._remote.expect([*ranges, self._footer_range()] if again else ranges)
        if again:
            self._read_footer()

    def _footer_range(self) -> tuple[int, int]:
        size = int(self._source.index.sizes[self._file])
        return size - int(self._source.index.footers[self._file]), size

    def _read_footer(self) -> bytes:
        """The footer of the open file, if it is still the one that was read at first."""
        start, stop = self._footer_range()
        footer = b""
        if self._remote is not None or self._handle.size() == stop:
            self._handle.seek(start)
            footer = self._handle.read(stop - start)
        if not self._source.index.is_footer(self._file, footer):
            raise _Changed
        return footer

    def _open(self, file: int) -> None:
        source = self._source
        system, path = source.files.system(file), source.files.paths[file]
        if is_local(system):
            self._handle = pa.OSFile(path)
        else:
            self._remote = RemoteFile(system, path, int(source.index.sizes[file]))
            self._handle = pa.PythonFile(self._remote, mode="r")
        self._file = file
        metadata = source.parsed.parse(file, self._read_footer())
        self._leaves = leaves_of(metadata, source.columns)
        self._parquet = pq.ParquetFile(
            self._handle,
            metadata=metadata,
            pre_buffer=False,
            buffer_size=BUFFER_BYTES,
            page_checksum_verification=True,
        )

    def _take(self, rows: int) -> pa.RecordBatch:
        """The next rows of the row group, as many as come easily and no more than ``rows``."""
        batch = self._rest
        if batch is None or not len(batch):
            try:
                batch = self._fit(next(self._batches))
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
            column = batch.column(batch.schema.get_field_index(field.name))
            columns.append(column if column.type.equals(field.type) else self._cast(column, field))
        return pa.RecordBatch.from_arrays(columns, schema=self._source.schema)

    def _cast(self, column: pa.Array, field: pa.Field) -> pa.Array:
        try:
            return column.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            place = self._source.place(self._block, self._row)
            raise SchemaError(
                f"{place}: column {field.name!r} is {column.type} here and {field.type} over all "
                f"files, and a value does not fit: {error}; convert the file, or read the files apart",
                **vars(place),
            ) from error

    def _explain(self, block: int, row: int, error: BaseException) -> DataError | None:
        """What has become of the file, or what is wrong with its contents; None for errors that are not
        about either, or say it themselves."""
        if isinstance(error, DataError | MemoryError) or not isinstance(error, Exception):
            return None
        source = self._source
        place = source.place(block, row)
        context: dict[str, Any] = vars(place)
        file = int(source.file_of_block[block])
        changed = change_of(source.files, source.index, file)
        if isinstance(error, _Changed):
            changed = changed or "it changed while it was read"
        if isinstance(error, FileNotFoundError) or changed == GONE:
            return MissingFilesError(
                f"{place}: the file was there when the files were listed, and is gone; bring it back, or "
                "make the pipeline anew without it",
                **context,
            )
        if changed:
            return DataChangedError(
                f"{place}: the file has changed since the files were listed: {changed}; bring the "
                "old one back, or make the pipeline anew",
                **context,
            )
        said = (
            "it ends before the rows that its footer counts"
            if isinstance(error, _Short)
            else reason(error)
        )
        return UnreadableError(
            f"{place}: the data here cannot be decoded: {said}; replace the file, or leave it out with "
            ".filter(lambda path: ...) after list_files",
            **context,
        )


class _Changed(Exception):
    """The file is not the one that was listed."""


class _Short(Exception):
    """A row group has fewer rows than the footer counts."""


def _ranges(metadata: Any, row_group: int, leaves: list[int]) -> list[tuple[int, int]]:
    """Where the columns of a row group lie in the file."""
    group = metadata.row_group(row_group)
    ranges = []
    for leaf in leaves:
        chunk = group.column(leaf)
        start = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            start = min(start, chunk.dictionary_page_offset)
        ranges.append((start, start + chunk.total_compressed_size))
    return ranges
