from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from trainpipes._internal.messages import warn_once
from trainpipes.errors import TopologyError


@dataclass(frozen=True)
class Topology:
    """Worker ``worker`` of W on rank ``rank`` of R.

    Args:
        members: the group's global ranks, if not all.
        reads_all: whether each consumer goes through the batches of all shards, to count them.
    """

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1
    members: tuple[int, ...] | None = None
    reads_all: bool = False

    def check(self, num_shards: int, sharded: bool, one_consumer: str = "") -> None:
        """Raise where the ranks and workers can't share the shards, and warn once where they share some.
        ``one_consumer``: why there may be only one."""
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
        if self.rank or self.worker:
            return
        reads, least = num_shards // gcd(consumers, num_shards), -(-num_shards // consumers)
        cost = f"each reads {reads} shards where {least} would do"
        if reads == least:
            cost = f"each shard is read {consumers // gcd(consumers, num_shards)} times"
        would = [n for n in (num_shards // consumers * consumers, least * consumers) if n]
        way = f"num_shards={' or '.join(map(str, would))} would"
        if self.num_workers > 1 and num_shards % self.world_size == 0:
            way += ", and trainpipes.Loader takes any number of workers"
        warn_once(f"{what} do not divide num_shards={num_shards}: {cost}; {way}")

    def first(self, m: int) -> int:
        return m + (self.rank - m) % self.world_size

    def next_slot(self, m: int, origin: int) -> int:
        """The first batch of this consumer at or after ``m``; workers take turns from ``origin`` on."""
        stride = self.world_size * self.num_workers
        first = self.first(origin) + self.world_size * self.worker
        return max(m, origin) + (first - max(m, origin)) % stride

    def step(self, num_shards: int) -> int:
        """From one batch of the shards that this consumer reads to the next, which may be another
        consumer's.
        """
        return 1 if self.reads_all else gcd(self.world_size * self.num_workers, num_shards)

    def shards(self, origin: int, num_shards: int) -> set[int]:
        """Those that it reads."""
        return set(range(num_shards)) if self.reads_all else self.own_shards(origin, num_shards)

    def own_shards(self, origin: int, num_shards: int) -> set[int]:
        """Those that give it batches."""
        step = gcd(self.world_size * self.num_workers, num_shards)
        return set(range(self.next_slot(origin, origin) % step, num_shards, step))
