"""Counts what is decompressed in vain, for ``explain()``; any thread may add to it."""

from __future__ import annotations

import threading
from typing import Any


class ReadAgain:
    """Bytes that the readers of a process decompressed only to reach later ones. Pickled, it is at 0."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return ReadAgain, ()

    def add(self, count: int) -> None:
        with self._lock:
            self.bytes += count
