"""What a process and all below it take. Linux only; elsewhere 0."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["cpu", "pss"]


def family(pid: int) -> Iterator[int]:
    """A process and all that are below it now."""
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                for child in (task / "children").read_text().split():
                    yield from family(int(child))


def pss(pid: int) -> int:
    """Bytes of memory, PSS: a page that several share counts once."""
    total = 0
    for member in family(pid):
        with suppress(OSError, ValueError):
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def cpu(pid: int) -> float:
    """Seconds of processor time, user and system, also of those below it that have ended."""
    ticks = 0
    for member in family(pid):
        with suppress(OSError):
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
