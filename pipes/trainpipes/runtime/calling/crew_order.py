"""Rows on their way to a worker process, and what came of them."""

from __future__ import annotations

import threading
from typing import Any
from weakref import ref

from trainpipes.runtime.calling.passage import Parts, unpacked

__all__ = ["Answer", "Order", "Task"]

#: What the function returned for rows, up to the first for which it raised, and what it raised there.
Answer = tuple[list[Any], BaseException | None]


class Order:
    """Rows given to a crew, and what came of them. Who lets go of it does not want them any more.

    Args:
        number: of the order, from 1.
    """

    __slots__ = ("__weakref__", "_answer", "_done", "_parts", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._done = threading.Event()
        self._parts: Parts | None = None
        self._answer: Answer | None = None

    def arrived(self, parts: Parts) -> None:
        """An answer is there, to be unpacked by whoever waits for it."""
        self._parts = parts
        self._done.set()

    def failed(self, row: int, error: BaseException) -> None:
        """It came to nothing from a row on."""
        self._answer = [None] * row, error
        self._done.set()

    def result(self) -> Answer:
        """What came of the rows, once it is there."""
        self._done.wait()
        if self._answer is None:
            assert self._parts is not None
            self._answer, self._parts = unpacked(self._parts), None
        return self._answer


class Task:
    """An order on its way.

    Args:
        order: the order.
        parts: its rows, packed.
    """

    def __init__(self, order: Order, parts: Parts) -> None:
        self._order = ref(order)
        self.number = order.number
        self.parts = parts

    @property
    def wanted(self) -> bool:
        """Whether anybody waits for it."""
        return self._order() is not None

    def arrived(self, parts: Parts) -> None:
        """Give an answer to whoever waits."""
        order = self._order()
        if order is not None:
            order.arrived(parts)

    def failed(self, row: int, error: BaseException) -> None:
        """Tell whoever waits that it came to nothing from a row on."""
        order = self._order()
        if order is not None:
            order.failed(row, error)
