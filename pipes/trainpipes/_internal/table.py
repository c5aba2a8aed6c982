"""Text in columns: the same on a terminal, in a notebook and in a file."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from trainpipes.errors.text import columns_of

#: Columns where no terminal says how many it has, and those that a cell has at least.
WIDTH, NARROWEST = 100, 4


def terminal_width() -> int:
    """Columns of the terminal, or what ``COLUMNS`` says."""
    return shutil.get_terminal_size((WIDTH, 24)).columns


def in_color(stream: Any) -> bool:
    """Whether a stream shows colors."""
    if os.environ.get("NO_COLOR"):
        return False
    known = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    return known or bool(os.environ.get("FORCE_COLOR"))


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Rows of cells in columns, two spaces apart.

    >>> print(table([["name", "n"], ["a", "1"], ["b c d e f", "2"]], width=11))
    name      n
    a         1
    b c d e   2
    f
    """
    sizes = [max(map(_widest, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        sizes = [min(size, width) for size in sizes]
        room = width - 2 * (len(sizes) - 1)
        while sum(sizes) > room and max(sizes) > NARROWEST:
            sizes[sizes.index(max(sizes))] -= 1
    found = []
    for line in rows:
        cells = [folded(cell, size) for cell, size in zip(line, sizes, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = [
                p + " " * (size - columns_of(p)) for p, size in zip(parts, sizes, strict=True)
            ]
            found.append("  ".join(padded).rstrip())
    return "\n".join(found)


def folded(text: str, width: int) -> list[str]:
    """A text in lines of at most so many columns, cut before words if possible.

    >>> folded("one two three", 8)
    ['one two', 'three']
    """
    return [part for line in text.split("\n") for part in _folded(line, max(2, width))]


def _folded(line: str, width: int) -> list[str]:
    if columns_of(line) <= width:
        return [line]
    found, left = [""], width
    for word in re.findall(r"\S+\s?|\s+", line):
        step = width if columns_of(word) <= width or word.isascii() else width // 2
        for part in (word[k : k + step] for k in range(0, len(word), step)):
            if columns_of(part.rstrip()) > left:
                found.append("")
                left = width
            found[-1] += part
            left -= columns_of(part)
    return [part.rstrip() for part in found]


def _widest(cell: str) -> int:
    return max(map(columns_of, cell.split("\n")))
