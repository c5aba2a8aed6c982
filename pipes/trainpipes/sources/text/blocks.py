"""Files of text as blocks of rows: a piece of some MB or, with ``block_rows`` or compression, several."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.progress import Progress
from trainpipes._internal.text import amount
from trainpipes.sources.compressed.streams import (
    ReadAgain,
    Stream,
    kind_by_content,
    kind_by_name,
)
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.sources.files.format import Format, Layout, OtherBytesError
from trainpipes.sources.text.block_scan import PIECE_BYTES, TextFile, TextLayout, scan
from trainpipes.sources.text.format import TextFormat
from trainpipes.sources.text.row_errors import bad_row, bad_utf8, is_utf8

#: How much larger than a piece a compressed block is, at which ``explain()`` says how to make it smaller.
LARGE = 4


@dataclass(eq=False)
class TextBlocks(Format):
    known_by_blocks = True

    form: TextFormat
    schema: pa.Schema | None = None
    strict: bool = False
    replace: bool = False
    block_rows: int | None = None

    def __post_init__(self) -> None:
        self.name, self.again = self.form.name, ReadAgain()

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

            stream = Stream(read, compression)
            return scan(stream, compression, self.form, file.name, file.size, self.block_rows)

    def open(self, data: FileBytes, layout: Layout) -> TextFile:
        assert isinstance(layout, TextLayout)
        return TextFile(data, layout, self.again)

    def ranges(
        self, layout: Layout, block: int, columns: Sequence[str] | None
    ) -> list[tuple[int, int]]:
        assert isinstance(layout, TextLayout)
        stop = int(layout.stop[block])
        if not layout.compression:
            return [(int(layout.start[block]), stop)]
        behind = np.flatnonzero(layout.places[block + 1 :] >= stop)
        end = layout.entries[block + 1 + behind[0]] if len(behind) else layout.size
        return [(int(layout.entries[block]), int(end))]

    def decode(
        self, data: TextFile, layout: Layout, block: int, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        yield from self.table(data, block).to_batches()

    def table(self, file: TextFile, number: int) -> pa.Table:

        def parse(text: bytes) -> pa.Table | None:
            found = self.form.parse(text, file.layout.head, self.schema, self.strict)
            return found if len(found) == int(file.layout.rows[number]) else None

        return self._parsed(file, number, parse)

    def infer(self, file: TextFile, number: int) -> tuple[pa.Schema, list[float]]:
        found: tuple[pa.Schema, list[float]] = self._parsed(
            file, number, lambda text: self.form.infer(text, file.layout.head)
        )
        return found

    def _parsed(self, file: TextFile, number: int, parse: Callable[[bytes], Any]) -> Any:
        """What ``parse`` makes of a piece; an error or None where it fails."""
        text, problem = file.content(number), None
        if not is_utf8(text):
            if not self.replace:
                raise bad_utf8(file, number, self.form, text)
            text = text.decode("utf-8", "replace").encode()
        try:
            found = parse(text)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            found, problem = None, error
        if found is not None:
            return found
        said = bad_row(file, number, self.form, text, self.schema, self.strict)
        raise said or OtherBytesError("its rows are others than before") from problem

    def block_key(self, layout: Layout, blocks: range) -> list[Any]:
        assert isinstance(layout, TextLayout)
        said = str(self.schema).encode("utf-8", "backslashreplace")
        checks = layout.checks[blocks.start : blocks.stop].tolist()
        return [checks, hashlib.sha256(said).hexdigest()[:16], self.replace]

    def describe(self, layouts: Sequence[Layout]) -> list[tuple[str, str]]:
        compressed = [each for each in layouts if isinstance(each, TextLayout) and each.compression]
        if not compressed:
            return []
        largest = np.array([self._largest(each) for each in compressed])
        said = "can be read from every few MB on"
        if count := int((largest > LARGE * PIECE_BYTES).sum()):
            said = (
                f"{count:,} of {len(layouts):,} files can only be read from "
                f"few places on, up to {amount(largest.max())} apart: each shard, and each resume, reads "
                "from the last such place. Write more files, or files of several members, by bgzip or pzstd"
            )
        lines = [("compressed", said)]
        if self.again.bytes:
            lines.append(("read again", f"{amount(self.again.bytes)} so far, in this process"))
        return lines

    def _largest(self, layout: TextLayout) -> int:
        """Bytes of the largest block, with what is decompressed to come to it."""
        firsts = layout.first_pieces(self.block_rows)
        ends = layout.stop[firsts[1:] - 1]
        return int((ends - layout.places[firsts[:-1]]).max(initial=0))
