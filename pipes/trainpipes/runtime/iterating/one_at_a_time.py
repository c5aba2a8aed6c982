"""An iterator is one thread's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["OneAtATime"]


class OneAtATime:
    """Held while an iterator makes an item. Of threads that ask at the same time the second one is refused,
    as a generator does: items would be repeated and lost.

    An iterator calls ``take``, and where that gives False ``wait``; then ``done``.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        self.take = lock.acquire
        self.done = lock.release
        self._looks = False

    def wait(self) -> None:
        """Wait for a state that is being taken.

        Raises:
            RuntimeError: it is an item that is being made.
        """
        if not self._looks:
            raise RuntimeError(
                "iterator already executing: another thread, or a function of the pipeline's own, is "
                "taking an item from it; let one thread take the items of an iterator and hand them on"
            )
        self.take()

    @contextmanager
    def between_items(self) -> Iterator[None]:
        """While the state is taken, which is that of no item where one is being made."""
        self._looks = True
        try:
            if not self.take(False):
                raise RuntimeError(
                    "state_dict() while another thread, or a function of the pipeline's own, takes an item: "
                    "iterator already executing; take states in the thread that iterates"
                )
            try:
                yield
            finally:
                self.done()
        finally:
            self._looks = False
