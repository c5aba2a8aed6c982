"""One line that tells how far a job is."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

__all__ = ["Progress"]

#: Seconds between two lines where the output is no terminal.
PLAIN_EVERY = 5.0


class Progress:
    """A line that is written over on a terminal; elsewhere plain lines, at most one in 5 s.

    Args:
        stream: where to write; standard output if left out.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._terminal = self._stream.isatty()
        self._shown_at = 0.0
        self._open = False

    def show(self, line: str) -> None:
        """Where the job is now."""
        now = time.monotonic()
        if now - self._shown_at < (0.1 if self._terminal else PLAIN_EVERY):
            return
        self._shown_at = now
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r" + line[:width].ljust(width))
            self._open = True
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._open:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r" + " " * width + "\r")
            self._open = False
        self._stream.write(line + "\n")
        self._stream.flush()
