"""Values of rows in short, for people: what is long is cut, and nothing in them can change what is around
them."""

from __future__ import annotations

import unicodedata
from typing import Any

import pyarrow as pa

from trainpipes._internal.amount import amount
from trainpipes._internal.shown import cut
from trainpipes.look.inspection.texts import holds_bytes, is_list, is_text, plain_array

__all__ = ["cell", "harmless", "shown_type", "width_of"]

#: Characters of a value at most, items of a list, fields of a struct, and how deep lists and structs are
#: shown.
MOST_TEXT, MOST_ITEMS, MOST_FIELDS, MOST_DEPTH = 120, 3, 8, 4


def harmless(text: str) -> str:
    """A text of which a terminal shows every character: control characters, which could move the cursor or
    turn the direction of writing, are written as escapes.

    >>> harmless("a\\x1b[31m\\nb")
    'a\\\\x1b[31m\\\\nb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def width_of(text: str) -> int:
    """Columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) != 0 for c in text)


def shown_type(kind: Any) -> str:
    """A type as it is shown in a line: structs of many fields are cut."""
    return harmless(cut(str(kind), MOST_TEXT))


def cell(array: pa.Array, row: int, depth: int = MOST_DEPTH) -> str:
    """A value in short. Of a long one only its ends are looked at."""
    array = plain_array(array.slice(row, 1))
    kind = array.type
    if not array[0].is_valid:
        return "null"
    if is_text(kind) or holds_bytes(kind):
        content = memoryview(array[0].as_buffer())
        if holds_bytes(kind):
            return f"<{amount(len(content))}>"
        return _text(content)
    if pa.types.is_fixed_size_binary(kind):
        return f"<{amount(kind.byte_width)}>"
    if pa.types.is_struct(kind):
        if depth == 0:
            return "{…}"
        names = [kind.field(n).name for n in range(kind.num_fields)]
        parts = [
            f"{harmless(cut(name, 40))}: {cell(array.field(n), 0, depth - 1)}"
            for n, name in enumerate(names[:MOST_FIELDS])
        ]
        return "{" + ", ".join(parts + ["…"] * (len(names) > MOST_FIELDS)) + "}"
    if is_list(kind) or pa.types.is_map(kind):
        items = array[0].values
        count = 0 if items is None else len(items)
        if depth == 0:
            return f"[{count:,}]"
        some = [cell(items, n, depth - 1) for n in range(min(count, MOST_ITEMS))]
        if count > MOST_ITEMS:
            some.append(f"… ({count:,})")
        return f"[{', '.join(some)}]"
    try:
        return harmless(cut(str(array[0].as_py()), MOST_TEXT))
    except (
        ValueError,
        OverflowError,
        ArithmeticError,
        pa.ArrowException,
    ):  # what Python has no value for
        return harmless(cut(str(array.cast(pa.string())[0]), MOST_TEXT))


def _text(content: memoryview) -> str:
    """The two ends of a text, which may not be UTF-8."""
    half = 2 * MOST_TEXT  # bytes: more than enough for the characters that are shown
    if len(content) <= 8 * MOST_TEXT:
        return harmless(cut(bytes(content).decode("utf-8", "replace"), MOST_TEXT))
    head = bytes(content[:half]).decode("utf-8", "ignore")
    tail = bytes(content[-half:]).decode("utf-8", "ignore")
    most = (MOST_TEXT - 1) // 2
    return harmless(f"{head[:most]}…{tail[-most:]}")
