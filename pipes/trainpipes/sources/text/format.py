"""Files of text as blocks of rows: a piece of some MB or, with ``block_rows`` or compression, several."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import byte_count, require
from trainpipes._internal.progress import Progress
from trainpipes.errors.text import amount
from trainpipes.interfaces.quarantine import leaves_out
from trainpipes.sources.compressed import (
    Decompressed,
    ReadAgain,
    Stream,
    kind_by_content,
    kind_by_name,
)
from trainpipes.sources.files.bad_rows import bad_rows
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.file_bytes import FileBytes, as_bytes
from trainpipes.sources.files.format import Format, Layout, OtherBytesError
from trainpipes.sources.files.schema import unified
from trainpipes.sources.text.cutters import Cutter
from trainpipes.sources.text.pieces import UNREAD, Start, TextLayout, check_of, scan
from trainpipes.sources.text.row_errors import bad_row, bad_utf8, is_utf8, separated

#: Bytes of a row, unless a reader says otherwise; and the most that Arrow holds in a text.
MAX_ROW_BYTES, MOST_ROW_BYTES = "256MB", 2_000_000_000
#: What some programs write before UTF-8.
BOM = b"\xef\xbb\xbf"


def row_bytes(value: Any, option: str) -> int:
    most = byte_count(value, option)
    rule = f"a number of bytes up to {MOST_ROW_BYTES:,}, which Arrow holds in a text"
    require(most <= MOST_ROW_BYTES, option, rule, value)
    return most


class TextFormat(Format):
    """A format of rows in text, by the options of a reader; ``rule`` tells what a row is, bytes of
    ``between`` may surround one; with ``names_columns`` a file may lack a column. ``schema`` is that of all
    rows once it is known, ``inferred`` if it is not the user's; only ``strict`` refuses columns it lacks.
    """

    known_by_blocks = True
    reader: ClassVar[str]
    rule: ClassVar[str] = "rows are text"
    between: ClassVar[bytes] = b"\r\n"
    names_columns: ClassVar[bool] = False
    #: The type of a column without a single value.
    empty: ClassVar[pa.DataType] = pa.null()

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.block_rows: int | None = options["block_rows"]
        self.max_row_bytes = row_bytes(options["max_row_bytes"], "max_row_bytes")
        self.inferred = "schema" in options and options["schema"] is None
        self.schema: pa.Schema | None = None
        self.strict, self.replace = False, options["errors"] == "replace"
        self.leaves_out = leaves_out(options["on_error"])
        self.again = ReadAgain()

    @abstractmethod
    def start(self, head: bytes, whole: bool, path: str) -> Start | None:
        """Where the rows of a file begin; None if more bytes must be seen. Raises BadFileError."""

    @abstractmethod
    def cutter(self, start: Start) -> Cutter:
        """What finds the ends of a file's rows, at the first of them or at any other."""

    @abstractmethod
    def parse(
        self, data: bytes, start: Start, schema: pa.Schema | None, strict: bool = False
    ) -> pa.Table:
        """Rows as columns, of inferred types if ``schema`` is None. Raises pyarrow.ArrowException."""

    def infer(self, data: bytes, start: Start) -> tuple[pa.Schema, list[float]]:
        """The columns and types of rows, and the bytes of each column in memory."""
        table = self.parse(data, start, None)
        sizes = [float(column.nbytes) for column in table.columns]
        return pa.schema([self.as_written(field) for field in table.schema]), sizes

    def as_written(self, field: pa.Field) -> pa.Field:
        """A field that was found, in the type that the file means."""
        return field

    def wider(self, one: pa.Field, other: pa.Field) -> pa.Field:
        return unified(one, other)

    # Files and their pieces

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
