from __future__ import annotations

from dataclasses import dataclass

from trainpipes.errors import TopologyError
from trainpipes.order.layout import divisors


@dataclass(frozen=True)
class Topology:
    """Worker ``worker`` of W on rank ``rank`` of R. ``members``: the group's global ranks, if not all."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1
    members: tuple[int, ...] | None = None

    def check(self, num_shards: int, sharded: bool, one_consumer: str = "") -> None:
        """Raise unless the ranks and workers divide the shards. ``one_consumer``: why there may be
        only one."""
        consumers = self.world_size * self.num_workers
        if num_shards % consumers == 0:
            return
        what = f"{self.world_size} ranks" if self.world_size > 1 else ""
        if self.num_workers > 1:
            what += (" x " if what else "") + f"{self.num_workers} DataLoader workers"
        if one_consumer:
            raise TopologyError(f"{what}: {one_consumer}")
        if not sharded:
            raise TopologyError(
                f"{what} would all read the same rows: add .sharding_filter() to the pipeline"
            )
        loader = ""
        if self.num_workers > 1 and num_shards % self.world_size == 0:
            loader = ", or use trainpipes.Loader, which takes any number of workers"
        raise TopologyError(
            f"ranks x workers must divide num_shards = {num_shards}, got {what}; "
            f"{divisors(num_shards)} do{loader}"
        )

    def first(self, m: int) -> int:
        return m + (self.rank - m) % self.world_size

    def next_slot(self, m: int, origin: int) -> int:
        """The first batch of this consumer at or after ``m``; workers take turns from ``origin`` on."""
        stride = self.world_size * self.num_workers
        first = self.first(origin) + self.world_size * self.worker
        return max(m, origin) + (first - max(m, origin)) % stride

    def shards(self, origin: int, num_shards: int) -> set[int]:
        first, stride = self.next_slot(origin, origin), self.world_size * self.num_workers
        return {m % num_shards for m in range(first, first + num_shards, stride)}
