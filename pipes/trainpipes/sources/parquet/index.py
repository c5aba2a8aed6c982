"""What the footers of Parquet files say, as arrays: read once, in parallel, before any row.

A footer is fetched by one read of a file's end, of a length that fits almost all; nothing else of
the file is touched. Parsed, it is reduced to numbers at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes.columns.arrays import to_arrow
from trainpipes.engine.layout import IntArray
from trainpipes.errors import (
    SchemaError,
)
from trainpipes.sources.files.each_file import BadFileError, each_file, one_line
from trainpipes.sources.files.file_bytes import FileBytes, open_bytes
from trainpipes.sources.files.index_file import IndexFile, forget, settled
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.schema import one_schema
from trainpipes.sources.parquet.footer_table import FOOTERS, Footer, FooterTable, with_more
from trainpipes.sources.parquet.probe import Probe
from trainpipes.sources.parquet.size import (
    arrow_bytes,
    leaf_paths,
    leaves_among,
    leaves_of,
)
from trainpipes.sources.remote.retry import Requests

#: Bytes read of a file's end at first.
TAIL_BYTES = 64 << 10
#: Files and row groups of each that the size of a row is told from, at most.
SAMPLED_FILES, SAMPLED_GROUPS = 64, 8
#: Bytes that a row group is taken to have at most, whatever its footer says.
MOST_BYTES = 1 << 48
#: What follows the metadata in a footer: their length, and the magic number.
END = b"....PAR1"


@dataclass(frozen=True, eq=False)
class ParquetIndex:
    """Files and their row groups, in order.

    Args:
        sizes: bytes of each file, int64 ``[files]``.
        footers: bytes of each file's footer, int64 ``[files]``.
        checksums: CRC-32 of each footer, int64 ``[files]``.
        first_group: number of each file's first row group, int64 ``[files + 1]``.
        rows: rows of each row group, int64 ``[row groups]``.
        group_bytes: uncompressed bytes of each row group, all columns, int64 ``[row groups]``.
        schema: Arrow schema of the chosen columns, the same for all files.
        row_bytes: bytes of an average row of the chosen columns in Arrow memory; None without rows.
        kept_in: the file in which footers are kept, if they are.
        folders: names of columns that may be made of names of folders; files do not have them.
    """

    sizes: IntArray
    footers: IntArray
    checksums: IntArray
    first_group: IntArray
    rows: IntArray
    group_bytes: IntArray
    schema: pa.Schema
    row_bytes: float | None
    kept_in: str | None = None
    folders: tuple[str, ...] = ()

    def groups(self, file: int) -> slice:
        """The row groups of a file."""
        return slice(int(self.first_group[file]), int(self.first_group[file + 1]))

    def is_footer(self, file: int, footer: bytes) -> bool:
        """Whether these bytes are the footer that was read of a file."""
        same = len(footer) == int(self.footers[file])
        return same and zlib.crc32(footer) == int(self.checksums[file])


def read_index(
    files: FileList,
    columns: Sequence[str] | None,
    asker: str,
    index: str | bool | None = None,
    *,
    folders: Sequence[pa.Field] = (),
    both: bool = False,
    look: Callable[[int, Any], None] | None = None,
) -> ParquetIndex:
    """Read all footers, of files that have changed since they were last read.

    Costs about 0.1 ms a file on a local disk, one request a file (16 at a time) elsewhere; where
    footers are kept, about 10 µs a file.

    Args:
        files: the files.
        columns: names of the columns to be read; None for all.
        asker: the stage, for messages.
        index: where footers are kept; see ``IndexFile.of``.
        folders: columns that names of folders make, if files do not have them.
        both: whether it is an error if files have them.
        look: is given the number of each file, and its metadata; then all footers are read.

    Raises:
        UnreadableError: names every file that is not one, with the reason.
        SchemaError: names the first file that lacks a column or has it in a type that does not fit.
        UnreachableError: a server does not answer, or denies access; files beyond are not asked for.
    """
    kept = IndexFile.of(files, index, FOOTERS)
    known, rows = FooterTable.of([], [], []), np.full(len(files), -1, dtype=np.int64)
    if kept is not None:
        found, rows = kept.find(files)
        known = FooterTable(found)
    step = -(-len(files) // SAMPLED_FILES)
    unknown = set(range(len(files)) if look is not None else np.flatnonzero(rows < 0).tolist())
    for file in range(0, len(files), max(1, step)):
        if rows[file] >= 0 and not _is_sampled(known, int(rows[file]), columns):
            unknown.add(file)
    wanted = sorted(unknown)
    read = settled(files, wanted) if kept is not None else 0
    fresh = each_file(
        files,
        lambda file, requests: footer_of(files, file, columns, file % step == 0, requests, look),
        asker,
        "Parquet",
        wanted=wanted,
        job="reading Parquet footers",
    )
    footers = _in_order(files, known, rows, fresh)
    if kept is not None and wanted:
        kept.save(files, footers.table, read)
    try:
        kept_in = None if kept is None else str(kept.path)
        return _joined(footers, files, columns, asker, kept_in, folders, both)
    except SchemaError:
        if kept is None or not (rows >= 0).any():
            raise
        forget(str(kept.path))  # what was kept may be wrong: the files are to say it themselves
        return read_index(files, columns, asker, index, folders=folders, both=both, look=look)


def _is_sampled(known: FooterTable, row: int, columns: Sequence[str] | None) -> bool:
    """Whether sizes of these columns in memory are known of a file."""
    _, leaves, sizes = known.sample(row)
    chosen = [sizes[n] for n in leaves_among(leaves, columns)]
    return bool(leaves) and not any(size != size for size in chosen)


def _in_order(
    files: FileList, known: FooterTable, rows: IntArray, fresh: dict[int, Footer]
) -> FooterTable:
    """Footers of all files in their order: those kept, and those just read."""
    read: dict[int, Footer] = {}
    for file, footer in sorted(fresh.items()):
        row = int(rows[file])
        read[file] = footer if row < 0 else with_more(footer, *known.sample(row)[1:])
    names = files.kept_names()
    names, stamps = [names[n] for n in read], [files.stamps[n] for n in read]
    table = FooterTable.of(list(read.values()), names, stamps)
    if not len(known):
        return table
    places = rows.copy()
    places[list(read)] = len(known) + np.arange(len(read))
    return FooterTable.join([known, table]).take(places)


def read_footer(data: FileBytes) -> bytes:
    """The end of a Parquet file: footer, its length, magic number.

    Raises:
        BadFileError: it has none.
        UnreachableError: the server does not answer, or denies access.
    """
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
    return tail[-length:]


def _no_footer(end: bytes, head: bytes, size: int) -> str:
    if b"PARE" in (end, head[:4]):
        return "encrypted, which is not supported"
    if head.startswith(b"PAR1"):
        return f"cut short: {size:,} bytes, its footer is missing"
    return f"not a Parquet file (starts with {head!r})"


def parse_footer(footer: bytes) -> Any:
    """A footer as ``pyarrow.parquet.FileMetaData``."""
    return pq.read_metadata(pa.BufferReader(footer))


def footer_of(
    files: FileList,
    file: int,
    columns: Sequence[str] | None,
    sampled: bool,
    requests: Requests,
    look: Callable[[int, Any], None] | None,
) -> Footer:
    """What the footer of one file says.

    Args:
        files: the files.
        file: which.
        columns: names of the columns to be read; None for all.
        sampled: whether sizes in memory are told, too.
        requests: makes those to servers.
        look: is given the number of the file, and its metadata.

    Raises:
        BadFileError: it is no Parquet file, is damaged, or has a column that is encrypted.
        UnreachableError: the server does not answer, or denies access.
    """
    data = open_bytes(files, file, requests)
    size, footer = data.size, read_footer(data)
    try:
        metadata = parse_footer(footer)
        schema = metadata.schema.to_arrow_schema().remove_metadata()
    except (pa.ArrowException, OSError) as error:
        raise BadFileError(f"damaged footer: {one_line(error)}") from error
    found = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
    rows = [group.num_rows for group in found]
    if sum(rows) != metadata.num_rows or min(rows, default=0) < 0:
        raise BadFileError(
            f"damaged footer: {metadata.num_rows:,} rows, and {sum(rows):,} in its row groups"
        )
    if metadata.serialized_size + len(END) != len(footer):  # it may be signed
        leaves = leaves_of(metadata, columns)
        names = Probe.of(metadata, size).encrypted(metadata, leaves)
        if names:
            cure = "" if len(names) == len(leaves) else "; choose others by columns=[...]"
            raise BadFileError(
                f"its column {names[0]!r} is encrypted, which is not supported{cure}"
            )
    if look is not None:
        look(file, metadata)
    group_bytes = [group.total_byte_size for group in found]
    whole = Footer(size, len(footer), zlib.crc32(footer), rows, group_bytes, schema)
    return _sampled(whole, metadata, columns) if sampled else whole


def _sampled(footer: Footer, metadata: Any, columns: Sequence[str] | None) -> Footer:
    """A footer with sizes in memory of some of its row groups, of those that can be told."""
    picked = [n for n, rows in enumerate(footer.rows) if rows]
    picked = picked[:: -(-len(picked) // SAMPLED_GROUPS) or 1]
    paths = leaf_paths(metadata)
    leaves = leaves_among(paths, columns)
    probe = Probe.of(metadata, footer.size)
    picked = [n for n in picked if probe.passes(n, leaves)]
    sizes = [float("nan")] * len(paths)
    found = [arrow_bytes(metadata, n, leaves) for n in picked]
    for place, leaf in enumerate(leaves):
        sizes[leaf] = sum(each[place] for each in found)
    rows = sum(footer.rows[n] for n in picked)
    return replace(footer, sampled_rows=rows, leaves=tuple(paths), leaf_bytes=tuple(sizes))


def _joined(
    footers: FooterTable,
    files: FileList,
    columns: Sequence[str] | None,
    asker: str,
    kept_in: str | None,
    folders: Sequence[pa.Field],
    both: bool,
) -> ParquetIndex:
    different: list[tuple[str, pa.Schema]] = []
    for first, schema in footers.schemas():
        if not any(schema.equals(other) for _, other in different):
            different.append((files.names[first], schema))
    folders = _not_in_files(folders, different, both, asker)
    different = [(name, pa.schema([*schema, *folders])) for name, schema in different]
    rows, first_group = footers.flat("rows")
    group_bytes = np.clip(footers.flat("group_bytes")[0], 0, MOST_BYTES)
    sampled, sampled_bytes = 0, 0.0
    picked = to_arrow(np.arange(0, len(files), -(-len(files) // SAMPLED_FILES) or 1))
    for one in (
        footers.table.select(["sampled_rows", "leaves", "leaf_bytes"]).take(picked).to_pylist()
    ):
        sampled += one["sampled_rows"]
        sampled_bytes += sum(one["leaf_bytes"][n] for n in leaves_among(one["leaves"], columns))
    row_bytes: float | None = None
    if sampled:
        row_bytes = sampled_bytes / sampled
    elif rows.sum():  # rows are only where no sample was taken
        row_bytes = float(group_bytes.sum() / rows.sum())
    return ParquetIndex(
        sizes=footers.numbers("size"),
        footers=footers.numbers("footer"),
        checksums=footers.numbers("checksum"),
        first_group=first_group,
        rows=rows,
        group_bytes=group_bytes,
        schema=one_schema(different, columns, asker),
        row_bytes=row_bytes,
        kept_in=kept_in,
        folders=tuple(field.name for field in folders),
    )


def _not_in_files(
    folders: Sequence[pa.Field], different: Sequence[tuple[str, pa.Schema]], both: bool, asker: str
) -> list[pa.Field]:
    """Columns that names of folders make, without those that files have."""
    left = []
    for field in folders:
        path = next((path for path, schema in different if field.name in schema.names), None)
        if path is None:
            left.append(field)
        elif both:
            raise SchemaError(
                f'{asker}: partitioning="hive" makes a column {field.name!r} of the folders\' names, and '
                f"{path} has one of that name: leave partitioning out to read the file's",
                path=path,
                stage=asker,
            )
    return left
