"""In a worker process: which row and stage are at work, so that its parent knows where it died; and the rows
at which workers died before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

#: In place of the number of a row, where none is at work.
NO_ROW = -1


@dataclass(eq=False)
class AtWork:
    """What this process does for its parent.

    Args:
        place: shared int64 ``[2]``: the row at work, and the stage.
        failed: stand-ins for the results of rows at which workers died, by row and stage.
    """

    place: Any
    failed: Mapping[tuple[int, int], Any] = field(default_factory=dict)

    def at(self, row: int) -> Any:
        """Note the row at work; returns the stand-in for its result, or None."""
        self.place[0] = row
        return self.failed.get((row, self.place[1])) if self.failed else None

    def noting(self, items: Iterable[T], rows: Sequence[int]) -> Iterator[T]:
        """Items, of which the row of each is noted when it is taken."""
        for item, row in zip(items, rows, strict=True):
            self.at(row)
            yield item


_current: AtWork | None = None


def current() -> AtWork | None:
    """What is at work here; None in a process that works for itself."""
    return _current


def set_current(at_work: AtWork | None) -> None:
    global _current
    _current = at_work
