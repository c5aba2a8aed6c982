"""Values and data as text: short, without secrets or control characters."""

from __future__ import annotations

import re
import reprlib
import signal
from collections.abc import Mapping
from itertools import islice
from typing import Any
from unicodedata import east_asian_width

from trainpipes.errors.secrets import hidden

#: Not printable by itself; joins several emojis to one.
JOINER = "\u200d"
#: Characters of a value that a message quotes, at most.
MOST = 100
#: Values that are looked at for that.
MOST_LOOKED_AT = 1000
#: Characters of a text at either end that are looked at for secrets: more than a URL has.
MOST_OF_URL = 20_000


def cut(text: str, most: int = MOST) -> str:
    """A text, or the start and the end of a long one.

    >>> cut("abcdefghijklmnop", 9)
    'abcd…mnop'
    """
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[: most - 1 - half]}…{text[len(text) - half :]}"


def shown(value: Any, most: int = MOST) -> str:
    """``repr(value)`` without secrets, in one line, cut where it is long.

    >>> shown([1, "b"])
    "[1, 'b']"
    >>> shown("x" * 1_000_000, 20)
    "'xxxxxxxxx…xxxxxxxx'"
    """
    return cut(_in_one_line(hidden(_Short().repr(value))), most)


def _in_one_line(text: str) -> str:
    return re.sub(r"\n\s*(\.?)", lambda end: end[1] or " ", text) if "\n" in text else text


class _Short(reprlib.Repr):
    """``repr`` that looks at some elements, and at so many in all."""

    def __init__(self) -> None:
        super().__init__()
        self.left = MOST_LOOKED_AT
        self.maxlevel = 8
        self.maxstring = self.maxother = self.maxlong = 4 * MOST
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = MOST
        self.maxarray = self.maxdeque = self.maxdict = MOST

    def repr1(self, value: Any, level: int) -> str:
        self.left -= 1
        try:
            return super().repr1(value, level) if self.left >= 0 else "..."
        except Exception:  # of a class that has the name of another one
            return f"<{type(value).__name__}>"

    def repr_str(self, value: str, level: int) -> str:
        if len(value) > 2 * MOST_OF_URL:
            value = value[:MOST_OF_URL] + value[-MOST_OF_URL:]
        if len(value) > self.maxstring:  # before it is cut: else the end of a URL would be left
            value = hidden(value)
        return super().repr_str(value, level)

    def repr_bytes(self, value: bytes, level: int) -> str:
        if len(value) > 2 * MOST_OF_URL:
            value = value[:MOST_OF_URL] + value[-MOST_OF_URL:]
        return cut(hidden(repr(value)), self.maxstring)

    def repr_dict(self, value: Mapping[Any, Any], level: int) -> str:
        if not value or level <= 0:
            return "{...}" if value else "{}"
        pairs = islice(value.items(), self.maxdict)  # in their order: reprlib sorts them
        parts = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in pairs]
        return "{" + ", ".join(parts) + (", ..." if len(value) > len(parts) else "") + "}"

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() < 512:
            return repr(value)
        return f"a number of {value.bit_length() * 3 // 10:,} digits"


def escaped(text: str, most: int | None = None) -> str:
    """A text in one line, with control characters as escapes.

    >>> escaped("red: \\x1b[31m, line\\n")
    'red: \\\\x1b[31m, line\\\\n'
    >>> escaped("x" * 1000, 9)
    'xxxx…xxxx'
    """
    text = text if most is None else cut(text, most)
    good = (
        c if c.isprintable() or c == JOINER else c.encode("unicode_escape").decode() for c in text
    )
    return "".join(good)


def columns_of(text: str) -> int:
    """Columns of a terminal that a text takes, about."""
    return len(text) if text.isascii() else sum(1 + (east_asian_width(c) in "WF") for c in text)


def amount(count: float) -> str:
    """So many bytes.

    >>> amount(512), amount(40_960)
    ('512 B', '41.0 kB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def how_ended(code: int | None) -> str:
    """How a process ended, by its exit code.

    >>> how_ended(1), how_ended(-15)
    ('has ended with exit code 1', 'was ended by signal 15 (SIGTERM)')
    """
    if code is None or code >= 0:
        return f"has ended with exit code {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else "unknown"
    hints = {
        "SIGKILL": ", as the system does where memory runs out,",
        "SIGBUS": ", as the system does where /dev/shm is full or a file that is mapped was cut,",
    }
    hint = hints.get(name, "")
    return f"was ended by signal {-code} ({name}){hint}"
