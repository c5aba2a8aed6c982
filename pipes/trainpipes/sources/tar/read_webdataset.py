"""``read_webdataset``: samples of tar archives.

The stage and its source, made by the thread that plans; several threads read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.checks import several
from trainpipes._internal.text import shown
from trainpipes.columns.arrays import offset_dtype, to_arrow
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, UnreadableError
from trainpipes.kinds.source import Place, RandomAccessSource
from trainpipes.kinds.stage import Stage
from trainpipes.sources.compressed.streams import ReadAgain
from trainpipes.sources.files.each_file import one_line
from trainpipes.sources.files.file_bytes import MappedFiles
from trainpipes.sources.files.file_errors import changed
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_rows import FileRows, cut_evenly
from trainpipes.sources.files.index_store import forget
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.tar.index import TarIndex, tar_index
from trainpipes.sources.tar.layout import BLOCK, is_header
from trainpipes.sources.tar.reader import TarReader

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
KEY = "__key__"
#: Bytes of a block, about, unless the user says.
BLOCK_BYTES = 4 << 20
#: Bytes between two members over which both are fetched as one.
GAP = 64 << 10
#: Bytes of one Arrow column of bytes, at most.
MOST_BYTES = 1 << 30
#: Bytes of a member beyond which its column is of a large type.
MOST_MEMBER = (1 << 31) - 1


class ReadWebdataset(FileReader):
    """Reads the samples of tar archives in the layout of WebDataset: consecutive members with the same name
    up to the first dot are a sample, such as ``0001.jpg`` and ``0001.cls``.

    In: files, from ``list_files``; a folder stands for its ``.tar`` files, also with ``.gz``, ``.zst``,
    ``.bz2`` or ``.xz`` after it. Out: rows as Arrow, with the key as ``__key__`` and a column of bytes for
    each extension, as they are stored: ``decode_image`` or a ``map`` decodes them. Cursor: which block, and
    how many rows of it.

    The headers of all members are read once, about 20 µs each; an archive that is compressed or on a server
    is read whole, once, unless ``wds2idx`` has written an index beside it (``0.idx`` for ``0.tar``).
    ``index`` keeps the result, so that later starts, shards and resumes go straight to the samples that they
    need. A compressed archive can only be read from its start: it is one block, and to reach a sample, all
    before it is decompressed. ``explain()`` says how much that was. Local archives that are not compressed
    are mapped into memory, and their samples can be chosen by number (``shuffle(scope="global")``,
    ``shuffle(sampler=...)``). A column in which a member has 2 GiB or more is of a large type.

    Members without an extension, hidden ones, folders and links are skipped.

    Args:
        columns: extensions, and ``"__key__"``; None for those of the first sample.
        missing: for a sample that lacks a member, "raise" raises; "null" puts a null in its place, and makes
            columns of all extensions in all archives unless ``columns`` names some.
        text: extensions whose members are UTF-8 text, and come as text, such as ``["txt"]``.
        block_rows: samples in a block (a shuffle permutes blocks first); if left out, as many as make about 4
            MB.
        storage_options: more options for the fsspec file system, besides those of ``list_files``. They are
            neither shown nor part of a state.
        index: where to keep what the headers say: a file that ends in ".arrow", or a folder. True: in the
            cache folder (see ``tp.cache``). False: nowhere. If left out: in the cache folder, if the
            files are remote, 64 or more, or 64 MB or more in all.

    Raises:
        UnreadableError: names all files that are no archives, or whose members' names lead out of the folder
            they are unpacked in, each with the reason.
        SchemaError: a sample lacks a member that others have; names it.
        DataChangedError: a file has changed since it was listed.

    >>> import io, pathlib, tarfile, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "digits.tar"
    >>> with tarfile.open(path, "w") as archive:
    ...     for name, content in [("0.txt", b"zero"), ("0.cls", b"0"), ("1.txt", b"one"), ("1.cls", b"1")]:
    ...         member = tarfile.TarInfo(name)
    ...         member.size = len(content)
    ...         archive.addfile(member, io.BytesIO(content))
    >>> list(tp.list_files(path).read_webdataset(text=["txt"]))[1]
    {'__key__': '1', 'txt': 'one', 'cls': b'1'}
    """

    has_blocks = True
    random_access = True

    columns: Sequence[str] | None = None
    _: KW_ONLY
    missing: Literal["raise", "null"] = "raise"
    text: Sequence[str] = ()
    block_rows: int | None = None
    storage_options: Mapping[str, Any] | None = None
    index: str | os.PathLike[str] | bool | None = None

    def check(self) -> None:
        super().check()
        text = [self.text] if isinstance(self.text, str) else self.text
        if not several(text) or not all(isinstance(name, str) for name in text):
            raise ConfigError(
                f'read_webdataset(text) takes extensions such as ["txt"], got {shown(self.text)}'
            )
        self._set(text=tuple(text))

    def open_files(self, files: Sequence[Stage]) -> TarFiles:
        """The samples of the files that the stages below list and let through."""
        listed = self.listed(files, SUFFIXES)
        index = tar_index(
            listed, self.columns, self.missing == "null", str(self), self.options["index"]
        )
        return TarFiles(listed, index, self.text, self.block_rows)


class TarFiles(FileRows, RandomAccessSource):
    """Samples of tar archives. Can be pickled; holds about 16 bytes a member, and the keys.

    Args:
        files: which.
        index: their samples.
        text: extensions that are text.
        block_rows: samples of a block; None to tell by bytes.

    Attributes:
        index: their samples.
        schema: Arrow schema of every table that a reader gives.
    """

    def __init__(
        self, files: FileList, index: TarIndex, text: Sequence[str], block_rows: int | None
    ) -> None:
        self.index = index
        edges = []
        for file in range(len(files)):
            rows = index.rows(file)
            sizes = index.sample_bytes[rows]
            if block_rows is not None:
                edges.append(cut_evenly(len(sizes), block_rows))
            elif index.compressions[file]:
                edges.append(np.array([0, len(sizes)] if len(sizes) else [0], dtype=np.int64))
            else:
                edges.append(_cut_by_bytes(sizes))
        super().__init__(files, edges)
        self.sizes = index.file_sizes
        sizes_of = dict(zip(index.kinds, index.sizes, strict=True))
        self.schema: pa.Schema = pa.schema(
            [(name, _type(name in (*text, KEY), sizes_of.get(name))) for name in index.columns]
        )
        total = float(index.sample_bytes.sum())
        self.row_bytes = total / len(index.sample_bytes) if len(index.sample_bytes) else None
        starts = np.append(0, np.cumsum(index.sample_bytes))
        firsts = self.begins + index.first_row[self.file_of_block]
        self.block_bytes: npt.NDArray[np.float64] = (
            starts[firsts + self.lengths] - starts[firsts]
        ).astype(np.float64)
        self.mapped = MappedFiles()
        self.read_again = ReadAgain()

    def reader(self) -> TarReader:
        return TarReader(self)

    def take(self, index: IntArray) -> pa.Table:
        files = np.searchsorted(self.index.first_row, index, side="right") - 1
        for file in np.unique(files).tolist():
            if self.index.compressions[file] or not is_local(self.files.system(file)):
                name = self.files.names[file]
                raise ConfigError(
                    "samples can be chosen by number in archives that are on this machine and not "
                    f"compressed, and {name} is not: unpack it to .tar, or shuffle within a buffer",
                    path=name,
                )
        parts = []
        for row, file in zip(index.tolist(), files.tolist(), strict=True):
            place = Place(self.files.names[file], row=row - int(self.index.first_row[file]))
            parts.append(self.table([row], file, self.local(file, place), 0, place))
        if not parts:
            return pa.Table.from_batches([], self.schema)
        return pa.concat_tables(parts).combine_chunks()

    def local(self, file: int, place: Place) -> memoryview:
        """The bytes of a local archive."""
        return memoryview(self.mapped.buffer(self.files, file, place))

    def table(
        self, rows: Sequence[int], file: int, content: memoryview, at: int, place: Place
    ) -> pa.Table:
        """Samples whose bytes are here.

        Args:
            rows: their numbers over all files.
            file: the archive that they are in.
            content: bytes of the archive, that begin at its byte ``at``.
            at: see there.
            place: of the first row.
        """
        batches, first, total = [], 0, 0
        for number, row in enumerate(rows):
            size = int(self.index.sample_bytes[row])
            if total + size > MOST_BYTES and number > first:
                batches.append(self._batch(rows[first:number], file, content, at, place))
                first, total = number, 0
            total += size
        batches.append(self._batch(rows[first:], file, content, at, place))
        return pa.Table.from_batches(batches, self.schema)

    def _batch(
        self, rows: Sequence[int], file: int, content: memoryview, at: int, place: Place
    ) -> pa.RecordBatch:
        columns = []
        own = np.asarray(rows, dtype=np.int64)
        for field in self.schema:
            if field.name == KEY:
                columns.append(self.index.keys.take(to_arrow(own)))
                continue
            number = self.index.kinds.index(field.name)
            starts = self.index.starts[number][own]
            sizes = self.index.sizes[number][own]
            if not self.index.compressions[file]:
                self._check_headers(starts, sizes, content, at, place)
            null = sizes < 0
            ends = zip(starts.tolist(), np.maximum(sizes, 0).tolist(), strict=True)
            data = b"".join(content[start - at : start - at + size] for start, size in ends)
            offsets = np.append(0, np.cumsum(np.maximum(sizes, 0))).astype(offset_dtype(field.type))
            valid = to_arrow(~null).buffers()[1] if null.any() else None
            buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(data)]
            column = pa.Array.from_buffers(field.type, len(own), buffers)
            if field.type in (pa.string(), pa.large_string()):
                self._check_text(column, field.name, place)
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _check_text(self, column: pa.Array, name: str, place: Place) -> None:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise UnreadableError(
                f"{place}: a member {name!r} here is not text in UTF-8: {one_line(error)}; leave it out of "
                "read_webdataset(text=[...])",
                **vars(place),
            ) from error

    def _check_headers(
        self, starts: IntArray, sizes: IntArray, content: memoryview, at: int, place: Place
    ) -> None:
        """Raise unless the first and last of these members are where the index says."""
        there = np.flatnonzero(sizes >= 0)
        for number in there[[0, -1]].tolist() if len(there) else []:
            begin = int(starts[number]) - at - BLOCK
            if begin < 0:
                continue
            if not is_header(bytes(content[begin : begin + BLOCK]), int(sizes[number])):
                forget(self.index.kept_in)
                raise changed(place, "a member is not where the index, or the .idx beside it, says")

    def describe(self) -> list[tuple[str, str]]:
        lines = [*super().describe(), ("columns", ", ".join(self.index.columns))]
        if any(self.index.compressions):
            lines.append(
                ("read again", f"{self.read_again.bytes:,} bytes so far, to come to later samples of "
                "compressed archives: unpacked to .tar, there would be none")
            )  # fmt: skip
        return lines


def _type(is_text: bool, sizes: IntArray | None) -> pa.DataType:
    """The type of a column: a large one if a member needs it."""
    if sizes is not None and len(sizes) and sizes.max() > MOST_MEMBER:
        return pa.large_string() if is_text else pa.large_binary()
    return pa.string() if is_text else pa.binary()


def _cut_by_bytes(sizes: IntArray) -> IntArray:
    """Edges of blocks of about ``BLOCK_BYTES``."""
    edges, total = [0], 0
    for row, size in enumerate(sizes.tolist()):
        if total and total + size > BLOCK_BYTES:
            edges.append(row)
            total = 0
        total += size
    if len(sizes):
        edges.append(len(sizes))
    return np.array(edges, dtype=np.int64)
