"""The blocks of files of text, as arrays: found by reading each file once, and kept for later runs.

Made by whoever opens a pipeline, before any row is read. Of several processes of a machine that need the same
index one makes it, and the others wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from trainpipes._internal.progress import Progress
from trainpipes.engine.layout import IntArray
from trainpipes.engine.pool import default_threads
from trainpipes.sources.compressed.streams import (
    Source,
    kind_by_content,
    kind_by_name,
    open_stream,
)
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.format import Layout, packed, unpacked
from trainpipes.sources.files.index_store import IndexStore, Scan
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.text.block_scan import PIECE_BYTES, scan
from trainpipes.sources.text.format import Start, TextFormat

#: Threads that index files of a server, at most; local files are indexed by one a core.
MAX_THREADS = 16
#: What is kept of each piece besides; see ``Pieces``.
PIECES = ("lines", "checks", "entries", "places")
NONE = np.empty(0, dtype=np.int64)


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
) -> tuple[BlockIndex, IndexStore]:
    """The blocks of files, and what is kept of them.

    Costs one reading of files that have changed since they were last read: 1 to 3 s a GB, decompressed.

    Args:
        files: the files.
        form: their format.
        asker: the stage, for messages.
        index: where it is kept; see ``IndexStore``.
        block_rows: rows in a block; None to cut by bytes.
        infer: how types will be found, which is kept beside.

    Raises:
        UnreadableError: names every file that is none of this format, with the reason.
        UnreachableError: a server does not answer, or denies access.
    """
    key = json.dumps([form.settings, block_rows, PIECE_BYTES, infer], sort_keys=True)
    store = IndexStore(files, form.reader, form.name, key, index, PIECE_BYTES)

    def progress(missing: list[int]) -> Progress:
        sizes = files.sizes[missing]
        total = int(sizes.sum()) if (sizes >= 0).all() else None
        return Progress(f"indexing {form.name}", total, "bytes")

    threads = max(1, default_threads()) if all(map(is_local, files.systems)) else MAX_THREADS
    store.complete(
        lambda job: _scanned(job, form, block_rows),
        asker,
        progress=progress,
        most=threads,
        least=1,
    )
    return _joined(store, block_rows), store


def _scanned(job: Scan, form: TextFormat, block_rows: int | None) -> Layout:
    data = job.data
    name, size, head = data.name, data.size, bytes(data.read([(0, min(data.size, 16))])[0])
    compression, named = kind_by_content(head), kind_by_name(name)
    if named and not compression and size:  # Arrow writes nothing where there are no rows
        raise BadFileError(f"its name says {named}, and it starts with {head[:6]!r}")
    assert job.progress is not None
    with closing(data.stream()) as source:
        stream = open_stream(_Told(source, job.progress), compression)
        pieces = scan(stream, bool(compression), form, name, block_rows)
    stops = np.array(pieces.stops, dtype=np.int64)
    begins = np.append(pieces.start.at, stops[:-1]) if len(stops) else stops
    extra = packed(
        compression=compression,
        at=pieces.start.at,
        header=list(pieces.start.header),
        lines_before=pieces.lines_before,
        **{name: np.array(getattr(pieces, name), dtype=np.int64) for name in PIECES},
    )
    return Layout(np.array(pieces.rows, dtype=np.int64), begins, stops, pa.schema([]), extra)


def with_types(layout: Layout, schema: pa.Schema, rows: int, sizes: Sequence[float]) -> Layout:
    """A layout with what was found of its types.

    Args:
        layout: of a file.
        schema: columns and types of its rows.
        rows: rows that were looked at.
        sizes: bytes of these in memory, of each column.
    """
    found = {"sampled_rows": rows, "sampled_bytes": list(sizes)}
    extra = packed(**{**unpacked(layout.extra), **found})
    return replace(layout, schema=schema, extra=extra)


def has_types(layout: Layout) -> bool:
    """Whether types were found."""
    return "sampled_rows" in unpacked(layout.extra)


class _Told:
    """The bytes of a file, with progress."""

    def __init__(self, source: Source, progress: Progress) -> None:
        self._source, self._progress = source, progress

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self._progress.advance(len(data))
        return data


def _joined(store: IndexStore, block_rows: int | None) -> BlockIndex:
    layouts = store.layouts()
    extras = [unpacked(layout.extra) for layout in layouts]
    first_piece = np.cumsum([0, *(len(layout.rows) for layout in layouts)], dtype=np.int64)
    begins, stops, rows = (
        np.concatenate([NONE, *(getattr(layout, name) for layout in layouts)])
        for name in ("start", "stop", "rows")
    )
    each = {name: np.concatenate([NONE, *(extra[name] for extra in extras)]) for name in PIECES}
    lines = [extra["lines_before"] + np.cumsum(extra["lines"]) - extra["lines"] for extra in extras]
    firsts = _block_starts(begins, rows, each["places"], first_piece, block_rows)
    return BlockIndex(
        sizes=store.sizes,
        compressions=[extra["compression"] for extra in extras],
        starts=[Start(extra["at"], tuple(extra["header"])) for extra in extras],
        first_piece=first_piece,
        begins=begins,
        stops=stops,
        rows=rows,
        lines=np.concatenate([NONE, *lines]),
        checks=each["checks"],
        entries=each["entries"],
        places=each["places"],
        piece_of_block=np.append(firsts, len(stops)).astype(np.int64),
        kept_in=store.kept_in,
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
