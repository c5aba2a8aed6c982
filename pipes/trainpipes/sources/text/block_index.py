"""The blocks of files of text, as arrays: found by reading each file once, and kept for later runs.

Made by whoever opens a pipeline, before any row is read. Of several processes of a machine that need the same
index one makes it, and the others wait for it.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from trainpipes._internal.progress import Progress
from trainpipes.columns.arrays import one_chunk, to_numpy
from trainpipes.engine.layout import IntArray
from trainpipes.engine.pool import default_threads
from trainpipes.sources.compressed.streams import (
    Source,
    kind_by_content,
    kind_by_name,
    open_stream,
)
from trainpipes.sources.files.each_file import BadFileError, each_file
from trainpipes.sources.files.file_bytes import open_bytes
from trainpipes.sources.files.index_file import IndexFile, IndexKind
from trainpipes.sources.files.kept_index import KeptIndex
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.remote.retry import Requests
from trainpipes.sources.text.block_scan import PIECE_BYTES, scan
from trainpipes.sources.text.block_table import (
    COLUMNS,
    FileEntry,
    begins_of,
    entry_of,
    flat,
    is_sound,
    table_of,
)
from trainpipes.sources.text.format import Start, TextFormat

#: Threads that index files of a server, at most; local files are indexed by one a core.
MAX_THREADS = 16


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """Files, their pieces and their blocks, in order. A block is one piece or several.

    Args:
        sizes: bytes of each file, int64 ``[files]``.
        compressions: what each file is compressed with; "" for nothing.
        starts: what the first bytes of each file say.
        first_piece: number of each file's first piece, int64 ``[files + 1]``.
        begins: where each piece begins in its file, decompressed, int64 ``[pieces]``.
        stops: where it ends.
        rows: of each.
        lines: line feeds in its file before it.
        checks: its checksum, by ``check_of``.
        entries: where in the file the member begins that it is read from.
        places: where in the decompressed bytes that is.
        piece_of_block: number of each block's first piece, int64 ``[blocks + 1]``.
        kept_in: the file in which all this is kept, if it is.
    """

    sizes: IntArray
    compressions: list[str]
    starts: list[Start]
    first_piece: IntArray
    begins: IntArray
    stops: IntArray
    rows: IntArray
    lines: IntArray
    checks: IntArray
    entries: IntArray
    places: IntArray
    piece_of_block: IntArray
    kept_in: str | None = None

    def pieces(self, file: int) -> slice:
        """The pieces of a file."""
        return slice(int(self.first_piece[file]), int(self.first_piece[file + 1]))

    def file_of(self, piece: int) -> int:
        """The file that a piece is in."""
        return int(np.searchsorted(self.first_piece, piece, side="right")) - 1


def index_of(
    files: FileList,
    form: TextFormat,
    asker: str,
    index: str | bool | None,
    block_rows: int | None,
    infer: str,
) -> tuple[BlockIndex, Kept]:
    """The blocks of files, and what is kept of them.

    Costs one reading of files that have changed since they were last read: 1 to 3 s a GB, decompressed.

    Args:
        files: the files.
        form: their format.
        asker: the stage, for messages.
        index: where it is kept; see ``IndexFile.of``.
        block_rows: rows in a block; None to cut by bytes.
        infer: how types will be found, which is kept beside.

    Raises:
        UnreadableError: names every file that is none of this format, with the reason.
        UnreachableError: a server does not answer, or denies access.
    """
    cuts = json.dumps([form.name, form.settings, block_rows, PIECE_BYTES, infer], sort_keys=True)
    kind = IndexKind(
        form.reader,
        "blocks",
        {"blocks": 1, "cuts": cuts},
        COLUMNS,
        is_sound,
        cuts,
        PIECE_BYTES,
    )
    kept = Kept(files, IndexFile.of(files, index, kind))
    kept.complete(lambda missing: _scan_all(kept, missing, form, asker, block_rows))
    return _joined(kept.table(), block_rows, kept.path), kept


class Kept(KeptIndex[FileEntry]):
    """What is known of each file of text.

    Args:
        files: the data set.
        file: where it is kept; None if it is not.
    """

    def __init__(self, files: FileList, file: IndexFile | None) -> None:
        super().__init__(files, file, COLUMNS, table_of)

    def entry(self, file: int) -> FileEntry:
        """What is known of a file."""
        if file not in self.fresh:
            self.fresh[file] = entry_of(self.kept_row(file))
        return self.fresh[file]


def _scan_all(
    kept: Kept, missing: list[int], form: TextFormat, asker: str, block_rows: int | None
) -> None:
    files = kept.files

    sizes = files.sizes[missing]
    total = int(sizes.sum()) if (sizes >= 0).all() else None

    def work(file: int, requests: Requests) -> None:
        kept.fresh[file] = _scanned(files, file, form, block_rows, requests, progress)

    local = all(is_local(files.systems[int(n)]) for n in np.unique(files.system_of[missing]))
    threads = max(1, default_threads()) if local else MAX_THREADS
    with Progress(f"indexing {form.name}", total, "bytes") as progress:
        each_file(
            files, work, asker, form.name, wanted=missing, progress=progress, most=threads, least=1
        )


def _scanned(
    files: FileList,
    file: int,
    form: TextFormat,
    block_rows: int | None,
    requests: Requests,
    progress: Progress,
) -> FileEntry:
    name = files.names[file]
    data = open_bytes(files, file, requests)
    size, head = data.size, bytes(data.read([(0, min(data.size, 16))])[0])
    compression, named = kind_by_content(head), kind_by_name(name)
    if named and not compression and size:  # Arrow writes nothing where there are no rows
        raise BadFileError(f"its name says {named}, and it starts with {head[:6]!r}")
    with closing(data.stream()) as source:
        stream = open_stream(_Told(source, progress), compression)
        pieces = scan(stream, bool(compression), form, name, block_rows)
    return FileEntry(size, compression, pieces)


class _Told:
    """The bytes of a file, with progress."""

    def __init__(self, source: Source, progress: Progress) -> None:
        self._source, self._progress = source, progress

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self._progress.advance(len(data))
        return data


def _joined(table: pa.Table, block_rows: int | None, kept_in: str | None) -> BlockIndex:
    (stops, first_piece), (rows, _) = flat(table, "stops"), flat(table, "rows")
    starts, before = (
        to_numpy(one_chunk(table.column(n))).astype(np.int64) for n in ("start", "lines_before")
    )
    headers = table.column("header").to_pylist()
    lines, _ = flat(table, "lines")
    lines_before = np.cumsum(lines) - lines
    lines_before += np.repeat(
        before - np.append(lines_before, 0)[first_piece[:-1]], np.diff(first_piece)
    )
    places, _ = flat(table, "places")
    begins = begins_of(stops, first_piece, starts)
    firsts = _block_starts(begins, rows, places, first_piece, block_rows)
    return BlockIndex(
        sizes=to_numpy(one_chunk(table.column("size"))).astype(np.int64),
        compressions=table.column("compression").to_pylist(),
        starts=[Start(at, tuple(h)) for at, h in zip(starts.tolist(), headers, strict=True)],
        first_piece=first_piece,
        begins=begins,
        stops=stops,
        rows=rows,
        lines=lines_before,
        checks=flat(table, "checks")[0],
        entries=flat(table, "entries")[0],
        places=places,
        piece_of_block=np.append(firsts, len(stops)).astype(np.int64),
        kept_in=kept_in,
    )


def _block_starts(
    begins: IntArray,
    rows: IntArray,
    places: IntArray,
    first_piece: IntArray,
    block_rows: int | None,
) -> IntArray:
    """Numbers of the pieces that blocks begin with.

    Without ``block_rows``, a block ends after the first piece that has a member's beginning within the block,
    so that less than a block must be decompressed to come to a block's first row. A file of one member is one
    block.
    """
    found: list[int] = []
    for first, last in pairwise(first_piece.tolist()):
        if first == last:
            continue
        found.append(first)
        if block_rows is not None:
            counted = np.cumsum(rows[first : last - 1])
            found += (first + 1 + np.flatnonzero(counted % block_rows == 0)).tolist()
            continue
        for piece in range(first + 1, last):
            if places[piece] > begins[found[-1]]:
                found.append(piece)
    return np.array(found, dtype=np.int64)
