"""What the footers of Parquet files say: rows, schemas, row groups; and of column chunks, whether pyarrow can
open them: its ``RowGroupMetaData`` ends the process at a bad footer.
"""

from __future__ import annotations

import dataclasses
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes._internal.checks import IntArray
from trainpipes.errors import SchemaError
from trainpipes.sources.files import formats
from trainpipes.sources.files.file_bytes import FileBytes, RangeFile
from trainpipes.sources.files.formats import BadFileError, is_encrypted, one_line
from trainpipes.sources.files.index_store import IndexStore, Scan
from trainpipes.sources.files.list_files import FileList

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


def fixed_bytes(metadata: Any, leaves: Sequence[int]) -> tuple[float, list[int]]:
    """Bytes of a row in Arrow memory, of the columns where all rows have the same; and the other columns."""
    total, others = 0.0, []
    for n in leaves:
        leaf = metadata.schema.column(n)
        width = _width(leaf)
        if width is None or leaf.max_repetition_level:
            others.append(n)
        else:
            total += width + _null_bytes(leaf)
    return total, others


def arrow_bytes(metadata: Any, row_group: int, leaves: Sequence[int]) -> list[float]:
    """Bytes of a row group's columns in Arrow memory, after ``Probe.check``: exact for numbers and plain
    text, within a factor of two with a dictionary, too small for delta-encoded text.
    """
    group, schema = metadata.row_group(row_group), metadata.schema
    rows = group.num_rows
    return [_leaf_bytes(group.column(n), schema.column(n), rows) for n in leaves]


def _leaf_bytes(chunk: Any, leaf: Any, rows: int) -> float:
    repeated, width = leaf.max_repetition_level, _width(leaf)
    values = chunk.num_values if repeated else rows
    total: float = values * _null_bytes(leaf) + 4 * rows * repeated
    if width is not None:
        total += values * width
    elif chunk.physical_type == leaf.physical_type:  # its statistics would end the process if not
        total += 4 * values + _text_bytes(chunk, values)
    return max(0.0, total)


def _width(leaf: Any) -> float | None:
    """Bytes of each value; None if they differ."""
    kind = leaf.physical_type
    if leaf.logical_type.type == "DECIMAL":
        return 16.0
    width: float | None = leaf.length if kind == "FIXED_LEN_BYTE_ARRAY" else WIDTHS.get(kind)
    return width


def _null_bytes(leaf: Any) -> float:
    return 1 / 8 if leaf.max_definition_level else 0.0


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


#: Bytes read of a file's end at first.
TAIL_BYTES = 64 << 10
#: Files and row groups of each that the size of a row is taken from, at most.
SAMPLED_FILES, SAMPLED_GROUPS = 64, 8
#: Bytes of footers that stay parsed.
FOOTER_BYTES = 8 << 20
#: Bytes that a row group is taken to have at most; its footer may say more.
MOST_BYTES = 1 << 48
NO_FOLDERS = pa.table({})
#: What follows the metadata in a footer: their length, and the magic number.
END = b"....PAR1"


@dataclass(frozen=True, eq=False, kw_only=True)
class RowGroupLayout(formats.Layout):
    """A file's row groups; ``extra`` has the footer's bytes, its CRC-32 and that of the bytes read with it,
    and the uncompressed bytes of each.
    """

    size: int
    folder: dict[str, pa.Scalar] = dataclasses.field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        pass  # its numbers were checked when they were scanned

    @property
    def written(self) -> IntArray:
        """Rows of each row group in the file."""
        return self.rows

    @property
    def footer_range(self) -> tuple[int, int]:
        return self.size - int(footer_numbers(self)[0]), self.size

    @property
    def group_bytes(self) -> IntArray:
        return footer_numbers(self)[3:]

    def is_footer(self, footer: bytes) -> bool:
        return footer_numbers(self)[:2].tobytes() == _numbers([len(footer), zlib.crc32(footer)])


class ParsedFooters:
    """Parsed footers, shared by a process's readers: parsing costs most of opening. Pickled, it is empty."""

    def __init__(self) -> None:
        self._parsed: dict[str, tuple[Any, int]] = {}
        self._bytes = 0
        self._lock = threading.Lock()
        self._reading: dict[str, threading.Lock] = {}

    def __reduce__(self) -> Any:
        return ParsedFooters, ()

    def known(self, name: str) -> Any:
        return self._parsed.get(name, (None, 0))[0]

    def of(self, name: str, read: Callable[[], bytes]) -> Any:
        """The parsed footer of a file; ``read`` raises if the file has changed."""
        with self._reading.setdefault(name, threading.Lock()):
            metadata = self.known(name)
            if metadata is None:
                footer = read()
                metadata = parse_footer(footer)
                self.add(name, metadata, len(footer))
            return metadata

    def add(self, name: str, metadata: Any, size: int) -> None:
        with self._lock:
            self._bytes += size - self._parsed.pop(name, (None, 0))[1]
            self._parsed[name] = metadata, size
            while self._bytes > FOOTER_BYTES:
                self._bytes -= self._parsed.pop(next(iter(self._parsed)))[1]


@dataclass(frozen=True)
class Footers:
    """The footers of all files of ``read_parquet``."""

    store: IndexStore
    layouts: list[RowGroupLayout]
    schema: pa.Schema
    row_bytes: float | None
    folders: pa.Table
    parsed: ParsedFooters


def read_footers(
    files: FileList,
    columns: Sequence[str] | None,
    caller: str,
    index: str | bool | None = None,
    *,
    folders: pa.Table = NO_FOLDERS,
    both: bool = False,
    look: Callable[[int, Any, FileBytes], None] | None = None,
) -> Footers:
    scanned = scan_footers(files, columns, caller, index, look)
    different = formats.different_schemas(
        files.names, [layout.schema for layout in scanned.layouts]
    )
    folders = _beside(folders, different, both, caller)
    different = [(name, pa.schema([*schema, *folders.schema])) for name, schema in different]
    schema = formats.one_schema(different, columns, caller)
    chosen = [name for name in folders.column_names if name in schema.names]
    return replace(scanned, schema=schema, folders=folders.select(chosen))


def scan_footers(
    files: FileList,
    columns: Sequence[str] | None,
    caller: str,
    index: str | bool | None = None,
    look: Callable[[int, Any, FileBytes], None] | None = None,
) -> Footers:
    """The layout by each footer alone, without a schema over all files."""
    store = IndexStore(files, "read_parquet", "Parquet", index=index)
    step, key = max(1, -(-len(files) // SAMPLED_FILES)), repr(columns and list(columns))
    looked_at: set[int] = set()
    parsed = ParsedFooters()

    def scan(job: Scan) -> formats.Layout:
        metadata, layout = footer_of(job.data, columns)
        parsed.add(job.data.name, metadata, int(footer_numbers(layout)[0]))
        if look is not None:
            look(job.file, metadata, job.data)
            looked_at.add(job.file)
        samples = {} if job.known is None else _samples(job.known)
        if job.file % step == 0:
            samples[key] = _sample(metadata, job.data, layout.rows, columns)
        return (
            replace(layout, extra=layout.extra + formats.packed(**samples)) if samples else layout
        )

    def enough(file: int, layout: formats.Layout) -> bool:
        if look is not None and file not in looked_at:
            return False
        return bool(file % step) or key in _samples(layout)

    store.complete(scan, caller, enough=enough, alone=look is None, job="reading Parquet footers")
    layouts = store.layouts()
    footers = [
        RowGroupLayout(
            layout.rows,
            layout.start,
            layout.start,
            layout.schema,
            footer_numbers(layout).tobytes(),
            size=size,
        )
        for layout, size in zip(layouts, store.sizes.tolist(), strict=True)
    ]
    samples = [_samples(layout)[key] for layout in layouts[::step]]
    rows, nbytes = sum(count for count, _ in samples), sum((size for _, size in samples), 0.0)
    if not rows:  # no row group could be asked
        rows = sum(int(layout.rows.sum()) for layout in layouts)
        nbytes = sum(float(layout.group_bytes.sum()) for layout in footers)
    row_bytes = nbytes / rows if rows else None
    return Footers(store, footers, pa.schema([]), row_bytes, NO_FOLDERS, parsed)


def footer_numbers(layout: formats.Layout) -> IntArray:
    """A footer's bytes, its checksum and that of the file's end, and the bytes of row groups, int64
    ``[3 + row groups]``.
    """
    return np.frombuffer(layout.extra, np.int64, 3 + len(layout.rows))


def _numbers(values: list[int]) -> bytes:
    return np.array(values, dtype=np.int64).tobytes()


def _samples(layout: formats.Layout) -> dict[str, Any]:
    """For columns that were chosen before: rows of some row groups, and their bytes in memory."""
    more = layout.extra[8 * (3 + len(layout.rows)) :]
    return formats.unpacked(more) if more else {}


def _sample(
    metadata: Any, data: FileBytes, rows: IntArray, columns: Sequence[str] | None
) -> tuple[int, float]:
    leaves, probe = leaves_of(metadata, columns), Probe.of(metadata, data)
    filled = np.flatnonzero(rows).tolist()
    some = filled[:: -(-len(filled) // SAMPLED_GROUPS) or 1]
    some = [n for n in some if probe.passes(n, leaves)]
    sizes = zip(*(arrow_bytes(metadata, n, leaves) for n in some), strict=True)
    return int(rows[some].sum()), float(sum(map(sum, sizes)))


def read_footer(data: FileBytes) -> tuple[bytes, bytes]:
    """The footer, and the end of the file that was read for it."""
    size = data.size
    if size == 0:
        raise BadFileError("empty: 0 bytes")
    tail = bytes(data.read([(max(0, size - TAIL_BYTES), size)])[0])
    if size < 12 or tail[-4:] != b"PAR1":
        head = bytes(data.read([(0, min(size, 16))])[0])
        raise BadFileError(_no_footer(tail[-4:], head, size))
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > size - 4:
        raise BadFileError(f"damaged: {size:,} bytes long, and its footer would have {length:,}")
    if length > len(tail):
        tail = bytes(data.read([(size - length, size)])[0])
    return tail[-length:], tail


def _no_footer(end: bytes, head: bytes, size: int) -> str:
    if b"PARE" in (end, head[:4]):
        return "encrypted, which is not supported"
    if head.startswith(b"PAR1"):
        return f"cut short: {size:,} bytes, its footer is missing"
    return f"not a Parquet file (starts with {head!r})"


def parse_footer(footer: bytes) -> Any:
    return pq.read_metadata(pa.BufferReader(footer))


def footer_of(data: FileBytes, columns: Sequence[str] | None) -> tuple[Any, formats.Layout]:
    footer, tail = read_footer(data)
    try:
        metadata = parse_footer(footer)
        schema = metadata.schema.to_arrow_schema().remove_metadata()
    except (pa.ArrowException, OSError) as error:
        raise BadFileError(f"damaged footer: {one_line(error)}") from error
    groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
    counts = [group.num_rows for group in groups]
    if sum(counts) != metadata.num_rows or min(counts, default=0) < 0:
        raise BadFileError(
            f"damaged footer: {metadata.num_rows:,} rows, and {sum(counts):,} in its row groups"
        )
    rows = np.array(counts, dtype=np.int64)
    if metadata.serialized_size + len(END) != len(footer):  # it may be signed
        probe = Probe.of(metadata, data)
        for leaf in leaves_of(metadata, columns) if rows.any() else ():
            try:
                probe.check(int(np.argmax(rows > 0)), [leaf])
            except (OSError, pa.ArrowException) as error:
                if is_encrypted(error):
                    raise BadFileError(
                        f"its column {metadata.schema.column(leaf).path!r} is encrypted, which is not "
                        "supported; choose others by columns=[...]"
                    ) from error
    sizes = [min(max(0, group.total_byte_size), MOST_BYTES) for group in groups]
    extra = _numbers([len(footer), zlib.crc32(footer), zlib.crc32(tail), *sizes])
    # Where a row group lies is known by its columns, of which not all may be asked.
    nowhere = np.zeros(len(rows), dtype=np.int64)
    return metadata, formats.checked_layout(rows, nowhere, nowhere, schema, extra)


def _beside(
    folders: pa.Table, different: Sequence[tuple[str, pa.Schema]], both: bool, caller: str
) -> pa.Table:
    """The columns of folders that files do not have; ``both`` refuses others."""
    for name in folders.column_names:
        path = next((path for path, schema in different if name in schema.names), None)
        if path is not None and both:
            raise SchemaError(
                f'{caller}: partitioning="hive" makes a column {name!r} of the folders\' names, and {path} '
                "has one of that name: leave partitioning out to read the file's",
                path=path,
                stage=caller,
            )
        folders = folders if path is None else folders.drop_columns(name)
    return folders
