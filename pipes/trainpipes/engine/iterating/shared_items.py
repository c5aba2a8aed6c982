"""Where ranks and workers do not divide the shards: consumers share some, and each passes over the batches of
the others. A state has each shard's position after the same step on all of them.
"""

from __future__ import annotations

from typing import Any

from trainpipes.engine.iterating.worker_receiver import WorkerReceiver
from trainpipes.engine.shards.lane import ENDED
from trainpipes.engine.shards.shard_items import ShardItems


class SharedItems:
    """The items of one consumer where ranks and workers do not divide the shards: it passes over the
    batches of others. A state has each shard's position after the same step on all of them.

    Args:
        first: the first batch of its shards, its own or not.
        step: from one batch of these shards to the next.
        ended: shards that have no more batches.
        moved: gets the shards whose position has moved.
    """

    def __init__(
        self,
        items: ShardItems | WorkerReceiver,
        first: int,
        step: int,
        num_shards: int,
        ended: set[int],
        moved: set[int],
    ) -> None:
        self._items = items
        self._at, self._step = first, step
        self._num_shards = num_shards
        self._ended, self._moved = ended, moved
        self.begin, self.cursor_text, self.close = items.begin, items.cursor_text, items.close

    def take(self, m: int) -> Any:
        self.pass_to(m)
        return self._next(m, own=True)

    def pass_to(self, m: int) -> None:
        """Pass over the batches before ``m``, which are of other consumers."""
        for other in range(self._at, m, self._step):
            self._next(other, own=False)

    def _next(self, m: int, own: bool) -> Any:
        shard, item = m % self._num_shards, ENDED
        if shard not in self._ended:
            self._moved.add(shard)
            item = self._items.take(m) if own else self._items.pass_over(m)
            if item is ENDED:
                self._ended.add(shard)
        self._at = m + self._step
        return item
