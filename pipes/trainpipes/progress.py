"""A line that says how far a long job is, and nothing for a short one.

It goes to stderr if that is a terminal, else to the logger ``trainpipes`` at level INFO, for those
who have asked for it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

__all__ = ["Progress"]

log = logging.getLogger("trainpipes")

#: Seconds after which a job counts as long.
PATIENCE = 2.0
#: Seconds between two lines, on a terminal and in a log.
EVERY_SHOWN = 0.2
EVERY_LOGGED = 10.0


class Progress:
    """Counts how much of a job is done. Threads may share one; an ``advance`` costs about 1 µs.

    Args:
        job: what is done, as in "reading footers".
        total: how many there are.
        unit: of what, in the plural.
        stream: where to show it; stderr if None.

    >>> with Progress("reading footers", total=3, unit="files") as progress:
    ...     for _ in range(3):
    ...         progress.advance()
    """

    def __init__(self, job: str, total: int, unit: str, stream: TextIO | None = None) -> None:
        self._job = job
        self._total = total
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream
        self._terminal = bool(getattr(self._stream, "isatty", lambda: False)())
        self._lock = threading.Lock()
        self._done = 0
        self._started = time.monotonic()
        self._next = self._started + PATIENCE
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()

    def advance(self, count: int = 1) -> None:
        """``count`` more are done."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now >= self._next:
                self._next = now + (EVERY_SHOWN if self._terminal else EVERY_LOGGED)
                self._show(now - self._started)

    def _show(self, seconds: float) -> None:
        left = seconds / max(1, self._done) * (self._total - self._done)
        line = f"{self._job}: {self._done:,} of {self._total:,} {self._unit}, {left:.0f} s left"
        if self._terminal:
            self._stream.write("\r" + line.ljust(self._width))
            self._stream.flush()
            self._width = max(self._width, len(line))
        else:
            log.info(line)
