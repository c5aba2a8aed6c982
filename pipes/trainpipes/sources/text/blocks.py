"""Rows of files of text, in blocks: what ``read_json``, ``read_csv`` and ``read_text`` open.

``BlockSource`` lists the blocks, and is shared by all threads of a process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.text import amount
from trainpipes.kinds.source import Place
from trainpipes.sources.compressed.streams import ReadAgain
from trainpipes.sources.files.file_rows import FileBlocks
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.text.block_index import index_of
from trainpipes.sources.text.block_reader import BlockReader
from trainpipes.sources.text.block_scan import PIECE_BYTES
from trainpipes.sources.text.block_schema import Infer, schema_of
from trainpipes.sources.text.format import TextFormat
from trainpipes.sources.text.piece_reader import OtherBytesError

#: How much larger than a piece a compressed block is, at which ``explain()`` says how to make it smaller.
LARGE = 4


class BlockSource(FileBlocks):
    """Rows of files of text. Can be pickled; holds 80 bytes a piece of 4 MB, and a few hundred a file.

    Args:
        files: which.
        form: their format.
        columns: names of columns; None for all.
        schema: columns and types as the user says; None to find them.
        infer: where to look for them.
        block_rows: rows in a block; None to cut by bytes.
        asker: the stage, for messages.
        index: where the index is kept; see ``IndexStore``.
        replace: put U+FFFD in place of text that is not UTF-8.

    Attributes:
        files: the files.
        form: their format.
        index: their pieces and blocks.
        schema: Arrow schema of every table that a reader gives.
        strict: whether a column that is not in the schema is an error.
        replace: whether text that is not UTF-8 is replaced.
        lengths: rows in each block, int64 ``[blocks]``.
        file_of_block: the file that each block is in, int64 ``[blocks]``.
        read_again: counts what is decompressed only to reach later bytes.
    """

    def __init__(
        self,
        files: FileList,
        form: TextFormat,
        *,
        columns: Sequence[str] | None = None,
        schema: pa.Schema | None = None,
        infer: Infer = "first",
        block_rows: int | None = None,
        asker: str,
        index: str | bool | None = None,
        replace: bool = False,
    ) -> None:
        self.files, self.form, self.replace = files, form, replace
        self.strict = columns is None and schema is None
        for attempt in range(2):
            self.index, store = index_of(files, form, asker, index, block_rows, infer)
            try:
                self.schema, self.row_bytes = schema_of(
                    store, self.index, form, asker, columns, schema, infer, replace
                )
            except OtherBytesError:
                store.forget()  # what was kept is wrong
                if attempt:
                    raise
            else:
                break
        self.sizes = self.index.sizes
        pieces, firsts = self.index, self.index.piece_of_block
        rows = np.append(0, np.cumsum(pieces.rows))
        self.lengths = np.diff(rows[firsts])
        sizes = np.append(0, np.cumsum(pieces.stops - pieces.begins))
        self.block_bytes = np.diff(sizes[firsts]).astype(np.float64)
        found = np.searchsorted(pieces.first_piece, firsts[:-1], side="right") - 1
        self.file_of_block = found.astype(np.int64)
        self.read_again = ReadAgain()

    def reader(self) -> BlockReader:
        return BlockReader(self)

    def place(self, block: int, row: int) -> Place:
        """The file, and the row in it."""
        file = int(self.file_of_block[block])
        first = int(np.searchsorted(self.file_of_block, file))
        return Place(self.files.names[file], None, int(self.lengths[first:block].sum()) + row)

    def fetched(self, block: int) -> tuple[int, int]:
        """Where in its file the bytes of a block begin and end, compressed as they are."""
        index, file = self.index, int(self.file_of_block[block])
        first, last = index.piece_of_block[block : block + 2].tolist()
        if not index.compressions[file]:
            return int(index.begins[first]), int(index.stops[last - 1])
        pieces, end = index.pieces(file), int(index.sizes[file])
        behind = np.flatnonzero(index.places[last : pieces.stop] >= index.stops[last - 1])
        if len(behind):
            end = int(index.entries[last + int(behind[0])])
        return int(index.entries[first]), end

    def fingerprint(self) -> dict[str, Any]:
        lines = []
        sizes = self.sizes.tolist()
        firsts = np.searchsorted(self.file_of_block, np.arange(len(sizes) + 1))
        for file, (name, size) in enumerate(zip(self._relative_names, sizes, strict=True)):
            rows = self.lengths[firsts[file] : firsts[file + 1]].tolist()
            lines.append(f"{name}\0{size}\0{rows}")
        return self.fingerprint_of(lines)

    def block_key(self, block: int) -> Any:
        """The file by its name below the common root, its size and, where it is known, its time of change or
        etag; where in it the block is; and the types that its rows are read as."""
        index, file = self.index, int(self.file_of_block[block])
        first, last = index.piece_of_block[block : block + 2].tolist()
        key = [
            self._relative_names[file],
            int(index.sizes[file]),
            self.files.stamps[file],
            [int(index.begins[first]), int(index.stops[last - 1]), int(self.lengths[block])],
            index.checks[first:last].tolist(),
            self._schema_key,
        ]
        return [*key, "replace"] if self.replace else key

    @cached_property
    def _schema_key(self) -> str:
        return hashlib.sha256(str(self.schema).encode("utf-8", "backslashreplace")).hexdigest()[:16]

    def describe(self) -> list[tuple[str, str]]:
        return [*super().describe(), *self._compressed_lines()]

    def _compressed_lines(self) -> list[tuple[str, str]]:
        index = self.index
        compressed = np.array([bool(kind) for kind in index.compressions], dtype=bool)
        if not compressed.any():
            return []
        assert self.block_bytes is not None
        # With what is decompressed to come to each block.
        firsts = index.piece_of_block[:-1]
        before = index.begins[firsts] - index.places[firsts]
        sizes = np.where(compressed[self.file_of_block], self.block_bytes + before, 0)
        large = sizes > LARGE * PIECE_BYTES
        if not large.any():
            said = "can be read from every few MB on"
        else:
            count = len(np.unique(self.file_of_block[large]))
            said = (
                f"{count:,} of {len(self.files):,} files can only be read from few places on, up to "
                f"{amount(sizes.max())} apart: each shard, and each resume, reads from the last "
                "such place. Write more files, or files of several members, by bgzip or pzstd"
            )
        lines = [("compressed", said)]
        if self.read_again.bytes:
            lines.append(("read again", f"{amount(self.read_again.bytes)} so far, in this process"))
        return lines
