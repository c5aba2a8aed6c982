"""Refuses what Arrow would change, or not survive: integers that it would round to float64 (from 2^63 on,
and those beside fractions), and JSON that nests too deep, for which it takes minutes, or ends the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.arrays import one_chunk, to_arrow, to_numpy
from trainpipes.engine.layout import IntArray
from trainpipes.sources.text.cutters import FEED

#: Up to here each integer is a float of its own.
LARGEST = float(1 << 53)
#: A long integer, which is no part of a fraction or of what has an exponent; and a cell that is one.
INTEGER = re.compile(rb"(?<![\d.])\d{16,}(?![\d.eE])")
CELL = re.compile(r"\s*[+-]?\d{16,}\s*")
NONE = np.empty(0, dtype=np.int64)


#: Of some rows, values of some columns as they are written.
Written = Callable[[list[str], IntArray], Iterable[tuple[str, Any]]]


def refuse_rounded(table: pa.Table, data: bytes, written: Written) -> None:
    found = {field.name: _large_floats(table.column(field.name)) for field in table.schema}
    large = {name: rows for name, rows in found.items() if len(rows)}
    if not large or not INTEGER.search(data):
        return
    for name, value in written(list(large), np.unique(np.concatenate(list(large.values())))):
        odd = _rounded(value, table.schema.field(name).type)
        if odd is not None:
            raise pa.ArrowInvalid(
                f"column {name!r} has the integer {odd}, which a column of floats would round; say its type "
                "by schema=, such as uint64, or float64 to have it rounded"
            )


def values_of_lines(
    lines: bytes, count: int, columns: list[str], rows: IntArray
) -> Iterator[tuple[str, Any]]:
    found = [line for line in lines.split(b"\n") if line.strip()]
    if len(found) == count:  # else it is not an object on each line, which is said elsewhere
        for line in filter(INTEGER.search, map(found.__getitem__, rows.tolist())):
            row = json.loads(line)
            yield from ((name, row.get(name)) for name in columns)


def values_of_cells(texts: pa.Table, rows: IntArray) -> Iterator[tuple[str, int]]:
    for name in texts.column_names:
        for cell in texts.column(name).take(to_arrow(rows)).to_pylist():
            if CELL.fullmatch(cell or ""):
                yield name, int(cell)


def _large_floats(column: Any) -> IntArray:
    """Rows with a float of 2^53 or more, positive or negative, int64."""
    kind, types = column.type, pa.types
    if types.is_floating(kind):
        ends = pc.min_max(column).as_py().values()
        if any(end is not None and abs(end) >= LARGEST for end in ends):
            return np.flatnonzero(np.abs(to_numpy(one_chunk(column.fill_null(0)))) >= LARGEST)
    if types.is_struct(kind):
        return np.concatenate([NONE, *map(_large_floats, column.flatten())])
    if types.is_list(kind):
        found = _large_floats(pc.list_flatten(column))
        return to_numpy(one_chunk(pc.list_parent_indices(column)))[found] if len(found) else NONE
    return NONE


def _rounded(value: Any, kind: pa.DataType) -> int | None:
    if pa.types.is_floating(kind):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return value if whole and float(str(value)) != value else None  # float(value) may overflow
    parts: list[tuple[Any, pa.DataType]] = []
    if pa.types.is_struct(kind) and isinstance(value, dict):
        parts = [(value.get(field.name), field.type) for field in kind]
    elif isinstance(value, list) and pa.types.is_list(kind):
        parts = [(item, kind.value_type) for item in value]
    found = (_rounded(part, own) for part, own in parts)
    return next((odd for odd in found if odd is not None), None)


# Depth

#: Brackets within each other, the row's own among them: more levels than this Arrow's messages do not have.
MOST_DEPTH = 64
#: Opening brackets of a line that is looked at: Arrow parses fewer in no time, however they nest.
MANY = 512
#: Bytes that are looked at in one step: they stay in the cache of the processor.
STEP_BYTES = 512 << 10
#: Bytes that a row on a line of its own, or a line of nothing, starts and ends with.
FIRST, LAST = (np.isin(np.arange(256), list(some)) for some in (b"{\r\n", b"}\r\n"))
#: An opening brace, the bit by which an opening bracket differs from it, and all but these and quotes.
OPENS, LIKE = ord("{"), ord("{") ^ ord("[")
OTHERS = bytes(byte for byte in range(256) if byte not in b'{}[]"')


def check_depth(lines: bytes) -> None:
    if not lines:
        return
    view = np.frombuffer(lines, np.uint8)
    steps = range(0, len(lines), STEP_BYTES)
    ends = np.concatenate([np.flatnonzero(view[n : n + STEP_BYTES] == FEED) + n for n in steps])
    if not lines.endswith(b"\n"):
        ends = np.append(ends, len(lines))
    starts = np.append(0, ends + 1)[:-1]
    if (ends - starts > 2 * MANY).any():
        opening = np.flatnonzero((view | LIKE) == OPENS)
        counts = np.searchsorted(opening, ends) - np.searchsorted(opening, starts)
        for line in np.flatnonzero(counts > MANY).tolist():
            refuse_deep(_depth(lines[starts[line] : ends[line]]))
    if not (FIRST[view[starts]] & LAST[view[ends - 1]]).all():  # a row may go over several lines
        refuse_deep(_depth(lines))


def check_types(types: Iterable[pa.DataType], lines: bytes) -> None:
    level, deep = list(types), 0
    while level := [kind.field(n).type for kind in level for n in _fields(kind)]:
        deep += 1
    if deep >= MOST_DEPTH:
        for line in lines.splitlines():
            refuse_deep(_depth(line))


def _fields(kind: pa.DataType) -> range:
    return range(kind.num_fields if pa.types.is_nested(kind) else 0)


def _depth(lines: bytes) -> IntArray:
    """How deep rows nest behind each bracket outside of texts, int64 ``[brackets]``."""
    if b"\\" in lines:
        lines = lines.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = lines.translate(None, OTHERS)
    if 2 * marks.count(b'""') < marks.count(b'"'):  # there are brackets in texts
        marks = b"".join(marks.replace(b'""', b"").split(b'"')[::2])
    view = np.frombuffer(marks.translate(None, b'"'), np.uint8)
    return np.cumsum(np.where(view | LIKE == OPENS, 1, -1))


def refuse_deep(depth: IntArray) -> None:
    if len(depth) and depth.max() > MOST_DEPTH:
        raise pa.ArrowInvalid(
            f"it nests deeper than {MOST_DEPTH} brackets and braces, the most that is read; keep such a "
            "value as text, by json.dumps()"
        )
