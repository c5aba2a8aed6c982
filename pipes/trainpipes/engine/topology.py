from __future__ import annotations

import os
from dataclasses import dataclass

from trainpipes.engine.layout import divisors
from trainpipes.errors import TopologyError


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


def data_parallel() -> tuple[int, int]:
    """Rank and world size: of ``torch.distributed``, else ``RANK`` and ``WORLD_SIZE``, else 0 of 1."""
    import torch.distributed as dist

    set_rank, set_world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if dist.is_available() and dist.is_initialized():
        real = dist.get_rank(), dist.get_world_size()
        given = set_rank, set_world
        if None not in given and given != tuple(map(str, real)):
            raise TopologyError(
                f"torch.distributed says rank {real[0]} of {real[1]}, and the environment RANK={set_rank}, "
                f"WORLD_SIZE={set_world}: start all processes by one launcher, or give the right "
                "ones with pipe.distributed(rank=..., world_size=...)"
            )
        return real
    if (set_rank or "0", set_world or "1") == ("0", "1"):
        return 0, 1
    try:
        rank, world = int(set_rank or ""), int(set_world or "")
    except ValueError:
        rank, world = -1, 0
    if not 0 <= rank < world:
        raise TopologyError(
            "RANK and WORLD_SIZE of the environment must be integers with 0 <= RANK < WORLD_SIZE, "
            f"got RANK={set_rank!r}, WORLD_SIZE={set_world!r}: set both, or neither, or give "
            "pipe.distributed(rank=..., world_size=...)"
        )
    return rank, world
