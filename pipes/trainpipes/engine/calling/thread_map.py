"""Threads that call a function for rows, for ``map(method="thread")``. Any thread may submit rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

from trainpipes.engine.calling.row_call import Answer, RowCall, Words
from trainpipes.engine.pool import Pool


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
        pool = self._pool

        def wait() -> Answer:
            answer: Answer = pool.result(ticket)
            return answer

        ticket = pool.submit(partial(_call, ref(wait), self._call, items, words))
        return wait

    def close(self) -> None:
        """Have the threads end."""
        self._pool.close()


def _call(
    wait: ref[Callable[[], Answer]], call: RowCall, items: Sequence[Any], words: Words | None
) -> Answer:
    """Call the function, if anybody still waits for the answer."""
    return ([], None) if wait() is None else call.each(items, words)
