"""A set of objects that are still there, in which no code of Python runs when one goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic, TypeVar
from weakref import ref

T = TypeVar("T")


class Living(Generic[T]):
    """A set of objects that lets go of those that nobody else holds. In a ``WeakSet``, Ctrl-C during the
    callback for an object that goes would be lost.
    """

    def __init__(self) -> None:
        self._refs: deque[ref[T]] = deque()

    def add(self, one: T) -> None:
        for _ in range(2):  # more than come
            with suppress(IndexError, ValueError):  # another thread was there
                if (first := self._refs[0])() is None:
                    self._refs.remove(first)
                else:
                    self._refs.rotate(-1)
        self._refs.append(ref(one))

    def clear(self) -> None:
        self._refs.clear()

    def __iter__(self) -> Iterator[T]:
        for one in list(self._refs):
            if (found := one()) is not None:
                yield found
