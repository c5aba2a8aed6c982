"""What a footer says of its column chunks, and whether pyarrow can open them: its ``RowGroupMetaData`` ends
the process at a bad one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes.sources.files.file_bytes import FileBytes, RangeFile

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


WIDTHS = {"BOOLEAN": 0.125, "INT32": 4.0, "INT64": 8.0, "INT96": 8.0, "FLOAT": 4.0, "DOUBLE": 8.0}
#: Rows in a page, at most, as Arrow writes them.
PAGE_ROWS = 20_000
#: Bytes of a page's header and of its levels, about, without statistics.
PAGE_HEADER = 64
#: Bits of an index into a dictionary beyond which most values were written without it.
MAX_INDEX_BITS = 20


def leaves_of(metadata: Any, columns: Sequence[str] | None) -> list[int]:
    """Numbers of the Parquet columns (leaves of nested ones) that belong to these columns."""
    numbers = range(metadata.num_columns)
    if columns is None:
        return list(numbers)
    paths = [f"{metadata.schema.column(n).path}." for n in numbers]
    return [n for n in numbers if any(paths[n].startswith(f"{name}.") for name in columns)]


def arrow_bytes(metadata: Any, row_group: int, leaves: Sequence[int]) -> list[float]:
    """Bytes of a row group's columns in Arrow memory, after ``Probe.check``: exact for numbers and plain
    text, within a factor of two with a dictionary, too small for delta-encoded text.
    """
    group, schema = metadata.row_group(row_group), metadata.schema
    rows = group.num_rows
    return [_leaf_bytes(group.column(n), schema.column(n), rows) for n in leaves]


def _leaf_bytes(chunk: Any, leaf: Any, rows: int) -> float:
    repeated, kind = leaf.max_repetition_level, leaf.physical_type
    values = chunk.num_values if repeated else rows
    total: float = (values / 8 if leaf.max_definition_level else 0.0) + 4 * rows * repeated
    if leaf.logical_type.type == "DECIMAL":
        total += 16 * values
    elif kind == "FIXED_LEN_BYTE_ARRAY":
        total += values * leaf.length
    elif kind in WIDTHS:
        total += values * WIDTHS[kind]
    elif chunk.physical_type == kind:  # its statistics are asked for, which ends the process if not
        total += 4 * values + _text_bytes(chunk, values)
    return max(0.0, total)


def _text_bytes(chunk: Any, values: float) -> float:
    statistics = chunk.statistics
    if statistics is not None and statistics.has_null_count:
        values -= min(values, statistics.null_count)
    if not values:
        return 0.0
    size = float(chunk.total_uncompressed_size)
    as_written = max(0.0, size - 4.0 * values)
    if not chunk.has_dictionary_page or chunk.dictionary_page_offset is None:
        return as_written
    ends = []
    if statistics is not None and statistics.has_min_max:
        # As they are: to be text, they would have to be UTF-8.
        ends = [len(end) for end in (statistics.min_raw, statistics.max_raw)]
    dictionary: int = chunk.data_page_offset - chunk.dictionary_page_offset
    indices: float = chunk.total_compressed_size - dictionary
    if ends:  # each page's header notes them, too
        indices -= (1 + values // PAGE_ROWS) * (PAGE_HEADER + sum(ends))
    bits = int(8 * max(0.0, indices) / values + 0.25)
    if bits > MAX_INDEX_BITS:
        return as_written
    entries = min(values, max(1.0, 0.75 * 2.0**bits))  # of 2**(bits - 1) to 2**bits
    length: float = (size - max(0.0, chunk.total_compressed_size - dictionary)) / entries - 4
    if ends:
        length = min(max(length, float(min(ends))), 2.0 * max(ends))
    return max(as_written, values * length)
