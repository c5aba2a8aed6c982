from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from trainpipes._internal.text import shown
from trainpipes.kinds.options import show
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.sources.files.format import Format, Layout

#: More rows than a file has.
MOST_ROWS = 1 << 48


class FunctionFormat(Format):
    """A format of the functions that ``read_files`` takes."""

    name = "files in your own format"

    def __init__(self, fn: Callable[..., Any], count: Callable[[BinaryIO], Any] | None) -> None:
        self._fn, self._count = fn, count
        self.decoder = show(fn)

    def scan(self, file: FileBytes) -> Layout:
        several = False
        found: Any
        with closing(file.stream()) as opened:
            if self._count is None:
                found = sum(map(len, self._batches(opened)))
            else:
                found = self._count(opened)
                several = isinstance(found, Sequence | np.ndarray)
                several = several and not isinstance(found, str | bytes)
        counts: list[Any] = list(found) if several else [found]
        for rows in counts:
            is_number = isinstance(rows, int | np.integer) and not isinstance(rows, bool)
            if not is_number or not 0 <= rows < MOST_ROWS:
                raise BadFileError(
                    f"{show(self._count)} returns a number of rows, or a list of them, got {shown(found)}"
                )
        nowhere = np.zeros(len(counts), dtype=np.int64)
        rows = np.array(counts, dtype=np.int64)
        return Layout(rows, nowhere, nowhere, pa.schema([]), b"in blocks" if several else b"")

    def decode(
        self, data: FileBytes, layout: Layout, block: int, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        with closing(data.stream()) as opened:
            yield from self._batches(opened, *([block] if layout.extra else []))

    def _batches(self, opened: BinaryIO, *block: int) -> Iterator[pa.RecordBatch]:
        found, fn = self._fn(opened, *block), self.decoder
        several = not isinstance(found, pa.Table | pa.RecordBatch)
        if several and not isinstance(found, Iterator | Sequence):
            raise BadFileError(
                f"{fn} returns a pyarrow.Table or an iterator of them, got {shown(found)}"
            )
        for table in found if several else [found]:
            if not isinstance(table, pa.Table | pa.RecordBatch):
                raise BadFileError(f"{fn} yields pyarrow.Tables, got {shown(table)}")
            yield from [table] if isinstance(table, pa.RecordBatch) else table.to_batches()
