from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes.columns.arrays import replaced
from trainpipes.interfaces.source import Place
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.file_bytes import FetchedBytes, FileBytes, RangeFile
from trainpipes.sources.files.format import Format, Layout, OtherBytesError
from trainpipes.sources.files.schema import cast_to
from trainpipes.sources.parquet.column_chunks import Probe, arrow_bytes, leaves_of
from trainpipes.sources.parquet.footers import (
    ParsedFooters,
    RowGroupLayout,
    footer_numbers,
    footer_of,
    read_footer,
)

#: Bytes of rows that are decoded at a time, about, and the bounds of that in rows.
BATCH_BYTES = 1 << 20
BATCH_ROWS = (8, 65_536)
#: Rows that are decoded at a time where there are many columns, and bytes of them, at most.
MANY_COLUMNS, WIDE_ROWS, WIDE_BYTES = 16, 8192, 4 << 20
#: Bytes that a column is read by.
BUFFER_BYTES = 256 << 10
#: Bytes of a remote file that is fetched whole at first.
WHOLE_BYTES = 1 << 20
CHANGED = "it changed while it was read"


@dataclass(eq=False)
class RowGroups(Format):
    """Parquet files as a format: a block is a row group."""

    columns: Sequence[str] | None
    schema: pa.Schema
    replace: bool = False
    held: int | None = None
    described: Sequence[tuple[str, str]] = ()
    parsed: ParsedFooters = field(default_factory=ParsedFooters)

    name = "Parquet"
    blocks_called, known_by_blocks, places_blocks = "row groups", True, True
    fetches_parts = True

    def read_columns(self, layout: Any) -> Sequence[str] | None:
        """What is read of a file, by the names in it."""
        return self.columns

    def scan(self, file: FileBytes) -> Layout:
        return footer_of(file, self.columns)[1]

    def open(self, data: FileBytes, layout: Any) -> ParquetFile:
        return ParquetFile(self, data, layout)

    def fetch(
        self, data: FileBytes, layout: Any, blocks: Sequence[int], columns: Sequence[str] | None
    ) -> ParquetFile:
        file = ParquetFile(self, data, layout, self.held)
        file.fetch(blocks)
        return file

    def fetched_bytes(
        self, layout: Any, blocks: Sequence[int], columns: Sequence[str] | None
    ) -> float:
        sizes = layout.group_bytes
        return float(sizes[list(blocks)].sum() / max(1, int(sizes.sum())) * layout.size)

    def decode(
        self, data: ParquetFile, layout: Any, block: int, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        names = self.schema.names
        for batch in data.batches(block):
            as_it_is = not (self.replace or layout.folder) and batch.schema.names == names
            yield batch if as_it_is else self._with_folders(batch, layout, data.name)

    def _with_folders(self, batch: pa.RecordBatch, layout: Any, name: str) -> pa.RecordBatch:
        columns = []
        for wanted in self.schema:
            place = batch.schema.get_field_index(wanted.name)
            if wanted.name in layout.folder:
                columns.append(pa.repeat(layout.folder[wanted.name], len(batch)))
            elif place < 0:
                raise OtherBytesError(CHANGED)
            else:
                column = batch.column(place)
                if self.replace:
                    column = replaced(cast_to(column, wanted, lambda: Place(name)))
                columns.append(column)
        return pa.RecordBatch.from_arrays(columns, names=self.schema.names)

    def change(self, data: FileBytes, layout: Any) -> str:
        try:
            same = layout.is_footer(read_footer(data)[0])
            return "" if same else "it has as many bytes as before, and another footer"
        except BadFileError as error:
            return str(error)

    def block_key(self, layout: Any, blocks: range) -> list[Any]:
        return [*footer_numbers(layout)[:2].tolist(), layout.note, self.replace]

    def note(self, layout: Any) -> str:
        return str(layout.note)

    def content(self, layout: Any) -> str:
        return str(footer_numbers(layout)[:3].tolist())

    def describe(self, layouts: Sequence[Layout]) -> list[tuple[str, str]]:
        return list(self.described)


class ParquetFile:
    """One Parquet file that is open for reading."""

    def __init__(
        self, format: RowGroups, data: FileBytes, layout: RowGroupLayout, held: int | None = None
    ) -> None:
        known = format.parsed.known(data.name) is not None
        if not data.local and data.size <= WHOLE_BYTES and not (known and data.checked):
            data = FetchedBytes(data, [(0, data.size)])  # its footer and rows by one request
        self._data, self._layout, self.name = data, layout, data.name
        self._columns = format.read_columns(layout)
        self._remote = None if data.local else RangeFile(data, held)
        opened = pa.OSFile(data.name) if data.local else pa.PythonFile(self._remote, mode="r")
        self._handle: Any = opened
        self._expected: Sequence[int] = ()  # row groups that a remote file was asked to fetch
        try:
            metadata = format.parsed.of(self.name, self._read_footer)
            if metadata.num_row_groups != len(layout.rows):
                raise OtherBytesError(CHANGED)  # what was kept of its footer is wrong
            self._leaves = leaves_of(metadata, self._columns)
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

    def fetch(self, row_groups: Sequence[int]) -> None:
        assert self._remote is not None
        self._expect(row_groups)
        self._remote.fetch()

    def batches(self, row_group: int) -> Iterator[pa.RecordBatch]:
        self._data.check()
        metadata, rows = self._parquet.metadata, int(self._layout.written[row_group])
        if self._remote is not None and row_group not in self._expected:
            self._expect([row_group])
        if metadata.row_group(row_group).num_rows != rows:
            raise OtherBytesError(CHANGED)  # what was kept of its footer is wrong
        self._probe.check(row_group, self._leaves)
        row_bytes = sum(arrow_bytes(metadata, row_group, self._leaves)) / rows
        most = self._rows_at_a_time(row_bytes)
        for batch in self._parquet.iter_batches(most, [row_group], self._columns, False):
            self._data.check()
            yield batch

    def _rows_at_a_time(self, row_bytes: float) -> int:
        """More where there are many columns: each takes its time, also for few rows."""
        nbytes = float(BATCH_BYTES)
        if len(self._leaves) >= MANY_COLUMNS:
            nbytes = max(nbytes, min(WIDE_BYTES, WIDE_ROWS * row_bytes))
        return int(np.clip(nbytes // max(1.0, row_bytes), *BATCH_ROWS))

    def _expect(self, row_groups: Sequence[int]) -> None:
        """Tell a remote file the row groups to come; and the footer, unless each reply says that it is of the
        same file.
        """
        assert self._remote is not None
        for number in row_groups:
            self._probe.check(number, self._leaves)
        metadata, self._expected = self._parquet.metadata, row_groups
        ranges = [span for n in row_groups for span in _ranges(metadata, n, self._leaves)]
        if not self._data.checked:
            ranges.append(self._layout.footer_range)
        self._remote.expect(ranges)
        if not self._data.checked:
            self._read_footer()

    def _read_footer(self) -> bytes:
        footer, (start, stop) = b"", self._layout.footer_range
        if self._remote is not None or self._handle.size() == stop:
            self._handle.seek(start)
            footer = self._handle.read(stop - start)
        if not self._layout.is_footer(footer):
            raise OtherBytesError(CHANGED)
        return footer


def _ranges(metadata: Any, row_group: int, leaves: list[int]) -> Iterator[tuple[int, int]]:
    for leaf in leaves:
        chunk = metadata.row_group(row_group).column(leaf)
        start = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            start = min(start, chunk.dictionary_page_offset)
        yield start, start + chunk.total_compressed_size
