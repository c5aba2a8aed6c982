"""The files of ``inspect_files``: which reader is for them, what their footers say, and a sample of rows."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.progress import counted
from trainpipes._internal.secrets import hidden
from trainpipes._internal.text import cut
from trainpipes.columns.columns import table_of
from trainpipes.engine.layout import IntArray
from trainpipes.errors import (
    ConfigError,
    MissingExtraError,
    MissingFilesError,
    TrainpipesError,
    UnreachableError,
)
from trainpipes.kinds.source import RowSource
from trainpipes.pipeline import Pipeline
from trainpipes.sources.arrow.saved_dataset import saved_files
from trainpipes.sources.files.each_file import each_file, reason
from trainpipes.sources.files.file_bytes import open_bytes
from trainpipes.sources.files.file_rows import COMPRESSED, ends_of_names, reader_by_name
from trainpipes.sources.files.list_files import FileList, ListFiles
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.memmap.from_memmap import FromMemmap
from trainpipes.sources.memmap.manifest import is_memmap
from trainpipes.sources.parquet.index import footer_numbers, footer_of
from trainpipes.sources.parquet.probe import Probe
from trainpipes.sources.remote.retry import Requests, Stopped

#: Formats without a header: a file is read once to count its rows.
SCANNED: dict[str, dict[str, Any]] = {
    "read_json": {"index": False},
    "read_csv": {"index": False},
    "read_text": {"index": False},
    "read_webdataset": {"index": False, "missing": "null"},
}
#: Bytes of such files that are read, about 1 s a GB; a quarter of that if they are compressed or remote. Of
#: more, some of so many files are, the small ones first.
SCANNED_BYTES, SCANNED_FILES = 256 << 20, 64
#: Column chunks of Parquet that are looked at, 25 us each; of more, some row groups of each file are.
MOST_CHUNKS = 40_000
#: Columns of names, of the samples of archives and of images: their lengths say nothing, and all differ.
NAMES = ("__key__", "path")
#: Pieces of consecutive rows that a sample has: of files on this machine, and of others, which cost requests.
LOCAL_PIECES, REMOTE_PIECES = 64, 16
#: Rows of such a piece at least, so that their order can be seen.
PIECE_ROWS = 16
#: Bytes of a sample: of files on this machine, and of others.
LOCAL_BYTES, REMOTE_BYTES = 256 << 20, 32 << 20
#: How far into a row group a piece may begin: all before it is decoded, too.
DEPTH_BYTES = 16 << 20
#: Images of a sample, where each is a request.
REMOTE_IMAGES = 64
#: Files of ``save_to_disk`` that describe the data beside them.
ABOUT = ("state.json", "dataset_info.json", "dataset_dict.json")


@dataclass
class DataFile:
    """A file that can be read, or several that are read as one.

    Args:
        name: without secrets.
        size: in bytes.
        lengths: rows of each block, int64 ``[blocks]``.
        block_bytes: bytes of each block before compression, float64 ``[blocks]``.
        schema: None if it is known only when rows are read.
        open: makes what reads its blocks.
    """

    name: str
    size: int
    lengths: IntArray
    block_bytes: npt.NDArray[np.float64]
    schema: pa.Schema | None
    open: Callable[[], RowSource]


@dataclass
class ColumnFacts:
    """What the footers of Parquet files say of a column.

    Args:
        bytes: compressed, of the row groups that were looked at.
        rows: of these row groups.
        counted: of these, rows in row groups that say how many nulls there are.
        nulls: of the counted rows.
    """

    bytes: int = 0
    rows: int = 0
    counted: int = 0
    nulls: int = 0


@dataclass
class Found:
    """The files.

    Args:
        reader: reads them.
        urls: what was asked for.
        remote: whether files are on another machine.
        count: number of files, also of those that are not looked at.
        bytes: of all files.
        files: those that were looked at.
        others: names of files beside them that another reader reads.
        unreadable: why files cannot be read, by name.
        scale: bytes of all files, for each byte of those looked at.
        columns: what Parquet footers say of each column.
        codecs: compressed bytes in Parquet files, by codec.
    """

    reader: str
    urls: Sequence[str]
    remote: bool = False
    count: int = 1
    bytes: int = 0
    files: list[DataFile] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    scale: float = 1.0
    columns: dict[str, ColumnFacts] = field(default_factory=dict)
    codecs: Counter[str] = field(default_factory=Counter)

    @property
    def lengths(self) -> IntArray:
        """Rows of all blocks, int64 ``[blocks]``."""
        return np.concatenate([np.empty(0, np.int64), *(file.lengths for file in self.files)])

    @property
    def block_bytes(self) -> npt.NDArray[np.float64]:
        """Bytes of all blocks before compression, float64 ``[blocks]``."""
        return np.concatenate([np.empty(0), *(file.block_bytes for file in self.files)])


def find_files(urls: Sequence[str], storage_options: Mapping[str, Any] | None) -> Found:
    """The files that paths, folders, globs and URLs stand for, and what they say without reading rows. Where
    there are several formats, the one with most bytes is taken.

    Raises:
        MissingFilesError: there are none.
        ConfigError: no name says how to read a file.
        UnreachableError: a server does not answer, or denies access.
    """
    if not urls:
        raise MissingFilesError(
            "inspect_files(files) takes a path, folder, glob or URL, or a list of them, got none"
        )
    if all(map(_is_memmap, urls)):
        return _memmap(urls)
    files = ListFiles(urls=list(urls), suffix="", storage_options=storage_options).files()
    sizes: Counter[str] = Counter()
    readers = [reader_by_name(name) for name in files.names]
    for reader, size in zip(readers, files.sizes.tolist(), strict=True):
        sizes[reader] += max(0, size)
    del sizes[""]
    if not sizes:
        raise ConfigError(
            f"files are read by the ends of their names, got {len(files):,}, such as "
            f"{cut(files.names[0])}; known are {', '.join(ends_of_names()[:12])}, …: rename them, or read "
            "them with a reader of trainpipes, such as tp.read_json(...)"
        )
    reader = max(sizes, key=lambda one: sizes[one])
    found = Found(reader, list(urls))
    found.others = [
        hidden(name)
        for name, other in zip(files.names, readers, strict=True)
        if other not in ("", reader) and not (reader == "read_arrow" and name.endswith(ABOUT))
    ]
    files = files.pick(np.flatnonzero([one == reader for one in readers]).astype(np.int64))
    if reader == "read_arrow":
        files = saved_files(files, None, "inspect_files()")
    found.remote = not all(map(is_local, files.systems))
    found.count, found.bytes = len(files), int(np.maximum(files.sizes, 0).sum())
    if reader == "read_images":
        _look_at_images(found, files)
    else:
        _look_at_each(found, files)
    return found


def _is_memmap(url: str) -> bool:
    """Whether a folder is one of ``write_memmap``, or holds such folders."""
    return any(map(is_memmap, [url, *glob.glob(f"{glob.escape(url)}/*/")]))


def _memmap(urls: Sequence[str]) -> Found:
    source = FromMemmap(list(urls) if len(urls) > 1 else urls[0]).open()
    size = int((source.row_bytes or 0) * int(source.lengths.sum()))
    count = len(np.unique(source.file_of_block))
    return Found("from_memmap", urls, count=count, bytes=size, files=[_file(urls[0], size, source)])


def _look_at_images(found: Found, files: FileList) -> None:
    """All images as one file: each is a row."""
    for file in np.flatnonzero(files.sizes == 0).tolist():
        found.unreadable[hidden(files.names[file])] = "empty: 0 bytes"
    files = files.pick(np.flatnonzero(files.sizes != 0).astype(np.int64))
    if not len(files):
        return
    try:
        source = _opened("read_images", files)
    except ConfigError:  # they are not in folders of classes
        source = _opened("read_images", files, labels=None)
    found.files = [_file(hidden(files.names[0]), found.bytes, source)]


def _look_at_each(found: Found, files: FileList) -> None:
    """Footers of Parquet files; files of other formats are opened as a pipeline opens them."""
    lock = Lock()

    def look(file: int, requests: Requests) -> DataFile | str:
        one, name = files.pick(np.array([file], dtype=np.int64)), hidden(files.names[file])
        try:
            if found.reader != "read_parquet":
                options = {"index": False, **SCANNED.get(found.reader, {})}
                source = _opened(found.reader, one, **options)
                return _file(name, max(0, int(files.sizes[file])), source)
            data = open_bytes(files, file, requests)
            metadata, layout = footer_of(data, None)
            _add_facts(found, lock, len(files), data.size, file, metadata)
            group_bytes = footer_numbers(layout)[2:].astype(np.float64)
            open_it = partial(_opened, found.reader, one)
            return DataFile(name, data.size, layout.rows, group_bytes, layout.schema, open_it)
        except (UnreachableError, Stopped, MemoryError, MissingExtraError):
            raise
        except Exception as error:
            return reason_of(name, error)

    wanted = _wanted_files(found, files)
    looked = each_file(
        files, look, "inspect_files()", "data", wanted=wanted, least=1, job="looking at files"
    )
    for number, one in looked.items():
        if isinstance(one, str):
            found.unreadable[hidden(files.names[number])] = one
        else:
            found.files.append(one)
    found.bytes = found.bytes or sum(file.size for file in found.files)
    if len(wanted) < len(files):
        found.scale = found.bytes / max(1, sum(file.size for file in found.files))


def _wanted_files(found: Found, files: FileList) -> list[int]:
    """Numbers of the files that are looked at: all, unless too many bytes would have to be read."""
    most = SCANNED_BYTES
    if found.remote or any(name.lower().endswith((*COMPRESSED, ".tgz")) for name in files.names):
        most //= 4
    if found.reader not in SCANNED or found.bytes <= most:
        return list(range(len(files)))
    spread = np.arange(0, len(files), -(-len(files) // SCANNED_FILES))
    spread = spread[np.argsort(files.sizes[spread], kind="stable")]
    fit = int((np.cumsum(files.sizes[spread]) <= most).sum())
    return sorted(spread[: max(1, fit)].tolist())


def _opened(reader: str, files: FileList, **options: Any) -> RowSource:
    """What a pipeline reads of files that are listed already."""
    listed = Pipeline([ListFiles.of(files, files.names)])
    *below, stage = getattr(listed, reader)(**options).stages
    source: RowSource = stage.open_files(below)
    return source


def _file(name: str, size: int, source: RowSource) -> DataFile:
    lengths, sizes = source.lengths, source.block_bytes
    if sizes is None:
        sizes = lengths * np.float64(source.row_bytes or size / max(1, lengths.sum()))
    return DataFile(name, size, lengths, sizes, source.schema, lambda: source)


def reason_of(name: str, error: Exception) -> str:
    """What an error says of one file, without the lines of a message about many."""
    if not isinstance(error, TrainpipesError):
        return hidden(reason(error))
    lines = str(error).splitlines()
    line = next((line for line in lines if line.lstrip().startswith(name)), lines[0]).strip()
    return line.removeprefix(name).lstrip(",: ")


def _add_facts(found: Found, lock: Lock, files: int, size: int, file: int, metadata: Any) -> None:
    """Add sizes, codecs and nulls by the footer of one of so many files."""
    leaves, groups = metadata.num_columns, metadata.num_row_groups
    most = max(1, MOST_CHUNKS // files)
    if not leaves or not groups or file % max(1, leaves // most):
        return
    count = min(groups, max(1, most // leaves))
    names = metadata.schema.to_arrow_schema().names
    probe, every = Probe.of(metadata, size), list(range(leaves))
    with lock:
        for number in np.unique(np.linspace(0, groups - 1, count).astype(int)).tolist():
            group, seen = metadata.row_group(number), set()
            if not group.num_rows or not probe.passes(number, every):
                continue
            for n in every:
                leaf, chunk = metadata.schema.column(n), group.column(n)
                name = leaf.path if leaf.path in names else leaf.path.split(".", 1)[0]
                own = found.columns.setdefault(name, ColumnFacts())
                own.bytes += chunk.total_compressed_size
                found.codecs[chunk.compression.lower()] += chunk.total_compressed_size
                own.rows += group.num_rows * (name not in seen)
                seen.add(name)
                flat = leaf.path == name and not leaf.max_repetition_level
                if not flat or chunk.physical_type != leaf.physical_type:
                    continue
                if chunk.is_stats_set and chunk.statistics.has_null_count:
                    own.counted += group.num_rows
                    own.nulls += chunk.statistics.null_count


# Some rows of them


@dataclass
class Sample:
    """Rows of all files.

    Args:
        tables: pieces of consecutive rows, in the order of the files.
    """

    tables: list[pa.Table] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(map(len, self.tables))

    @property
    def bytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    @cached_property
    def columns(self) -> dict[str, list[pa.Array]]:
        """The rows of each column, without views and types of Python packages."""
        found: dict[str, list[pa.Array]] = {}
        for table in self.tables:
            for name, column in zip(table.column_names, table.columns, strict=True):
                found.setdefault(name, []).extend(map(plain_array, column.chunks))
        return found

    def having(self, names: Sequence[str]) -> Sample:
        """The rows that have all of these columns."""
        return Sample([table for table in self.tables if set(names) <= set(table.column_names)])


def plain_array(array: pa.Array) -> pa.Array:
    """An array without views and types of Python packages. Readers decode dictionaries."""
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    kind = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return array.cast(kind[array.type]) if array.type in kind else array


def read_sample(found: Found, rows: int, small: bool) -> Sample:
    """About ``rows`` rows of all files, in pieces of consecutive rows. Files that cannot be decoded are added
    to ``found.unreadable``.

    Args:
        found: the files.
        rows: how many, at most.
        small: whether work on them takes long, so that they should be few bytes.

    Raises:
        UnreachableError: a server does not answer, or denies access.
    """
    most = REMOTE_BYTES if found.remote or small else LOCAL_BYTES
    total = int(found.lengths.sum())
    if size := float(found.block_bytes.sum()):
        rows = min(rows, max(1, int(most * total / size)))
    if found.remote and found.reader == "read_images":
        rows = min(rows, REMOTE_IMAGES)
    sample = Sample()
    places = _places(found.files, rows, REMOTE_PIECES if found.remote else LOCAL_PIECES)
    for file, wanted in counted(
        places.items(), "reading some rows of files", len(places), "files", 1
    ):
        one, reader = found.files[file], None
        try:
            for block, start, stop in wanted:
                reader = reader or one.open().reader()
                table = table_of(reader.read(block, start, stop), "inspect_files()")
                one.schema = one.schema or table.schema
                sample.tables.append(table)
                most -= table.nbytes
                if most < 0:
                    return sample
        except (UnreachableError, MemoryError, MissingExtraError):
            raise
        except Exception as error:
            name = hidden(getattr(error, "path", None) or one.name)
            found.unreadable[name] = reason_of(name, error)
        finally:
            if reader is not None:
                reader.close()
    return sample


def _places(
    files: Sequence[DataFile], rows: int, pieces: int
) -> dict[int, list[tuple[int, int, int]]]:
    """Which rows to read, by file, as block, start and stop: all, or pieces at even distances."""
    blocks = [(n, block) for n, file in enumerate(files) for block in range(len(file.lengths))]
    lengths = np.concatenate([np.empty(0, np.int64), *(file.lengths for file in files)])
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    found: dict[int, list[tuple[int, int, int]]] = {}
    if total <= rows:
        for number in np.flatnonzero(lengths).tolist():
            file, block = blocks[number]
            found.setdefault(file, []).append((block, 0, int(lengths[number])))
        return found
    pieces = max(1, min(pieces, rows // PIECE_ROWS))
    each = rows // pieces
    edges = np.linspace(0, total, pieces + 1)[:-1].astype(np.int64)
    owners = np.searchsorted(ends, edges, side="right")
    for number in np.unique(owners).tolist():
        file, block = blocks[number]
        length = int(lengths[number])
        starts = edges[owners == number] - (ends[number] - length)
        row_bytes = float(files[file].block_bytes[block]) / length
        # Only the beginning of a large row group is read: its pieces are spread over that.
        reach = max((len(starts) + 1) * each, int(DEPTH_BYTES / max(1.0, row_bytes)))
        if reach < length:
            starts = starts * reach // length
        for start in starts.tolist():
            found.setdefault(file, []).append((block, start, min(length, start + each)))
    return found
