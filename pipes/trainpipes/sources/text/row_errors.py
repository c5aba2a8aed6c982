"""Finds the row that is wrong in a piece that cannot be read, and says why, with file and line."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa

from trainpipes._internal.text import cut
from trainpipes.errors import SchemaError, TrainpipesError, UnreadableError
from trainpipes.sources.files.each_file import BadFileError, one_line
from trainpipes.sources.text.format import Piece, Start, TextFormat

#: Characters of a row that a message shows, and bytes around one that is not UTF-8.
SHOWN, AROUND = 80, 20


def bad_utf8(piece: Piece, form: TextFormat, data: bytes) -> UnreadableError:
    """The error for a piece that is not UTF-8."""
    try:
        data.decode("utf-8")
        at = 0
    except UnicodeDecodeError as error:
        at = error.start
    path, line = piece.path, piece.line + data.count(b"\n", 0, at) + 1
    place = piece.begin + at
    text = data[max(0, at - AROUND) : at + AROUND]
    where = " of the decompressed text" if piece.compressed else ""
    return UnreadableError(
        f"{path}, line {line:,}: byte {place:,}{where} is not UTF-8: {text!r}; write such files as "
        f"UTF-8, as by iconv -f latin1 -t utf-8, take {form.reader}(errors='replace'), or leave them out "
        "with .filter(lambda path: ...) after list_files",
        path=path,
    )


def bad_row(
    piece: Piece, form: TextFormat, data: bytes, schema: pa.Schema | None, strict: bool
) -> TrainpipesError | None:
    """The error for a piece that is not what it should be; None if all of its rows are.

    Args:
        piece: where it stands.
        form: the format.
        data: its bytes.
        schema: types that were held to; None where they were to be found.
        strict: whether other columns were refused.
    """
    path, start = piece.path, piece.start
    stops = _stops(form, data, start, path)

    def problem(count: int) -> str | None:
        """What is wrong with the first rows; None if nothing is."""
        try:
            found = form.parse(data[: stops[count - 1]], start, path, schema, strict)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            return one_line(error)
        more = len(found) - count + 1
        return None if more == 1 else f"the line has {more} rows"

    low, high = 0, len(stops)  # the first rows that are good, and that are not
    said = problem(high) if stops else None
    if said is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        wrong = problem(middle)
        low, high = (middle, high) if wrong is None else (low, middle)
        said = wrong or said
    first = stops[high - 2] if high > 1 else 0
    row = data[first : stops[high - 1]]
    blank = len(row) - len(row.lstrip(form.between))
    line = piece.line + data.count(b"\n", 0, first + blank) + 1
    text = repr(cut(row.strip(form.between).strip().decode("utf-8", "replace"), SHOWN))
    where, number = f"{path}, line {line:,}", piece.row + high - 1
    if schema is None and first:
        schema = form.infer(data[:first], start, path)[0]
    drift = schema is not None and form.drift(row, start, path, schema, strict)
    if drift:
        return SchemaError(
            f"{where}: {drift}: {text}; types are those of schema=, or found in the first blocks: give "
            'schema=..., infer="all" or columns=[...], or fix the line',
            path=path,
            row=number,
        )
    said = re.sub(r"\s*(in row \d+|(CSV|JSON) parse error: |Row #\d+: )\s*", "", said).rstrip(".")
    return UnreadableError(
        f"{where}: {said}: {text}; {form.rule}: fix or remove the line, or leave the file out with "
        ".filter(lambda path: ...) after list_files",
        path=path,
        row=number,
    )


def _stops(form: TextFormat, data: bytes, start: Start, path: str) -> list[int]:
    """Where the rows of a piece end."""
    view = np.frombuffer(data, np.uint8)
    cutter = form.cutter(start, path)
    stops: list[int] = cutter.stops(view, np.flatnonzero(view == 10)).tolist()
    try:
        if cutter.finish():
            stops.append(len(data))
    except BadFileError:
        pass  # the file goes on behind the piece
    return stops


#: What some programs write before UTF-8.
BOM = b"\xef\xbb\xbf"


def is_utf8(data: bytes) -> bool:
    """Whether bytes are UTF-8; 30 µs a MB of ASCII, 0.3 to 2 ms of other text.

    >>> is_utf8("é".encode()), is_utf8("é".encode("latin-1"))
    (True, False)
    """
    ends = pa.py_buffer(np.array([0, len(data)]))
    text = pa.Array.from_buffers(pa.large_string(), 1, [None, ends, pa.py_buffer(data)])
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
