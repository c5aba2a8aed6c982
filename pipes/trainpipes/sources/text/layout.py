from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trainpipes.engine.layout import IntArray
from trainpipes.sources.compressed.streams import Decompressed, ReadAgain
from trainpipes.sources.files.file_bytes import FileBytes, as_bytes
from trainpipes.sources.files.format import Layout, OtherBytesError, packed, unpacked
from trainpipes.sources.text.block_scan import check_of
from trainpipes.sources.text.format import Start


@dataclass(frozen=True, eq=False, kw_only=True)
class TextLayout(Layout):
    """The pieces of a file: line feeds before each, int64; checksums; where its member begins in the file and
    decompressed; and the rows whose types were found, with their bytes by column.
    """

    compression: str
    head: Start
    lines: IntArray
    checks: IntArray
    entries: IntArray
    places: IntArray
    size: int
    sampled: tuple[int, list[float]] | None = None

    @staticmethod
    def of(layout: Layout) -> TextLayout:
        extra = unpacked(layout.extra)
        lines = extra.pop("lines")
        extra["lines"] = extra.pop("lines_before") + np.cumsum(lines) - lines
        extra["head"] = Start(extra.pop("at"), tuple(extra.pop("names")), extra.pop("kind"))
        return TextLayout(
            layout.rows, layout.start, layout.stop, layout.schema, layout.extra, **extra
        )

    def with_types(self, schema: pa.Schema, rows: int, sizes: Sequence[float]) -> Layout:
        extra = packed(**{**unpacked(self.extra), "sampled": [rows, list(sizes)]})
        return Layout(self.rows, self.start, self.stop, schema, extra)

    def first_pieces(self, block_rows: int | None) -> IntArray:
        """First pieces of blocks, and their number. Without ``block_rows`` a block ends after the first piece
        in which a member begins, so that less than a block is decompressed to reach a row; a file of one
        member is one block.
        """
        count = len(self.rows)
        found = [0] if count else []
        if block_rows is not None and count:
            counted = np.cumsum(self.rows[:-1])
            found += (1 + np.flatnonzero(counted % block_rows == 0)).tolist()
        elif block_rows is None:
            for piece in range(1, count):
                if self.places[piece] > self.start[found[-1]]:
                    found.append(piece)
        return np.array([*found, count], dtype=np.int64)

    def edges(self, block_rows: int | None) -> IntArray:
        found: IntArray = np.append(0, np.cumsum(self.rows))[self.first_pieces(block_rows)]
        return found


class TextFile:
    def __init__(self, data: FileBytes, layout: TextLayout, again: ReadAgain) -> None:
        self._data, self.layout, self.name = data, layout, data.name
        self._stream = Decompressed(data, layout.compression, again) if layout.compression else None

    def content(self, number: int) -> bytes:
        layout = self.layout
        start, stop = int(layout.start[number]), int(layout.stop[number])
        if self._stream is None:
            data = as_bytes(self._data.read([(start, stop)])[0])
        else:
            entry = int(layout.entries[number]), int(layout.places[number])
            data = self._stream.read(start, stop, entry)
            if number == len(layout.rows) - 1:
                self._stream.finish()
        if len(data) != stop - start or check_of(data) != int(layout.checks[number]):
            raise OtherBytesError("it has as many bytes as before, and others")
        return data

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
