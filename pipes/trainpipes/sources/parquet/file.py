"""One Parquet file, open: on a local disk, or on another machine with what will be read of it fetched in
few requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes.sources.files.file_bytes import open_bytes
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.files.range_file import HELD_BYTES, RangeFile
from trainpipes.sources.parquet.probe import Probe
from trainpipes.sources.parquet.size import arrow_bytes, leaves_of
from trainpipes.sources.remote.retry import Requests

if TYPE_CHECKING:
    from trainpipes.sources.parquet.read_parquet import ParquetSource

#: Bytes of rows that are decoded at a time, about, and the bounds of that in rows.
BATCH_BYTES = 1 << 20
BATCH_ROWS = (8, 65_536)
#: Bytes that a column is read by.
BUFFER_BYTES = 256 << 10


class ChangedError(Exception):
    """The file is not the one that was listed."""


class ParquetFile:
    """A file of a Parquet source.

    Args:
        source: the source.
        file: number of the file.
        requests: makes those to servers.
        held: bytes of a remote file that are held, about.

    Raises:
        ChangedError: it has changed since it was listed.
    """

    def __init__(
        self, source: ParquetSource, file: int, requests: Requests, held: int | None = None
    ) -> None:
        self._source = source
        self.file = file
        self.remote: RangeFile | None = None
        self._data = open_bytes(source.files, file, requests)
        if is_local(source.files.system(file)):
            self._handle: Any = pa.OSFile(source.files.paths[file])
        else:
            self.remote = RangeFile(self._data, held)
            self._handle = pa.PythonFile(self.remote, mode="r")
        self._expected = range(0)  # row groups that a remote file was told of
        try:
            metadata = source.parsed.known(file) if self._is_checked else None
            if metadata is None:
                metadata = source.parsed.parse(file, self._read_footer())
            first, stop = source.index.first_group[file : file + 2].tolist()
            if metadata.num_row_groups != stop - first:
                raise ChangedError  # what was kept of its footer is wrong
            self._leaves = leaves_of(metadata, source.columns)
            self._parquet = pq.ParquetFile(
                self._handle,
                metadata=metadata,
                pre_buffer=False,
                buffer_size=BUFFER_BYTES,
                page_checksum_verification=True,
            )
            self._probe = Probe(self._parquet)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._handle.close()

    @property
    def _is_checked(self) -> bool:
        """Whether all that is fetched is certain to be of the file that was listed."""
        return self.remote is not None and self._data.checked

    def check(self) -> None:
        """Raise if the file was written while it was read."""
        self._data.check()

    def fetch(self, block: int) -> None:
        """Fetch a row group of a remote file before it is read."""
        assert self.remote is not None
        self._expect(block, again=False)
        self.remote.fetch()

    def batches(self, block: int, opened: bool) -> Iterator[pa.RecordBatch]:
        """The rows of a row group.

        Args:
            block: its number in the source.
            opened: whether the file was open for another one before.
        """
        group = block - int(self._source.index.first_group[self.file])
        if self.remote is not None and block not in self._expected:
            self._expect(block, again=opened)
        rows = int(self._source.lengths[block])
        if self._parquet.metadata.row_group(group).num_rows != rows:
            raise ChangedError  # what was kept of its footer is wrong
        self._probe.check(group, self._leaves)
        row_bytes = sum(arrow_bytes(self._parquet.metadata, group, self._leaves)) / rows
        most = int(np.clip(BATCH_BYTES // max(1.0, row_bytes), *BATCH_ROWS))
        found: Iterator[pa.RecordBatch] = self._parquet.iter_batches(
            most, row_groups=[group], columns=self._source.columns, use_threads=False
        )
        return found

    def _expect(self, block: int, again: bool) -> None:
        """Tell a remote file what will be read: this row group; more that follow, twice as many each
        time, while they are read one after the other; and the footer, if some time has passed since it
        was looked at."""
        assert self.remote is not None
        first = int(self._source.index.first_group[self.file])
        metadata = self._parquet.metadata
        most = block + (2 * len(self._expected) if block == self._expected.stop else 1)
        self._probe.check(block - first, self._leaves)
        ranges, stop = _ranges(metadata, block - first, self._leaves), block + 1
        while stop < min(most, first + metadata.num_row_groups):
            if self._source.unread is not None and self._source.unread[stop]:
                break  # it is not read
            if not self._probe.passes(stop - first, self._leaves):
                break  # whoever reads it is told
            more = ranges + _ranges(metadata, stop - first, self._leaves)
            if sum(end - start for start, end in more) > HELD_BYTES:
                break
            ranges, stop = more, stop + 1
        self._expected = range(block, stop)
        again = again and not self._is_checked
        self.remote.expect([*ranges, self._footer_range()] if again else ranges)
        if again:
            self._read_footer()

    def _footer_range(self) -> tuple[int, int]:
        size = int(self._source.index.sizes[self.file])
        return size - int(self._source.index.footers[self.file]), size

    def _read_footer(self) -> bytes:
        """The footer of the open file, if it is still the one that was read at first."""
        start, stop = self._footer_range()
        footer = b""
        if self.remote is not None or self._handle.size() == stop:
            self._handle.seek(start)
            footer = self._handle.read(stop - start)
        if not self._source.index.is_footer(self.file, footer):
            raise ChangedError
        return footer


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
