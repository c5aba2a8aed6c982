"""Threads that call a function for rows, for ``map(method="thread")``. Any thread may submit rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

from trainpipes.runtime.calling.row_call import Answer, RowCall, Words
from trainpipes.runtime.pool import Pool, Ticket

__all__ = ["ThreadMap"]


class ThreadMap:
    """Threads that call one function. They are started when there are rows.

    Args:
        call: the function.
        workers: how many threads.

    Attributes:
        pid: the process that the threads belong to.
    """

    def __init__(self, call: RowCall, workers: int) -> None:
        self.pid = os.getpid()
        self._call = call
        self._pool = Pool(workers, shares=False, within=True)

    def submit(self, items: Sequence[Any], words: Words | None) -> Callable[[], Answer]:
        """Have the function called for some rows. Returns a function that waits for the answer; who drops it
        no longer wants the answer."""
        waiting = _Waiting(self._pool)
        waiting.ticket = self._pool.submit(partial(_call, ref(waiting), self._call, items, words))
        return waiting

    def close(self) -> None:
        """Have the threads end."""
        self._pool.close()


class _Waiting:
    """Waits for the answer to some rows."""

    ticket: Ticket

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __call__(self) -> Answer:
        answer: Answer = self._pool.result(self.ticket)
        return answer


def _call(
    waiting: ref[_Waiting], call: RowCall, items: Sequence[Any], words: Words | None
) -> Answer:
    """Call the function, if anybody still waits for the answer."""
    return ([], None) if waiting() is None else call.each(items, words)
