from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns import arrays
from trainpipes.errors import SchemaError, TrainpipesError, UnreadableError
from trainpipes.errors.text import cut
from trainpipes.sources.files.bad_rows import END
from trainpipes.sources.files.each_file import BadFileError, one_line
from trainpipes.sources.files.file_errors import without
from trainpipes.sources.files.format import OtherBytesError
from trainpipes.sources.text.pieces import TextLayout
from trainpipes.sources.text.text_rows import Start, TextRows

#: Characters of a row that a message shows, and bytes around one that is not UTF-8.
SHOWN, AROUND = 80, 20
#: Bytes of a row that is left out which are kept to be listed.
SHOWN_BYTES = 1000
#: What Arrow says of where a row is, which is of the piece.
ARROW = re.compile(r"\s*(in row \d+|(CSV|JSON) parse error: |Row #\d+: )\s*")


def is_utf8(data: bytes) -> bool:
    ends = pa.py_buffer(np.array([0, len(data)]))
    text = pa.Array.from_buffers(pa.large_string(), 1, [None, ends, pa.py_buffer(data)])
    return arrays.is_utf8(text)


def bad_utf8(
    form: TextRows, name: str, layout: TextLayout, piece: int, data: bytes
) -> UnreadableError:
    at = 0
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
    line = int(layout.lines[piece]) + data.count(b"\n", 0, at) + 1
    where = " of the decompressed text" if layout.compression else ""
    return UnreadableError(
        f"{name}, line {line:,}: byte {int(layout.start[piece]) + at:,}{where} is not UTF-8: "
        f"{data[max(0, at - AROUND) : at + AROUND]!r}; write such files as UTF-8, as by "
        f"iconv -f latin1 -t utf-8, take {form.reader}(errors='replace'), or leave them out with "
        f"{without(name)}",
        path=name,
    )


def bad_row(
    form: TextRows, name: str, layout: TextLayout, piece: int, data: bytes
) -> TrainpipesError | None:
    """The error for an unreadable piece; None if all rows are valid."""
    start, schema = layout.head, form.schema
    stops = _stops(form, data, start)

    def problem(count: int) -> str:
        rows = _tried(form.parse, data[: stops[count - 1]], start, schema, form.strict)
        if isinstance(rows, Exception):
            return one_line(rows)
        more = len(rows) - count + 1
        return "" if more == 1 else f"the line has {more} rows"

    good = bisect_left(range(1, len(stops) + 1), True, key=lambda count: problem(count) != "")
    if good == len(stops):
        return None
    first = stops[good - 1] if good else 0
    row = data[first : stops[good]]
    blank = len(row) - len(row.lstrip(form.between))
    line = int(layout.lines[piece]) + data.count(b"\n", 0, first + blank) + 1
    text = repr(cut(row.strip(form.between).strip().decode("utf-8", "replace"), SHOWN))
    where = f"{name}, line {line:,}"
    of_row: dict[str, Any] = {"path": name, "row": int(layout.rows[:piece].sum()) + good}
    wanted = form.infer(data[:first], start)[0] if schema is None and first else schema
    drift = None if wanted is None else _drift(form, row, start, wanted)
    if drift is not None:
        return SchemaError(f"{where}: {drift.said}: {text}; {drift.way(form)}", **of_row)
    said = ARROW.sub("", problem(good + 1)).rstrip(".")
    return UnreadableError(
        f"{where}: {said}: {text}; {form.rule}: fix or remove the line, or leave the file out with "
        f"{without(name)}",
        **of_row,
    )


def separated(
    form: TextRows, data: bytes, start: Start, rows: int, parse: Callable[..., Any]
) -> Iterator[tuple[int, Any]]:
    """What ``parse`` makes of stretches of a piece's rows; and of each bad row why, and its text."""

    def tried(text: bytes, count: int) -> Any:
        if not is_utf8(text):
            if not form.replace:
                return "it is not UTF-8"
            text = text.decode("utf-8", "replace").encode()
        problem = _tried(parse, text, start, count)
        if isinstance(problem, Exception):
            return ARROW.sub("", one_line(problem)).rstrip(".")
        return "it holds more rows than one, or none" if problem is None else problem

    def parts(first: int, last: int) -> Iterator[tuple[int, Any]]:
        text, parsed = data[edges[first] : edges[last]], f"it has more than max_row_bytes={most:,}"
        if not long[first:last].any():
            parsed = tried(text, last - first)
        if not isinstance(parsed, str):
            yield last - first, parsed
        elif last - first == 1:
            shown = text[:SHOWN_BYTES].strip(form.between).decode("utf-8", "replace")
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
        raise OtherBytesError("its rows are others than before")
    long = np.diff(edges) > most
    yield from parts(0, rows)


def _tried(make: Callable[..., Any], *args: Any) -> Any:
    try:
        return make(*args)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        return error


def _stops(form: TextRows, data: bytes, start: Start) -> list[int]:
    cutter = form.cutter(start)
    stops: list[int] = cutter.stops(data)[0].tolist()
    try:
        return [*stops, len(data)] if cutter.finish() else stops
    except BadFileError:
        return stops  # the file goes on behind the piece


INFER = ', infer="all"'


@dataclass(frozen=True)
class _Drift:
    """How a row that can be read has other types than others; ``fits``: whether some type holds both."""

    said: str
    fits: bool = True

    def way(self, form: TextRows) -> str:
        infers = form.inferred and form.options.get("infer") == "first"
        types = "types are those of schema="
        if form.inferred:
            types = f"types are found in {'the first blocks' if infers else 'all rows'}"
        if self.fits:
            way = f"schema=...{INFER if infers else ''}" if form.inferred else "another type there"
            return f"{types}: give {way}, or fix the line"
        ways = 'a schema= without it, leave such rows out with on_error="skip", or fix the line'
        return f"{types}, and no type holds both: give {ways}"


def _fits(form: TextRows, *kinds: pa.DataType) -> bool:
    """Whether a type holds values of both; to CSV each is a text."""
    try:
        pa.unify_schemas([pa.schema([("", k)]) for k in kinds], promote_options="permissive")
    except pa.ArrowException:
        return form.names_columns
    return True


def _drift(form: TextRows, row: bytes, start: Start, schema: pa.Schema) -> _Drift | None:
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
