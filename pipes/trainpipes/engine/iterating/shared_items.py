"""Where consumers share shards, or count the items of all: each passes over the batches of the others."""

from __future__ import annotations

from typing import Any

from trainpipes.engine.shards.lane import ENDED
from trainpipes.engine.shards.shard_items import ShardItems


class SharedItems:
    """The items of a consumer that passes over the batches of others: where ranks and workers do not
    divide the shards, or items of all shards are counted. A state has each shard's position after the
    same step on all of them.

    Args:
        first: the first batch of its shards, its own or not.
        step: the distance of batches of these shards.
        ended: shards that have no more batches.
        moved: gets the shards whose position has moved.
        count: batches before ``first`` that there were.
    """

    def __init__(
        self,
        items: ShardItems,
        first: int,
        step: int,
        num_shards: int,
        ended: set[int],
        moved: set[int],
        count: int = 0,
    ) -> None:
        self._items = items
        #: Batches that there were up to where it stands, ``at``.
        self.count = count
        self.at, self._step = first, step
        self._num_shards = num_shards
        self._ended, self._moved = ended, moved
        self.begin, self.cursor_text, self.close = items.begin, items.cursor_text, items.close

    def take(self, m: int) -> Any:
        self.pass_to(m)
        return self._next(m, own=True)

    def pass_to(self, m: int) -> None:
        """Pass over the batches before ``m``, which are of other consumers."""
        for other in range(self.at, m, self._step):
            self._next(other, own=False)

    def pass_over(self, m: int) -> Any:
        self.pass_to(m)
        return self._next(m, own=False)

    def pass_items(self, count: int) -> None:
        """Pass over so many items of all shards, or to the end of those."""
        while self.count < count and len(self._ended) < self._num_shards:
            self._next(self.at, own=False)

    def _next(self, m: int, own: bool) -> Any:
        shard, item = m % self._num_shards, ENDED
        if shard not in self._ended:
            self._moved.add(shard)
            item = self._items.take(m) if own else self._items.pass_over(m)
            if item is ENDED:
                self._ended.add(shard)
            else:
                self.count += 1
        self.at = m + self._step
        return item
