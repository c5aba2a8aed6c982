"""How deep the rows of JSON nest: what nests deeper than Arrow can pass on is refused.

Rows of many brackets are looked at before Arrow parses them, which takes minutes where thousands of these
nest, and ends the process where more do. Of the others, the types that Arrow has found tell.

Called by readers, in any thread, for each piece that is parsed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pyarrow as pa

from trainpipes.engine.layout import IntArray

#: Brackets within each other, the row's own among them: more levels than this Arrow's messages do not have.
MOST_DEPTH = 64
#: Opening brackets of a row that is looked at: Arrow parses fewer in no time, however they nest.
MANY = 512
#: Of so many brackets that follow each other, the first and the last are in different rows, or are looked at.
STEP = MANY // 2
#: Bytes that are looked at in one step: they stay in the cache of the processor.
STEP_BYTES = 512 << 10
#: What stands between two rows, as it is mostly written.
ENDS = b"}\n{", b"}\r\n{"

#: An opening brace, the bit by which an opening bracket differs from it, and all but these and quotes.
OPENS, LIKE = ord("{"), ord("{") ^ ord("[")
OTHERS = bytes(byte for byte in range(256) if byte not in b'{}[]"')
_NONE = np.zeros(0, np.int64)


def check_depth(lines: bytes) -> None:
    """Raise where a row of many brackets nests too deep. About 0.2 ms a MB, less than a twelfth of what
    parsing short rows takes.

    Args:
        lines: rows, each on a line.

    Raises:
        pyarrow.ArrowInvalid: one does.
    """
    words, counts = _opening(lines)
    if not len(counts) or counts[-1] <= MANY:
        return
    # Between every two of these is the end of a row, or a row has many brackets.
    marks = words[np.searchsorted(counts, np.arange(STEP, int(counts[-1]) + 1, STEP))].tolist()
    end = next((end for end in ENDS if end in lines), ENDS[0])
    done, feed = 0, end.index(b"\n")
    for before, after in pairwise(marks):
        if after < done:
            continue
        place = lines.find(b"\n", before + 8, after)
        if place < 0 or not lines.startswith(end, place - feed):
            start = lines.rfind(end, 0, before + 8) + 1
            place = lines.find(b"\n", after)  # a row's end, as a rule, and found in less time
            place = place if lines.startswith(end, place - feed) else lines.find(end, after)
            done = place + 1 or len(lines)
            refuse_deep(_depth(lines[start:done]))


def check_types(types: Iterable[pa.DataType], lines: bytes) -> None:
    """Raise where the columns found in some rows nest too deep.

    Args:
        types: of the columns.
        lines: rows, each on a line.

    Raises:
        pyarrow.ArrowInvalid: one does.
    """
    waiting = [(kind, 1) for kind in types if pa.types.is_nested(kind)]
    while waiting:
        kind, depth = waiting.pop()
        if depth >= MOST_DEPTH:
            for line in lines.splitlines():
                refuse_deep(_depth(line))
        inner = [kind.field(k).type for k in range(kind.num_fields)]
        waiting += [(one, depth + 1) for one in inner if pa.types.is_nested(one)]


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
    """Raise if brackets nest too deep.

    Args:
        depth: behind each bracket, int64 ``[brackets]``.
    """
    if len(depth) and depth.max() > MOST_DEPTH:
        raise pa.ArrowInvalid(
            f"it nests deeper than {MOST_DEPTH} brackets and braces, the most that is read; keep such a "
            "value as text, by json.dumps()"
        )


def _opening(lines: bytes) -> tuple[IntArray, IntArray]:
    """Where opening brackets are, as the beginnings of words of 8 bytes, and how many there are up to the end
    of each."""
    padded = len(lines) // 8 * 8
    view = np.frombuffer(lines, np.uint8)
    places, counts = [_NONE], [_NONE]
    for start in range(0, len(lines), STEP_BYTES):
        part = view[start : start + STEP_BYTES]
        if start + STEP_BYTES > padded:
            part = np.append(part, np.zeros(-len(part) % 8, np.uint8))
        found = ((part | LIKE) == OPENS).view(np.uint64)  # 1 in each byte of a word
        words = np.flatnonzero(found != 0)
        places.append(words * 8 + start)
        summed = found[words] * np.uint64(0x0101010101010101) >> np.uint64(56)
        counts.append(summed.astype(np.int64))
    return np.concatenate(places), np.cumsum(np.concatenate(counts))
