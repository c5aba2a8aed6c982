"""What the workers of a plain ``DataLoader`` do, for a profile of the process that trains: they write it to a
folder, whose number a pipeline has in all its processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

from trainpipes._internal.activity_sampler import ActivitySampler, Counts

__all__ = ["begin_report", "end_report", "folder_of", "reported"]


#: Seconds between two reports.
EVERY = 0.5


def folder_of(number: int) -> Path:
    """The folder of a profile, which the process that trains makes and removes."""
    return Path(gettempdir(), f"trainpipes-profile-{number:x}")


def reported(folder: Path) -> Iterator[Counts]:
    """What workers have written since the last time."""
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError):
            found = json.loads(path.read_bytes())
            path.unlink()
            yield Counts(**found)


class _Report:
    """Samples this process and writes, while the profile of this number is taken."""

    def __init__(self, asked: Callable[[], int]) -> None:
        self._asked, self._number = asked, asked()
        self._written, self._due = 0, 0.0
        self.sampler = ActivitySampler(self._tick)
        self.sampler.begin()

    def _tick(self, now: float) -> None:
        if self._asked() != self._number:
            self.sampler.stop()
        elif now > self._due:
            self._due = now + EVERY
            self.write()

    def write(self) -> None:
        counts = json.dumps(self.sampler.take().to_dict())
        path = folder_of(self._number) / f"{os.getpid()}-{self._written}.part"
        self._written += 1
        with suppress(OSError):  # the profile is over
            path.write_text(counts)
            path.rename(path.with_suffix(".json"))


_report: _Report | None = None


def begin_report(asked: Callable[[], int]) -> None:
    """A worker begins a pass. ``asked`` gives the number of the profile that is taken, or 0."""
    global _report
    if asked() and (_report is None or _report.sampler.is_over):
        _report = _Report(asked)


def end_report() -> None:
    """A worker ends a pass: what it did is there before the process that trains knows."""
    global _report
    if _report is not None:
        _report.sampler.stop()
        _report.write()
        _report = None
