"""Files of text as blocks of rows: a piece of some MB or, with ``block_rows`` or compression, several. Rows
that cannot be read are named, or left out.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes import errors
from trainpipes._internal.progress import Progress
from trainpipes.columns import utf8
from trainpipes.columns.types import NoColumn, unite
from trainpipes.sources import compressed, text_cutters, text_pieces
from trainpipes.sources.files import formats
from trainpipes.sources.files.decoded_files import END, bad_rows
from trainpipes.sources.files.file_bytes import FileBytes, as_bytes, without

#: Characters of a row that a message shows, and bytes around a character that is not UTF-8.
SHOWN, AROUND = 80, 20
#: Bytes of a row that is left out which are kept to be listed.
SHOWN_BYTES = 1000
#: What Arrow says of where a row is, which is of the piece.
ARROW = re.compile(r"\s*(in row \d+|(CSV|JSON) parse error: |Row #\d+: )\s*")


def is_utf8(data: bytes) -> bool:
    ends = pa.py_buffer(np.array([0, len(data)]))
    text = pa.Array.from_buffers(pa.large_string(), 1, [None, ends, pa.py_buffer(data)])
    return utf8.is_utf8(text)


def bad_utf8(
    form: text_pieces.TextRows, name: str, layout: text_pieces.TextLayout, piece: int, data: bytes
) -> errors.UnreadableError:
    at = 0
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
    line = int(layout.lines[piece]) + data.count(b"\n", 0, at) + 1
    where = " of the decompressed text" if layout.compression else ""
    return errors.UnreadableError(
        f"{name}, line {line:,}: byte {int(layout.start[piece]) + at:,}{where} is not UTF-8: "
        f"{data[max(0, at - AROUND) : at + AROUND]!r}; write such files as UTF-8, as by "
        f"iconv -f latin1 -t utf-8, take {form.reader}(errors='replace'), or leave them out with "
        f"{without(name)}",
        path=name,
    )


def bad_row(
    form: text_pieces.TextRows, name: str, layout: text_pieces.TextLayout, piece: int, data: bytes
) -> errors.TrainpipesError | None:
    """The error for an unreadable piece; None if all rows are valid."""
    start, schema = layout.head, form.schema
    stops = _stops(form, data, start)

    def problem(count: int) -> str:
        rows = _tried(form.parse, data[: stops[count - 1]], start, schema, form.strict)
        if isinstance(rows, Exception):
            return formats.one_line(rows)
        more = len(rows) - count + 1
        return "" if more == 1 else f"the line has {more} rows"

    good = bisect_left(range(1, len(stops) + 1), True, key=lambda count: problem(count) != "")
    if good == len(stops):
        return None
    odd = _tried(form.parse, data[: stops[good]], start, schema, form.strict)
    rounded = isinstance(odd, text_cutters.RoundedError)
    good = odd.row if rounded else good
    first = stops[good - 1] if good else 0
    row = data[first : stops[good]]
    blank = len(row) - len(row.lstrip(form.between))
    line = int(layout.lines[piece]) + data.count(b"\n", 0, first + blank) + 1
    text = repr(errors.cut(row.lstrip(form.between).strip().decode("utf-8", "replace"), SHOWN))
    where = f"{name}, line {line:,}"
    of_row: dict[str, Any] = {"path": name, "row": int(layout.rows[:piece].sum()) + good}
    wanted = form.infer(data[:first], start)[0] if schema is None and first else schema
    drift = None if wanted is None or rounded else _drift(form, row, start, wanted)
    if drift is not None:
        return errors.SchemaError(f"{where}: {drift.said}: {text}; {drift.way(form)}", **of_row)
    said = ARROW.sub("", str(odd) if rounded else problem(good + 1)).rstrip(".")
    way = f"or leave the file out with {without(name)}"
    if not rounded:
        way = f"{form.rule_for(row, start)}: fix or remove the line, {way}"
    return errors.UnreadableError(f"{where}: {said}: {text}; {way}", **of_row)


def separated(
    form: text_pieces.TextRows,
    data: bytes,
    start: text_pieces.Start,
    rows: int,
    parse: Callable[..., Any],
) -> Iterator[tuple[int, Any]]:
    """What ``parse`` makes of stretches of a piece's rows; and of each bad row why, and its text."""

    def tried(text: bytes, count: int) -> Any:
        if not is_utf8(text):
            if not form.replace:
                return "it is not UTF-8"
            text = text.decode("utf-8", "replace").encode()
        problem = _tried(parse, text, start, count)
        if isinstance(problem, Exception):
            return ARROW.sub("", formats.one_line(problem)).rstrip(".")
        return "it holds more rows than one, or none" if problem is None else problem

    def parts(first: int, last: int) -> Iterator[tuple[int, Any]]:
        text, parsed = data[edges[first] : edges[last]], f"it has more than max_row_bytes={most:,}"
        if not long[first:last].any():
            parsed = tried(text, last - first)
        if not isinstance(parsed, str):
            yield last - first, parsed
        elif last - first == 1:
            row = text[:SHOWN_BYTES].lstrip(form.between).rstrip(b"\r\n")
            shown = row.decode("utf-8", "replace")
            yield 1, f"{parsed}{END}{shown}"
        else:
            middle = (first + last) // 2
            yield from parts(first, middle)
            yield from parts(middle, last)

    most = form.max_row_bytes
    if len(data) <= most and not isinstance(parsed := tried(data, rows), str):
        yield rows, parsed
        return
    edges = [0, *_stops(form, data, start)]
    if len(edges) != rows + 1:
        raise formats.OtherBytesError("its rows are others than before")
    long = np.diff(edges) > most
    yield from parts(0, rows)


def _tried(make: Callable[..., Any], *args: Any) -> Any:
    try:
        return make(*args)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        return error


def _stops(form: text_pieces.TextRows, data: bytes, start: text_pieces.Start) -> list[int]:
    cutter = form.cutter(start)
    stops: list[int] = cutter.stops(data)[0].tolist()
    try:
        return [*stops, len(data)] if cutter.finish() else stops
    except formats.BadFileError:
        return stops  # the file goes on behind the piece


INFER = ', infer="all"'


@dataclass(frozen=True)
class _Drift:
    """How a row that can be read has other types than others; ``fits``: whether some type holds both."""

    said: str
    fits: bool = True

    def way(self, form: text_pieces.TextRows) -> str:
        infers = form.inferred and form.options.get("infer") == "first"
        types = "types are those of schema="
        if form.inferred:
            types = f"types are found in {'the first blocks' if infers else 'all rows'}"
        if self.fits:
            way = f"schema=...{INFER if infers else ''}" if form.inferred else "another type there"
            return f"{types}: give {way}, or fix the line"
        ways = 'a schema= without it, leave such rows out with on_error="skip", or fix the line'
        return f"{types}, and no type holds both: give {ways}"


def _fits(form: text_pieces.TextRows, first: pa.DataType, second: pa.DataType) -> bool:
    """Whether a type holds values of both."""
    try:
        unite(first, second, form.type_rule)
    except NoColumn:
        return False
    return True


def _drift(
    form: text_pieces.TextRows, row: bytes, start: text_pieces.Start, schema: pa.Schema
) -> _Drift | None:
    inferred = _tried(form.infer, row, start)
    if isinstance(inferred, Exception):
        return None
    for field in inferred[0]:
        if field.name in schema.names:
            wanted = schema.field(field.name)
            if isinstance(_tried(form.parse, row, start, pa.schema([wanted])), Exception):
                said = f"column {field.name!r} is {field.type} here, and should be {wanted.type}"
                return _Drift(said, _fits(form, field.type, wanted.type))
        elif form.strict:
            return _Drift(f"column {field.name!r} is new here")
    odd = isinstance(_tried(form.parse, row, start, schema, form.strict), Exception)
    return _Drift("a field within a column is new here") if odd else None


class TextFormat(text_pieces.TextRows):
    """A format of rows in text: its files, and their pieces."""

    def scan(self, file: FileBytes, progress: Progress | None = None) -> formats.Layout:
        head = bytes(file.read([(0, min(file.size, 16))])[0])
        compression, named = compressed.kind_by_content(head), compressed.kind_by_name(file.name)
        if named and not compression and file.size:  # Arrow writes nothing where there are no rows
            raise formats.BadFileError(f"its name says {named}, and it starts with {head[:6]!r}")
        with closing(file.stream()) as opened:

            def read(size: int) -> bytes:
                data = opened.read(size)
                if progress is not None:
                    progress.advance(len(data))
                return data

            return text_pieces.scan(
                compressed.Stream(read, compression), compression, self, file.name, file.size
            )

    def open(self, data: FileBytes, layout: formats.Layout) -> FileBytes | compressed.Decompressed:
        assert isinstance(layout, text_pieces.TextLayout)
        return compressed.opened(data, layout.compression, self.again)

    def ranges(
        self, layout: formats.Layout, block: int, columns: Sequence[str] | None
    ) -> list[tuple[int, int]]:
        assert isinstance(layout, text_pieces.TextLayout)
        stop = int(layout.stop[block])
        if layout.checks[block] == text_pieces.UNREAD:
            return []
        if not layout.compression:
            return [(int(layout.start[block]), stop)]
        behind = np.flatnonzero(layout.places[block + 1 :] >= stop)
        end = layout.entries[block + 1 + behind[0]] if len(behind) else layout.size
        return [(int(layout.entries[block]), int(end))]

    def decode(
        self, data: Any, layout: formats.Layout, block: int, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:

        def parse(text: bytes, start: text_pieces.Start, rows: int) -> pa.Table | None:
            table = self.parse(text, start, self.schema, self.strict)
            return table if len(table) == rows else None

        for rows, table in self.parsed(data, layout, block, parse):
            if isinstance(table, str):
                assert self.schema is not None
                yield bad_rows(self.schema, rows, table)
            else:
                yield from table.to_batches()

    def parsed(
        self,
        data: Any,
        layout: formats.Layout,
        block: int,
        parse: Callable[[bytes, text_pieces.Start, int], Any],
    ) -> Iterator[tuple[int, Any]]:
        """What ``parse`` makes of a piece, with the number of its rows; it gives None, or raises, where it
        fails. Where bad rows are left out: of stretches of rows, and why a row is bad, as ``BadRows`` has it.
        """
        assert isinstance(layout, text_pieces.TextLayout)
        rows, problem = int(layout.rows[block]), None
        if layout.checks[block] == text_pieces.UNREAD:
            size, most = int(layout.stop[block] - layout.start[block]), self.max_row_bytes
            change = (
                f"more than max_row_bytes={most:,}" if size > most else "a quoted cell has no end"
            )
            yield rows, f"{change}: it has {size:,} bytes"
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
            raise said or formats.OtherBytesError("its rows are others than before") from problem
        yield rows, parsed

    def block_key(self, layout: formats.Layout, blocks: range) -> list[Any]:
        assert isinstance(layout, text_pieces.TextLayout)
        said = str(self.schema).encode("utf-8", "backslashreplace")
        checks = layout.checks[blocks.start : blocks.stop].tolist()
        return [checks, hashlib.sha256(said).hexdigest()[:16], self.replace]

    def content(self, layout: formats.Layout) -> str:
        assert isinstance(layout, text_pieces.TextLayout)
        return str(layout.content)

    def describe(self, layouts: Sequence[formats.Layout]) -> list[tuple[str, str]]:
        in_frames = [
            each
            for each in layouts
            if isinstance(each, text_pieces.TextLayout) and each.compression
        ]
        if not in_frames:
            return []
        most = errors.amount(max(each.largest_block for each in in_frames))
        said = f"to come to a row, up to {most} are decompressed: for less, write files of several members, "
        said += "by bgzip or pzstd"
        again = [("read again", f"{errors.amount(self.again.bytes)} so far, in this process")]
        return [("compressed", said), *(again if self.again.bytes else [])]


def _content(data: Any, layout: text_pieces.TextLayout, piece: int) -> bytes:
    ranges, member = [(int(layout.start[piece]), int(layout.stop[piece]))], []
    if layout.compression:
        member = [(int(layout.entries[piece]), int(layout.places[piece]))]
    content = as_bytes(data.read(ranges, *member)[0])
    if member and piece == len(layout.rows) - 1:
        data.finish()
    if text_pieces.check_of(content) != int(layout.checks[piece]):
        raise formats.OtherBytesError("it has as many bytes as before, and others")
    return content
