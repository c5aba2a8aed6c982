"""Refuses what Arrow would change, or not survive: integers that it would round to float64 (from 2^63 on,
and those beside fractions), JSON that nests too deep, for which it takes minutes, or ends the process, and
rows that are null.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.types import IntArray
from trainpipes.columns.arrays import one_chunk, to_arrow, to_numpy
from trainpipes.sources.text.cutters import FEED, NONE

#: Up to here each integer is a float of its own.
LARGEST = float(1 << 53)
#: A long integer, which is no part of a fraction or of what has an exponent.
INTEGER = re.compile(rb"(?<![\d.])\d{16,}(?![\d.eE])")

#: Some columns of some rows, with their integers as they are written.
Written = Callable[[list[str], IntArray], Iterable[Any]]


def refuse_rounded(table: pa.Table, data: bytes, written: Written) -> None:
    large = {name: _large_floats(table.column(name)) for name in table.column_names}
    names = [name for name, rows in large.items() if len(rows)]
    if not names or not INTEGER.search(data):
        return
    rows = np.unique(np.concatenate([large[name] for name in names]))
    read = table.select(names).take(to_arrow(rows)).to_pylist()
    for text, other in zip(written(names, rows), read, strict=False):
        for name in names:
            odd = _rounded(text.get(name), other[name])
            if odd is not None:
                raise pa.ArrowInvalid(
                    f"column {name!r} has the integer {odd}, which a column of floats would round; say its "
                    "type by schema=, such as uint64, or float64 to have it rounded"
                )


def _large_floats(column: Any) -> IntArray:
    """Rows with a float of 2^53 or more, positive or negative, int64."""
    kind, types = column.type, pa.types
    if types.is_floating(kind):
        ends = pc.min_max(column).as_py().values()
        if all(end is None or abs(end) < LARGEST for end in ends):
            return NONE  # without importing pandas
        return np.flatnonzero(np.abs(to_numpy(one_chunk(column.fill_null(0)))) >= LARGEST)
    if types.is_struct(kind):
        return np.concatenate([NONE, *map(_large_floats, column.flatten())])
    if types.is_list(kind):
        inner = _large_floats(pc.list_flatten(column))
        return to_numpy(one_chunk(pc.list_parent_indices(column)))[inner] if len(inner) else NONE
    return NONE


def _rounded(value: Any, read: Any) -> int | None:
    if isinstance(value, int) and isinstance(read, float):
        return value if value != read else None
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict) and isinstance(read, dict):
        pairs = [(value[name], read[name]) for name in value.keys() & read.keys()]
    elif isinstance(value, list) and isinstance(read, list):
        pairs = zip(value, read, strict=False)
    rounded = (_rounded(*pair) for pair in pairs)
    return next((odd for odd in rounded if odd is not None), None)


# Depth, and rows of null

#: Brackets within each other, the row's own among them: more levels than this Arrow's messages do not have.
MOST_DEPTH = 64
#: Opening brackets of a line that is looked at: Arrow parses fewer in no time, however they nest.
MANY = 512
#: Bytes that are looked at in one step: they stay in the cache of the processor.
STEP_BYTES = 512 << 10
#: An opening brace, the bit by which an opening bracket differs from it, and all but these and quotes.
OPENS, LIKE = ord("{"), ord("{") ^ ord("[")
OTHERS = bytes(byte for byte in range(256) if byte not in b'{}[]"')
NULL_ROW = re.compile(rb"^[ \t\r]*null", re.MULTILINE)


def check_depth(lines: bytes) -> None:
    if not lines:
        return
    view = np.frombuffer(lines, np.uint8)
    steps = range(0, len(lines), STEP_BYTES)
    ends = np.concatenate([np.flatnonzero(view[n : n + STEP_BYTES] == FEED) + n for n in steps])
    if not lines.endswith(b"\n"):
        ends = np.append(ends, len(lines))
    starts = np.append(0, ends[:-1] + 1)
    if (ends - starts > 2 * MANY).any():
        opening = np.flatnonzero((view | LIKE) == OPENS)
        counts = np.diff(np.searchsorted(opening, ends), prepend=0)
        for line in np.flatnonzero(counts > MANY).tolist():
            refuse_deep(_depth(lines[starts[line] : ends[line]]))
    first, last = view[starts], view[ends - 1]
    if not (np.isin(first, list(b"{\r\n")) & np.isin(last, list(b"}\r\n"))).all():
        refuse_null(lines)
        refuse_deep(_depth(lines))  # a row may go over several lines


def refuse_null(lines: bytes) -> None:
    """Arrow makes a row of nulls of it, and ends the process where it is the first."""
    if NULL_ROW.search(lines):
        raise pa.ArrowInvalid("a row is null, and no object")


def check_types(types: Iterable[pa.DataType], lines: bytes) -> None:
    level, deep = list(types), 0
    while level := [kind.field(n).type for kind in level for n in range(kind.num_fields)]:
        deep += 1
    if deep >= MOST_DEPTH:
        for line in lines.splitlines():
            refuse_deep(_depth(line))


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
