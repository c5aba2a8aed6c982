"""The files of ``inspect_files``: which reader is for them, what their footers say, and a sample of rows."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
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
from trainpipes.sources.files.file_rows import COMPRESSED, ends_of_names, reader_by_name
from trainpipes.sources.files.list_files import FileList, ListFiles
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.memmap.from_memmap import FromMemmap
from trainpipes.sources.memmap.manifest import is_memmap
from trainpipes.sources.remote.retry import Stopped

#: Formats without a header: a file is read once to count its rows.
SCANNED = ("read_json", "read_csv", "read_text", "read_webdataset")
#: Bytes of such files that are read, about 1 s a GB; a quarter of that if they are compressed or remote. Of
#: more, some of so many files are, the small ones first.
SCANNED_BYTES, SCANNED_FILES = 256 << 20, 64
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
    """Files that are read as one, or a file by itself."""

    name: str
    size: int
    lengths: IntArray
    block_bytes: npt.NDArray[np.float64]
    schema: pa.Schema | None
    source: RowSource


@dataclass
class Found:
    """The files."""

    reader: str
    urls: Sequence[str]
    remote: bool = False
    count: int = 1
    bytes: int = 0
    files: list[DataFile] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    scale: float = 1.0

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
    there are several formats, the one with most bytes is taken."""
    if not urls:
        raise MissingFilesError(
            "inspect_files(files) must be a path, folder, glob or URL, or a list of them, got none"
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
            f"inspect_files(files) must end in {', '.join(ends_of_names()[:12])}, …, got {len(files):,} "
            f"others, such as {cut(files.names[0])}; rename them"
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
    _look(found, files)
    return found


def _is_memmap(url: str) -> bool:
    return any(map(is_memmap, [url, *glob.glob(f"{glob.escape(url)}/*/")]))


def _memmap(urls: Sequence[str]) -> Found:
    source = FromMemmap(list(urls) if len(urls) > 1 else urls[0]).open()
    size = int((source.row_bytes or 0) * int(source.lengths.sum()))
    count = len(np.unique(source.file_of_block))
    return Found("from_memmap", urls, count=count, bytes=size, files=[_file(urls[0], size, source)])


def _look(found: Found, files: FileList) -> None:
    """Open files as a pipeline opens them, or each by itself where they cannot be opened together."""

    wanted = _wanted_files(found, files)
    if found.reader == "read_images":
        for file in np.flatnonzero(files.sizes == 0).tolist():
            found.unreadable[hidden(files.names[file])] = "empty: 0 bytes"
        wanted = np.flatnonzero(files.sizes != 0).tolist()

    def look(*numbers: int) -> list[DataFile]:
        some = files.pick(np.array(numbers, dtype=np.int64))
        name, size = hidden(some.names[0]), int(np.maximum(some.sizes, 0).sum())
        try:
            return [_file(name, size, _opened(found.reader, some))]
        except (UnreachableError, Stopped, MemoryError, MissingExtraError):
            raise
        except Exception as error:
            if len(numbers) == 1:
                found.unreadable[name] = reason_of(name, error)
            return []

    # Those without a header are read to their end, once, and so each by itself.
    found.files = look(*wanted) if wanted and found.reader not in SCANNED else []
    if found.reader in SCANNED or (len(wanted) > 1 and not found.files):
        one_by_one = each_file(
            files, lambda n, _: look(n), "inspect_files()", "data",
            wanted=wanted, job="looking at files",
        )  # fmt: skip
        found.files = [one for several in one_by_one.values() for one in several]
    found.bytes = found.bytes or sum(file.size for file in found.files)
    if len(wanted) < len(files) and found.reader in SCANNED:
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


def _opened(reader: str, files: FileList) -> RowSource:
    """What a pipeline reads of files that are listed already."""
    read: Any = getattr(Pipeline([ListFiles.of(files, files.names)]), reader)
    options = {} if reader == "read_images" else {"index": False}
    *below, stage = read(
        **options, **{"missing": "null"} if reader == "read_webdataset" else {}
    ).stages
    try:
        source: RowSource = stage.open_files(below)
    except ConfigError:
        if reader != "read_images":
            raise
        *below, stage = read(labels=None).stages  # they are not in folders of classes
        source = stage.open_files(below)
    return source


def _file(name: str, size: int, source: RowSource) -> DataFile:
    lengths, sizes = source.lengths, source.block_bytes
    if sizes is None:
        sizes = lengths * np.float64(source.row_bytes or size / max(1, lengths.sum()))
    return DataFile(name, size, lengths, sizes.astype(np.float64), source.schema, source)


def reason_of(name: str, error: Exception) -> str:
    """What an error says of one file, without the lines of a message about many."""
    if not isinstance(error, TrainpipesError):
        return hidden(reason(error))
    lines = str(error).splitlines()
    line = next((line for line in lines if line.lstrip().startswith(name)), lines[0]).strip()
    return line.removeprefix(name).lstrip(",: ")


# Some rows of them


@dataclass
class Sample:
    """Rows of all files."""

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
        return Sample([table for table in self.tables if set(names) <= set(table.column_names)])


def plain_array(array: pa.Array) -> pa.Array:
    """An array without views and types of Python packages. Readers decode dictionaries."""
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    kind = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return array.cast(kind[array.type]) if array.type in kind else array


def read_sample(found: Found, rows: int, small: bool) -> Sample:
    """About ``rows`` rows of all files, in pieces of consecutive rows. Files that cannot be decoded are added
    to ``found.unreadable``."""
    most = REMOTE_BYTES if found.remote or small else LOCAL_BYTES
    total = int(found.lengths.sum())
    if size := float(found.block_bytes.sum()):
        rows = min(rows, max(1, int(most * total / size)))
    if found.remote and found.reader == "read_images":
        rows = min(rows, REMOTE_IMAGES)
    sample = Sample()
    places = _places(found.files, rows, REMOTE_PIECES if found.remote else LOCAL_PIECES)
    pieces = counted(places, "reading some rows of files", len(places), "pieces", 1)
    for file, of_file in groupby(pieces, itemgetter(0)):
        one = found.files[file]
        with closing(one.source.reader()) as reader:
            for _, *place in of_file:
                try:
                    table = table_of(reader.read(*place), "inspect_files()")
                except (UnreachableError, MemoryError, MissingExtraError):
                    raise
                except Exception as error:
                    name = hidden(getattr(error, "path", None) or one.name)
                    found.unreadable[name] = reason_of(name, error)
                    continue
                one.schema = one.schema or table.schema
                sample.tables.append(table)
                most -= table.nbytes
                if most < 0:
                    return sample
    return sample


def _places(files: Sequence[DataFile], rows: int, pieces: int) -> list[tuple[int, int, int, int]]:
    """Which rows to read, as file, block, start and stop: all, or pieces at even distances."""
    blocks = [(n, block) for n, file in enumerate(files) for block in range(len(file.lengths))]
    lengths = np.concatenate([np.empty(0, np.int64), *(file.lengths for file in files)])
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    if total <= rows:
        return [(*blocks[n], 0, int(lengths[n])) for n in np.flatnonzero(lengths).tolist()]
    pieces = max(1, min(pieces, rows // PIECE_ROWS))
    each = rows // pieces
    edges = np.linspace(0, total, pieces + 1)[:-1].astype(np.int64)
    owners = np.searchsorted(ends, edges, side="right")
    found: list[tuple[int, int, int, int]] = []
    for number in np.unique(owners).tolist():
        file, block = blocks[number]
        length = int(lengths[number])
        starts = edges[owners == number] - (ends[number] - length)
        row_bytes = float(files[file].block_bytes[block]) / length
        # Only the beginning of a large row group is read: its pieces are spread over that.
        reach = max((len(starts) + 1) * each, int(DEPTH_BYTES / max(1.0, row_bytes)))
        if reach < length:
            starts = starts * reach // length
        found += [(file, block, at, min(length, at + each)) for at in starts.tolist()]
    return found
