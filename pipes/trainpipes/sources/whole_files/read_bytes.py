from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY
from functools import partial
from itertools import islice, pairwise, repeat
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.types import IntArray
from trainpipes.columns.arrays import one_chunk, python_to_arrow, to_arrow
from trainpipes.columns.content import table_digest
from trainpipes.errors import UnreadableError
from trainpipes.errors.text import amount
from trainpipes.filesystems.retry import Requests
from trainpipes.filesystems.systems import is_local
from trainpipes.interfaces.source import Place, RandomAccessSource
from trainpipes.interfaces.stage import Stage
from trainpipes.sources.files.ahead import Ahead
from trainpipes.sources.files.block_reader import explained
from trainpipes.sources.files.file_errors import without
from trainpipes.sources.files.file_list import FileList
from trainpipes.sources.files.file_reader import FileBlocks, FileReader, cut_by_bytes, cut_evenly
from trainpipes.sources.files.remote_bytes import open_bytes

#: Bytes of one Arrow column of bytes, at most, and of a file.
MOST_BYTES, MOST_FILE = 1 << 30, (1 << 31) - 1
#: Files of a block, by default.
BLOCK_ROWS = 256


class ReadBytes(FileReader, has_blocks=True, random_access=True):
    """Reads whole files: a row for each, with ``path`` and ``bytes``.

    A file is read when its batch is made: a shuffle's buffer costs 8 bytes a file. Put many small remote
    files in tar archives, for ``read_webdataset``.

    Args:
        block_rows: files in a block (a shuffle permutes blocks first).
        storage_options: more options of fsspec; never shown or saved.

    Raises:
        DataChangedError: a file has changed since it was listed.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("a.bin", "b.bin"):
    ...     _ = (folder / name).write_bytes(name.encode() * 2)
    >>> [row["bytes"] for row in tp.list_files(folder).read_bytes()]
    [b'a.bina.bin', b'b.binb.bin']
    """

    _: KW_ONLY
    block_rows: int = BLOCK_ROWS
    storage_options: Mapping[str, Any] | None = None

    def _open_on(self, files: Sequence[Stage]) -> WholeFiles:
        return WholeFiles(self.listed(files, ("",)), None, self.block_rows, str(self))


class WholeFiles(FileBlocks, RandomAccessSource):
    """A row for each file, opened when it is read. A block is several files."""

    by_number = True
    holds_numbers = True
    schema: pa.Schema

    def __init__(
        self, files: FileList, more: pa.Table | None, block_rows: int, caller: str
    ) -> None:
        self.files, self.sizes = files, files.sizes
        self.more = None if more is None or not more.num_columns else more
        self._begins = cut_evenly(len(files), block_rows)
        self.lengths = np.diff(self._begins)
        known = files.sizes[files.sizes >= 0]
        self.row_bytes = float(known.mean()) if len(known) else None
        plain = [pa.field("path", pa.string()), pa.field("bytes", pa.binary())]
        self.schema = pa.schema([*plain, *(() if more is None else more.schema)])
        large = np.flatnonzero(files.sizes > MOST_FILE)
        if len(large):
            file = int(large[0])
            raise UnreadableError(
                f"{caller}: {files.names[file]} has {int(files.sizes[file]):,} bytes, and a row holds "
                f"{MOST_FILE:,} at most: leave it out with {without(files.names[file])}",
                path=files.names[file],
                stage=caller,
            )

    def rows(self, block: int) -> range:
        return range(*self._begins[block : block + 2].tolist())

    def reader(self) -> WholeFilesReader:
        return WholeFilesReader(self)

    def taker(self) -> WholeFilesReader:
        return WholeFilesReader(self)

    def take(self, index: IntArray) -> pa.Table:
        return WholeFilesReader(self).take(index)

    def place(self, block: int, row: int) -> Place:
        return Place(self.files.names[self.rows(block)[row]])

    def fingerprint(self) -> dict[str, Any]:
        digests = self.fingerprint_of(["1"] * len(self.files), [""] * len(self.files))
        return digests if self.more is None else digests | {"labels": table_digest(self.more)[:16]}

    def block_key(self, block: int) -> Any:
        rows, digest = self.rows(block), hashlib.sha256()
        for n in rows:
            about = (self._relative_names[n], int(self.sizes[n]), self.files.stamps[n])
            digest.update(repr(about).encode())
        more = "" if self.more is None else table_digest(self.more.slice(rows.start, len(rows)))
        return [digest.hexdigest(), more]

    def describe(self) -> list[tuple[str, str]]:
        lines = [("files", f"{len(self.files):,}, one a row")]
        if self.row_bytes is not None:
            lines.append(("bytes", f"{amount(self.row_bytes)} a file on average"))
        return lines


class WholeFilesReader:
    """Reads whole files, remote ones ahead. Any thread may ask."""

    def __init__(self, source: WholeFiles) -> None:
        files = self._files = source.files
        self._source, requests = source, Requests(files.retry)
        weakref.finalize(self, requests.stop)
        self._content = partial(_content, files, requests)
        self._ahead = Ahead(self._content, lambda n: max(0.0, files.sizes[n]), files.prefetch_bytes)

    def expect(
        self, blocks: Sequence[int], turns: Sequence[float] = (), most: float = math.inf
    ) -> None:
        each = zip(blocks, turns or repeat(0.0), strict=False)
        self._expect({n: turn for block, turn in each for n in self._source.rows(block)}, most=most)

    def coming(self, index: IntArray) -> None:
        self._expect(dict.fromkeys(index.tolist(), 0.0), more=True)

    def _expect(self, turns: dict[int, float], more: bool = False, most: float = math.inf) -> None:
        if not self._source.is_local:
            there = [n for n in turns if not is_local(self._files.system(n))]
            self._ahead.expect(there, more, [turns[n] for n in there], most)

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        return self._table(self._source.rows(block)[start:stop])

    def take(self, index: IntArray) -> pa.Table:
        self.coming(index)
        return self._table(index.tolist())

    def _table(self, numbers: Sequence[int]) -> pa.Table:
        sizes = self._files.sizes[np.asarray(numbers, dtype=np.int64)]
        contents: Iterator[memoryview] = map(self._taken, numbers)
        if (sizes < 0).any():  # a server tells them with the bytes
            whole = list(contents)
            contents, sizes = iter(whole), np.array([len(each) for each in whole])
        batches = []
        for start, stop in pairwise(cut_by_bytes(sizes, MOST_BYTES).tolist()):
            names = [self._files.names[n] for n in numbers[start:stop]]
            bytes_ = python_to_arrow(list(islice(contents, stop - start)), pa.binary())
            columns = [python_to_arrow(names, pa.string()), bytes_]
            if self._source.more is not None:
                index = to_arrow(np.array(numbers[start:stop], dtype=np.int64))
                columns += map(one_chunk, self._source.more.take(index).columns)
            batches.append(pa.RecordBatch.from_arrays(columns, schema=self._source.schema))
        return pa.Table.from_batches(batches, self._source.schema)

    def _taken(self, file: int) -> memoryview:
        with explained(Place(self._files.names[file]), kinds=()):
            content = None if self._source.is_local else self._ahead.take(file)
            return self._content(file) if content is None else content

    def close(self) -> None:
        """Nothing is open."""


def _content(files: FileList, requests: Requests, file: int) -> memoryview:
    data = open_bytes(files, file, requests)
    return data.read([(0, data.size)])[0]
