"""Checks a footer's column chunks: pyarrow's ``RowGroupMetaData`` ends the process at a bad one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes.sources.files.each_file import is_encrypted
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.sources.files.range_file import RangeFile

#: Any: of a buffer nothing is allocated before the first read.
BUFFER_BYTES = 4096


class Probe:
    """Opens a file's columns as a reader would, and reads nothing."""

    def __init__(self, parquet: pq.ParquetFile) -> None:
        self._reader: Any = parquet.reader

    @staticmethod
    def of(metadata: Any, data: FileBytes) -> Probe:
        file = pa.PythonFile(RangeFile(data), mode="r")
        # So that no column is read when its reader is made.
        reading: dict[str, Any] = {"pre_buffer": False, "buffer_size": BUFFER_BYTES}
        return Probe(pq.ParquetFile(file, metadata=metadata, **reading))

    def check(self, row_group: int, leaves: Sequence[int]) -> None:
        """Look at some columns of a row group, about 3 µs each, without reading a page."""
        if leaves:  # batches of no rows: readers are made, and nothing is decoded
            next(self._reader.iter_batches(0, [row_group], list(leaves), False), None)

    def passes(self, row_group: int, leaves: Sequence[int]) -> bool:
        try:
            self.check(row_group, leaves)
        except (OSError, pa.ArrowException):
            return False
        return True

    def encrypted(self, metadata: Any, leaves: Sequence[int]) -> list[str]:
        groups = range(metadata.num_row_groups)
        filled = [n for n in groups if metadata.row_group(n).num_rows]
        found = []
        for leaf in leaves if filled else ():
            try:
                self.check(filled[0], [leaf])
            except (OSError, pa.ArrowException) as error:
                if is_encrypted(error):
                    found.append(metadata.schema.column(leaf).path)
        return found
