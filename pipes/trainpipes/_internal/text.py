"""Text of the data in one line of a terminal."""

from __future__ import annotations

from unicodedata import east_asian_width

from trainpipes._internal.shown import cut

__all__ = ["columns_of", "escaped"]

#: Not printable by itself; joins several emojis to one.
JOINER = "\u200d"
SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escaped(text: str, most: int | None = None) -> str:
    """A text in one line. Characters that a terminal would obey, or would not show, become escapes.

    Args:
        text: of the data.
        most: characters to keep; a longer text loses its middle.

    >>> escaped("red: \\x1b[31m, line\\n")
    'red: \\\\x1b[31m, line\\\\n'
    >>> escaped("x" * 1000, 9)
    'xxxx…xxxx'
    """
    text = text if most is None else cut(text, most)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == JOINER else _escape(c) for c in text)


def _escape(c: str) -> str:
    number = ord(c)
    if c in SHORT:
        return SHORT[c]
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def columns_of(text: str) -> int:
    """Columns of a terminal that a text takes, about."""
    return len(text) if text.isascii() else sum(1 + (east_asian_width(c) in "WF") for c in text)
