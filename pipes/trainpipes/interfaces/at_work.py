"""In a worker process: which rows and stage are at work, so that its parent knows where it died; and the rows
at which workers died before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

#: In place of the number of a row, where none is at work.
NO_ROW = -1


class Place(NamedTuple):
    """What a worker is at: a row, or the first of some rows or batches that a stage gets together."""

    row: int = NO_ROW
    stage: int = 0
    rows: int = 1


class Known(Enum):
    #: Workers died as a stage had these rows: it gets each half of them by itself.
    HALVES = 1


@dataclass(eq=False)
class AtWork:
    """What this process does for its parent.

    Args:
        place: shared int64 ``[3]``: the ``Place`` at work.
        failed: stand-ins for the results of rows at which workers died.
    """

    place: Any
    failed: Mapping[Place, Any] = field(default_factory=dict)

    def at(self, row: int) -> Any:
        """Note the row at work; returns the stand-in for its result, or None."""
        self.place[0], self.place[2] = row, 1
        return self.failed.get(Place(row, self.place[1])) if self.failed else None

    def begin(self, row: int, stage: int, count: int) -> Any:
        """Note a stage, and the rows that it gets together."""
        self.place[:] = row, stage, count
        return self.failed.get(Place(row, stage, count)) if self.failed else None

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
