"""Text of the data, so that a terminal shows it and obeys nothing in it."""

from __future__ import annotations

from trainpipes._internal.shown import cut

__all__ = ["legible"]

#: Not printable by themselves, and what joins an emoji of several.
JOINER = "\u200d"
SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def legible(text: str, most: int | None = None) -> str:
    """A text in one line: what a terminal would obey, or not show at all, is written as an escape.

    Args:
        text: of the data.
        most: characters of it; of a longer one its start and its end.

    >>> legible("red: \\x1b[31m, line\\n")
    'red: \\\\x1b[31m, line\\\\n'
    >>> legible("x" * 1000, 9)
    'xxxx…xxxx'
    """
    text = text if most is None else cut(text, most)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == JOINER else _escaped(c) for c in text)


def _escaped(c: str) -> str:
    number = ord(c)
    if c in SHORT:
        return SHORT[c]
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
