"""Files of text as blocks of rows: a piece of some MB or, with ``block_rows`` or compression, several."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.progress import Progress
from trainpipes.errors.text import amount
from trainpipes.sources.compressed import (
    Decompressed,
    Stream,
    kind_by_content,
    kind_by_name,
)
from trainpipes.sources.files.bad_rows import bad_rows
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.file_bytes import FileBytes, as_bytes
from trainpipes.sources.files.format import Layout, OtherBytesError
from trainpipes.sources.text.pieces import UNREAD, TextLayout, check_of, scan
from trainpipes.sources.text.row_errors import bad_row, bad_utf8, is_utf8, separated
from trainpipes.sources.text.text_rows import Start, TextRows


class TextFormat(TextRows):
    """A format of rows in text: its files, and their pieces."""

    def scan(self, file: FileBytes, progress: Progress | None = None) -> Layout:
        head = bytes(file.read([(0, min(file.size, 16))])[0])
        compression, named = kind_by_content(head), kind_by_name(file.name)
        if named and not compression and file.size:  # Arrow writes nothing where there are no rows
            raise BadFileError(f"its name says {named}, and it starts with {head[:6]!r}")
        with closing(file.stream()) as opened:

            def read(size: int) -> bytes:
                data = opened.read(size)
                if progress is not None:
                    progress.advance(len(data))
                return data

            return scan(Stream(read, compression), compression, self, file.name, file.size)

    def open(self, data: FileBytes, layout: Layout) -> FileBytes | Decompressed:
        assert isinstance(layout, TextLayout)
        return Decompressed(data, layout.compression, self.again) if layout.compression else data

    def ranges(
        self, layout: Layout, block: int, columns: Sequence[str] | None
    ) -> list[tuple[int, int]]:
        assert isinstance(layout, TextLayout)
        stop = int(layout.stop[block])
        if layout.checks[block] == UNREAD:
            return []
        if not layout.compression:
            return [(int(layout.start[block]), stop)]
        behind = np.flatnonzero(layout.places[block + 1 :] >= stop)
        end = layout.entries[block + 1 + behind[0]] if len(behind) else layout.size
        return [(int(layout.entries[block]), int(end))]

    def decode(
        self, data: Any, layout: Layout, block: int, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:

        def parse(text: bytes, start: Start, rows: int) -> pa.Table | None:
            table = self.parse(text, start, self.schema, self.strict)
            return table if len(table) == rows else None

        for rows, table in self.parsed(data, layout, block, parse):
            if isinstance(table, str):
                assert self.schema is not None
                yield bad_rows(self.schema, rows, table)
            else:
                yield from table.to_batches()

    def parsed(
        self, data: Any, layout: Layout, block: int, parse: Callable[[bytes, Start, int], Any]
    ) -> Iterator[tuple[int, Any]]:
        """What ``parse`` makes of a piece, with the number of its rows; it gives None, or raises, where it
        fails. Where bad rows are left out: of stretches of rows, and why one is bad, as ``BadRows`` has it.
        """
        assert isinstance(layout, TextLayout)
        rows, problem = int(layout.rows[block]), None
        if layout.checks[block] == UNREAD:
            size, most = int(layout.stop[block] - layout.start[block]), self.max_row_bytes
            what = (
                f"more than max_row_bytes={most:,}" if size > most else "a quoted cell has no end"
            )
            yield rows, f"{what}: it has {size:,} bytes"
            return
        text = _content(data, layout, block)
        if self.leaves_out:
            yield from separated(self, text, layout.head, rows, parse)
            return
        if not is_utf8(text):
            if not self.replace:
                raise bad_utf8(self, data.name, layout, block, text)
            text = text.decode("utf-8", "replace").encode()
        try:
            parsed = parse(text, layout.head, rows)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            parsed, problem = None, error
        if parsed is None:
            said = bad_row(self, data.name, layout, block, text)
            raise said or OtherBytesError("its rows are others than before") from problem
        yield rows, parsed

    def block_key(self, layout: Layout, blocks: range) -> list[Any]:
        assert isinstance(layout, TextLayout)
        said = str(self.schema).encode("utf-8", "backslashreplace")
        checks = layout.checks[blocks.start : blocks.stop].tolist()
        return [checks, hashlib.sha256(said).hexdigest()[:16], self.replace]

    def content(self, layout: Layout) -> str:
        assert isinstance(layout, TextLayout)
        return str(layout.content)

    def describe(self, layouts: Sequence[Layout]) -> list[tuple[str, str]]:
        compressed = [each for each in layouts if isinstance(each, TextLayout) and each.compression]
        if not compressed:
            return []
        most = amount(max(each.largest_block for each in compressed))
        said = f"to come to a row, up to {most} are decompressed: for less, write files of several members, "
        said += "by bgzip or pzstd"
        again = [("read again", f"{amount(self.again.bytes)} so far, in this process")]
        return [("compressed", said), *(again if self.again.bytes else [])]


def _content(data: Any, layout: TextLayout, piece: int) -> bytes:
    ranges, member = [(int(layout.start[piece]), int(layout.stop[piece]))], []
    if layout.compression:
        member = [(int(layout.entries[piece]), int(layout.places[piece]))]
    content = as_bytes(data.read(ranges, *member)[0])
    if member and piece == len(layout.rows) - 1:
        data.finish()
    if check_of(content) != int(layout.checks[piece]):
        raise OtherBytesError("it has as many bytes as before, and others")
    return content
