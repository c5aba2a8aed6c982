"""What a pass leaves to the next one: its threads, and the windows that they read ahead."""

from __future__ import annotations

from weakref import finalize

from trainpipes.runtime.reading.windows import ListedWindows
from trainpipes.runtime.shards.pool import Pool

__all__ = ["Kept"]


class Kept:
    """Threads and windows between two passes. When nobody keeps it, the threads go.

    Args:
        number: of the pass that it is for.
        pool: the threads.
        windows: which the pass before has let go of.
    """

    def __init__(self, number: int, pool: Pool, windows: ListedWindows) -> None:
        self.number = number
        self.pool = pool
        self.windows = windows
        self._closes = finalize(self, pool.close)

    def take(self) -> tuple[Pool, ListedWindows]:
        """Both, for a pass that will see to their end."""
        self._closes.detach()
        return self.pool, self.windows

    def close(self) -> None:
        """Let go of both."""
        self._closes()
        self.windows.close()
