"""How much memory this process and those below it have: the pages that are in memory, as Linux counts them.

Pages that a process shares with its children are counted for each.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

__all__ = ["MemoryPeak", "resident"]

#: Seconds between two looks.
EVERY = 0.1
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes of this process and of all below it; 0 where the system does not tell."""
    return sum(map(_resident, _family(os.getpid())))


def _family(process: int) -> list[int]:
    """A process and all below it."""
    found = [process]
    for known in found:
        try:
            for task in Path(f"/proc/{known}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:  # it has ended
            continue
    return found


def _resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


class MemoryPeak:
    """Looks at the memory ten times a second while the block runs.

    Attributes:
        start: bytes at its start.
        now: bytes at the last look.
        peak: the most of all looks.
    """

    def __init__(self) -> None:
        self.start = self.now = self.peak = resident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trainpipes-memory", daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(EVERY):
            self._look()

    def _look(self) -> None:
        self.now = resident()
        self.peak = max(self.peak, self.now)

    def __enter__(self) -> MemoryPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()
