"""Workers that start late: ``worker_init_fn``s that a spawned process can import."""

from __future__ import annotations

import time
from multiprocessing import get_context


class SlowToStart:
    """Lets one worker of the first pass start only when the second pass has begun."""

    def __init__(self) -> None:
        self._passes = get_context("fork").Value("i", 0)

    def __call__(self, worker: int) -> None:
        if worker == 0:
            with self._passes.get_lock():
                self._passes.value += 1
            if self._passes.value == 2:
                time.sleep(0.5)  # the other worker of this pass comes first
        elif self._passes.value < 2:
            deadline = time.monotonic() + 1
            while self._passes.value < 2 and time.monotonic() < deadline:
                time.sleep(0.01)


def late(worker: int) -> None:
    if worker == 1:
        time.sleep(1)
