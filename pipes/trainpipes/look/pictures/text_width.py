"""How wide a text is at most, whatever font draws it: boxes are made for the widest of the usual ones."""

from __future__ import annotations

from unicodedata import combining, east_asian_width

__all__ = ["drawable", "mono_width", "text_width"]

#: Widths in DejaVu Sans (and Verdana, which has the same), in ems, rounded up: the usual font that is widest.
_WIDTHS = {
    **dict.fromkeys("ijl|':., ", 0.36),
    **dict.fromkeys('()[]{}frt-;!/\\"`*', 0.52),
    **dict.fromkeys("abcdeghknopqsuvxyz0123456789?_$JLTFES", 0.66),
    **dict.fromkeys("ABCDGHIKNOPQRUVXYZ&", 0.8),
    **dict.fromkeys("mwMW@%#+=<>~^…–—→", 1.01),
}
#: Of a character that takes one place, or two, in a font of equal widths; and of one that such fonts lack.
_ONE, _TWO, _OTHER = 0.603, 1.35, 1.5
#: Below it are Latin letters, which all fonts have.
_LATIN = "\u0180"


def text_width(text: str, size: float) -> float:
    """The most that a text takes in a sans-serif font of some size.

    >>> text_width("1,000 rows", 10) < text_width("1,000 ROWS", 10)
    True
    """
    return size * sum(_WIDTHS.get(c) or _other(c) for c in text)


def mono_width(text: str, size: float) -> float:
    """The same in a font whose characters are all equally wide.

    >>> round(mono_width("batch(32)", 10), 2)
    54.27
    """
    return size * sum(_ONE if c < _LATIN or c in "…–—→" else _other(c) for c in text)


def _other(char: str) -> float:
    if combining(char):
        return 0.0
    if char < _LATIN:
        return 1.1
    return _TWO if east_asian_width(char) in "WF" else _OTHER


def drawable(text: str) -> str:
    """A text without characters that a drawing cannot hold.

    >>> drawable("a\\x00b\\nc")
    'a b c'
    """
    return "".join(c if c.isprintable() else " " for c in text)
