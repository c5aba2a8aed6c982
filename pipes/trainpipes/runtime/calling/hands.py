"""Who calls a function for the rows of a run, several at a time: threads of this process, or others."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol
from weakref import ref

from trainpipes.runtime.calling.crew import Crew
from trainpipes.runtime.calling.crew_order import Answer
from trainpipes.runtime.calling.row_call import RowCall
from trainpipes.runtime.calling.row_random import Words
from trainpipes.runtime.pool import Pool, Ticket

__all__ = ["Hands", "Kind", "Threads", "hands_for", "spread"]

Kind = Literal["thread", "process"]

#: Rows of an order, at most, and orders of each worker in a run, about.
ORDER_ROWS, ORDERS = 64, 2


class Asked(Protocol):
    """Rows that were handed over."""

    def result(self) -> Answer:
        """What came of them, once it is there."""
        ...


class Hands(Protocol):
    """Workers that call one function."""

    process: int

    def start(self) -> None:
        """Get ready."""
        ...

    def submit(self, items: Sequence[Any], words: Words | None) -> Asked:
        """Have the function called for some items. Who lets go of what is returned does not want them."""
        ...

    def close(self) -> None:
        """Let the workers go."""
        ...


def hands_for(call: RowCall, workers: int, kind: Kind, method: str | None) -> Hands:
    """Workers, none of which is started yet."""
    return Crew(call, workers, method) if kind == "process" else Threads(call, workers)


def spread(
    hands: Hands, workers: int, items: Sequence[Any], words: Words | None
) -> Callable[[], Answer]:
    """Hand items over, and what waits for what comes of them: in order, up to the first that raised."""
    rows = min(ORDER_ROWS, max(1, -(-len(items) // (ORDERS * workers))))
    asked = [
        hands.submit(items[n : n + rows], None if words is None else words[n : n + rows])
        for n in range(0, len(items), rows)
    ]
    return partial(_collected, asked)


def _collected(asked: list[Asked]) -> Answer:
    results: list[Any] = []
    for part in asked:
        found, error = part.result()
        results += found
        if error is not None:
            return results, error
    return results, None


class Threads:
    """Threads of this process.

    Args:
        call: the function.
        workers: how many.
    """

    def __init__(self, call: RowCall, workers: int) -> None:
        self.process = os.getpid()
        self._call = call
        self._pool = Pool(workers, shares=False, within=True)

    def start(self) -> None:
        """They are started when there is something to do."""

    def submit(self, items: Sequence[Any], words: Words | None) -> _Given:
        given = _Given(self._pool)
        given.ticket = self._pool.submit(partial(_work, ref(given), self._call, items, words))
        return given

    def close(self) -> None:
        self._pool.close()


class _Given:
    """Rows given to a thread."""

    ticket: Ticket

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def result(self) -> Answer:
        answer: Answer = self._pool.result(self.ticket)
        return answer


def _work(given: ref[_Given], call: RowCall, items: Sequence[Any], words: Words | None) -> Answer:
    """Call the function, if anybody still waits for it."""
    return ([], None) if given() is None else call.each(items, words)
