"""Refuses JSON that nests too deep: Arrow takes minutes for it, or ends the process."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from trainpipes.engine.layout import IntArray
from trainpipes.sources.text.cutters import FEED

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
