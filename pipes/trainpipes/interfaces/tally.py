"""What stages count of the rows that pass: how many were left out, or have nothing to learn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from trainpipes._internal.locks import ForkLock

#: Of rows: those seen, those counted, and a number that the counted ones add up to.
Numbers = tuple[int, int, int]


_aside = ContextVar("aside", default=False)


@contextmanager
def aside() -> Iterator[None]:
    """Rows that are looked at beside those of an epoch, as to find types, which come again in their turn:
    within, this thread counts, logs and lists none of them.
    """
    token = _aside.set(True)
    try:
        yield
    finally:
        _aside.reset(token)


def is_aside() -> bool:
    return _aside.get()


class Tally:
    """Counts rows in this process; any thread may. What a ``Loader``'s workers count is added to that of
    the process that trains.
    """

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self._lock = ForkLock()
        self.numbers: Numbers = (0, 0, 0)
        #: Whether what is counted here is said elsewhere: in a worker.
        self.is_silent = False

    #: Whether it is worth a warning at an epoch's end.
    warns = True

    def add(self, more: Numbers) -> Numbers:
        """Count more rows; returns the sums."""
        with self._lock:
            if not is_aside():
                self.numbers = _plus(self.numbers, more)
            return self.numbers

    def adopt(self, more: Numbers) -> None:
        """Count rows that a worker has counted."""
        self.add(more)

    def since(self, before: Numbers) -> Numbers:
        seen, counted, size = before
        return _plus(self.numbers, (-seen, -counted, -size))

    def end(self) -> None:
        """Called at the end of a pass."""

    def check_pass(self, numbers: Numbers) -> None:
        """Called for what was counted in a whole pass of one process; may raise."""

    def said(self, numbers: Numbers) -> str:
        """In words, with the name of a mix's source; "" for none."""
        said, name = self._said(numbers), getattr(self.stage._inputs, "name", None)
        return f"source {name!r}: {said}" if said and name else said

    def _said(self, numbers: Numbers) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.said(self.numbers)


def _plus(a: Numbers, b: Numbers) -> Numbers:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]
