"""Where rows end in consecutive parts of a file."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainpipes.engine.layout import IntArray

Bytes = npt.NDArray[np.uint8]
FEED, RETURN, SPACE, TAB = 10, 13, 32, 9


class Cutter(Protocol):
    """Finds where rows end, in consecutive parts of a file."""

    def stops(self, data: Bytes, newlines: IntArray) -> IntArray:
        """The places behind the rows that end in this part, int64; ``newlines`` are its line feeds."""
        ...

    def finish(self) -> bool:
        """Whether a row follows the last stop, at the end of the file."""
        ...


class LineCutter:
    def __init__(self, filled: bool) -> None:
        self._filled_only = filled
        self._more = False  # the line at hand has something

    def stops(self, data: Bytes, newlines: IntArray) -> IntArray:
        if self._filled_only:
            filled, self._more = filled_lines(data, newlines, self._more)
            newlines = newlines[filled]
        elif len(data):
            self._more = bool(data[-1] != FEED)
        found: IntArray = newlines + 1
        return found

    def finish(self) -> bool:
        return self._more


def filled_lines(
    data: Bytes, newlines: IntArray, begun: bool
) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], bool]:
    """Which lines hold more than white space, bool ``[lines]``, and whether the rest does."""
    starts = np.append(0, newlines + 1)
    ends = np.append(newlines, len(data))
    filled = starts < ends
    first = data[np.minimum(starts, max(0, len(data) - 1))] if len(data) else np.zeros(1, np.uint8)
    is_space = (first == SPACE) | (first == TAB) | (first == RETURN)
    for line in np.flatnonzero(filled & is_space).tolist():
        filled[line] = bool(data[starts[line] : ends[line]].tobytes().strip(b" \t\r"))
    filled[0] |= begun
    return filled[:-1], bool(filled[-1])
