"""Files as rows: each whole, read when its batch is made.

Made by the thread that plans; several threads read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from io import FileIO
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.text import amount
from trainpipes.columns.arrays import python_to_arrow, to_arrow
from trainpipes.columns.content import table_digest
from trainpipes.engine.layout import IntArray
from trainpipes.errors import UnreadableError
from trainpipes.kinds.source import Place, RandomAccessSource
from trainpipes.sources.files.block_reader import explained
from trainpipes.sources.files.file_bytes import open_bytes
from trainpipes.sources.files.file_errors import changed, check_unchanged
from trainpipes.sources.files.file_rows import cut_evenly
from trainpipes.sources.files.list_files import FileList, digests
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.remote.ahead import waiting
from trainpipes.sources.remote.retry import Requests

#: Bytes of one Arrow column of bytes, at most, and of a file.
MOST_BYTES, MOST_FILE = 1 << 30, (1 << 31) - 1


#: Files of a block, unless told otherwise.
BLOCK_ROWS = 256


def no_columns(rows: int) -> pa.Table:
    """A table of so many rows and no columns."""
    return pa.table({"_": pa.nulls(rows)}).drop_columns(["_"])


class WholeFiles(RandomAccessSource):
    """One row for each file: its path, its bytes, and what is known of it besides. Can be pickled.

    Args:
        files: which, in the order of the rows.
        more: columns of what is known besides, a row for each file.
        block_rows: files of a block.
        asker: the stage, for messages.

    Attributes:
        files: the files.
        schema: Arrow schema of every table that comes out.
    """

    by_number = True
    holds_numbers = True

    def __init__(self, files: FileList, more: pa.Table, block_rows: int, asker: str) -> None:
        self.files, self._more = files, more
        self._begins = cut_evenly(len(files), block_rows)
        self.lengths = np.diff(self._begins)
        known = files.sizes[files.sizes >= 0]
        self.row_bytes = float(known.mean()) if len(known) else None
        plain = [pa.field("path", pa.string()), pa.field("bytes", pa.binary())]
        self.schema: pa.Schema = pa.schema([*plain, *more.schema])
        large = np.flatnonzero(files.sizes > MOST_FILE)
        if len(large):
            file = int(large[0])
            raise UnreadableError(
                f"{asker}: {files.names[file]} has {int(files.sizes[file]):,} bytes, and a row holds "
                f"{MOST_FILE:,} at most: leave it out with .filter(lambda path: ...) after list_files",
                path=files.names[file],
                stage=asker,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_relative_names"}

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        first = int(self._begins[block])
        return self.take(np.arange(first + start, first + stop, dtype=np.int64))

    def take(self, index: IntArray) -> pa.Table:
        numbers = index.tolist()
        requests = Requests(self.files.retry_seconds)
        there = {n for n in numbers if not is_local(self.files.system(n))}
        tickets = {n: waiting().submit(partial(self._fetched, n, requests)) for n in there}
        fetched = {n: waiting().result(ticket) for n, ticket in tickets.items()}
        sizes = self.files.sizes[index].copy()
        for place, n in enumerate(numbers):
            if n in fetched:
                sizes[place] = len(fetched[n])
        batches: list[pa.RecordBatch] = []
        first = 0
        while first < len(numbers) or not batches:
            more = np.searchsorted(np.cumsum(sizes[first:]), MOST_BYTES, side="right")
            rows = slice(first, first + max(1, int(more)))
            batches.append(self._batch(numbers[rows], sizes[rows], fetched))
            first = rows.stop
        return pa.Table.from_batches(batches, self.schema)

    def _batch(
        self, numbers: Sequence[int], sizes: IntArray, fetched: Mapping[int, memoryview]
    ) -> pa.RecordBatch:
        ends = np.append(0, np.cumsum(sizes))
        buffer = pa.allocate_buffer(int(ends[-1]))
        content = memoryview(buffer).cast("B")
        for n, (start, stop) in zip(numbers, pairwise(ends.tolist()), strict=True):
            if n in fetched:
                content[start:stop] = fetched[n]
            else:
                self._read(n, content[start:stop])
        offsets = pa.py_buffer(ends.astype(np.int32))
        columns = [
            python_to_arrow([self.files.names[n] for n in numbers], pa.string()),
            pa.Array.from_buffers(pa.binary(), len(numbers), [None, offsets, buffer]),
        ]
        more = self._more.take(to_arrow(np.array(numbers, dtype=np.int64))).combine_chunks()
        for column in more.columns:
            columns.append(column.chunk(0) if column.num_chunks else pa.nulls(0, column.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _read(self, file: int, out: memoryview) -> None:
        """Read a local file that is the one that was listed."""
        place = Place(self.files.names[file])
        with explained(place, kinds=()), FileIO(self.files.paths[file]) as opened:
            done = 0
            while done < len(out):
                count = opened.readinto(out[done:])
                if not count:
                    raise changed(place, f"it had {len(out):,} bytes, and has {done:,}")
                done += count
            check_unchanged(self.files, file, place, opened.fileno())

    def _fetched(self, file: int, requests: Requests) -> memoryview:
        """The bytes of a file on another machine that is the one that was listed."""
        with explained(Place(self.files.names[file]), kinds=()):
            data = open_bytes(self.files, file, requests)
            return data.read([(0, data.size)])[0]

    def place(self, block: int, row: int) -> Place:
        return Place(self.files.names[int(self._begins[block]) + row])

    @cached_property
    def _relative_names(self) -> list[str]:
        return self.files.relative_names()

    def fingerprint(self) -> dict[str, Any]:
        pairs = zip(self._relative_names, self.files.sizes.tolist(), strict=True)
        lines = [f"{name}\0{size}" for name, size in pairs]
        found = {
            "files": len(lines),
            "bytes": int(self.files.sizes.sum()),
            "digests": digests(lines),
        }
        if self._more.num_columns:
            found["labels"] = table_digest(self._more)[:16]
        return found

    def block_key(self, block: int) -> Any:
        """The files by their names below the common root, sizes, and times of change or etags."""
        rows = range(*self._begins[block : block + 2].tolist())
        digest = hashlib.sha256()
        for n in rows:
            about = (self._relative_names[n], int(self.files.sizes[n]), self.files.stamps[n])
            digest.update(repr(about).encode())
        more = (
            table_digest(self._more.slice(rows.start, len(rows))) if self._more.num_columns else ""
        )
        return [digest.hexdigest(), more]

    def describe(self) -> list[tuple[str, str]]:
        lines = [("files", f"{len(self.files):,}, one a row")]
        if self.row_bytes is not None:
            lines.append(("bytes", f"{amount(self.row_bytes)} a file on average"))
        return lines
