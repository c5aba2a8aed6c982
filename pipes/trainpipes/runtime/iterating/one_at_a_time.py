"""An iterator is one thread's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["OneAtATime"]


class OneAtATime:
    """Held while an iterator makes an item. Of threads that ask at the same time the second one is refused,
    as a generator does: items would be repeated and lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executing = False

    def __enter__(self) -> None:
        with self._lock:
            if self._executing:
                raise RuntimeError(
                    "iterator already executing: another thread, or a function of the pipeline's own, is "
                    "taking an item from it; one thread takes the items of an iterator and hands them on"
                )
            self._executing = True

    def __exit__(self, *error: object) -> None:
        self._executing = False

    @contextmanager
    def between_items(self) -> Iterator[None]:
        """While the state is taken, which is that of no item where one is being made."""
        with self._lock:
            if self._executing:
                raise RuntimeError(
                    "state_dict() while another thread, or a function of the pipeline's own, takes an item: "
                    "iterator already executing; take states in the thread that iterates"
                )
            yield
