"""How a message quotes a value: short, whatever it is, and at a small cost however large it is."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

from trainpipes._internal.secret_text import hidden

__all__ = ["MOST_OF_URL", "cut", "shown"]

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
    """``repr(value)`` without secrets, cut where it is long; what is left out of a long value is not even
    looked at.

    >>> shown([1, "b"])
    "[1, 'b']"
    >>> shown("x" * 1_000_000, 20)
    "'xxxxxxxxx…xxxxxxxx'"
    """
    return cut(hidden(_Short().repr(value)), most)


class _Short(reprlib.Repr):
    """``repr`` that looks at some elements of large collections, and at so many in all: a value may hold
    another one many times, which holds another one many times."""

    def __init__(self) -> None:
        super().__init__()
        self.left = MOST_LOOKED_AT
        self.maxlevel = 8
        self.maxstring = self.maxother = self.maxlong = 4 * MOST
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = MOST
        self.maxarray = self.maxdeque = self.maxdict = MOST

    def repr1(self, value: Any, level: int) -> str:
        self.left -= 1
        return super().repr1(value, level) if self.left >= 0 else "..."

    def repr_str(self, value: str, level: int) -> str:
        if len(value) > 2 * MOST_OF_URL:
            value = value[:MOST_OF_URL] + value[-MOST_OF_URL:]
        if len(value) > self.maxstring:  # before it is cut: else the end of a URL would be left
            value = hidden(value)
        return super().repr_str(value, level)

    def repr_bytes(self, value: bytes, level: int) -> str:
        return self.repr_str(value, level)  # type: ignore[arg-type]

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
