"""How ranks end an epoch at the same step, where shards end at steps that nobody knows beforehand.

Each rank looks a few steps ahead; then all agree, by one all-reduce of a single number, on the first
micro-batch that is missing on any of them. What lies before it is delivered, in whole steps; there
the epoch ends for all. Without that, a rank that has ended leaves the others waiting in their
next collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from trainpipes.errors import TopologyError
from trainpipes.topology import Topology

__all__ = ["Agreement", "InOrder", "InStep", "agreement_over"]

#: Steps between two agreements.
AHEAD = 16
_NONE_MISSING = (1 << 62) - 1

#: The least of one integer of each rank.
Agreement = Callable[[int], int]

#: For a rank that comes late to an agreement, because its batches take long.
TIMEOUT = timedelta(minutes=30)

#: By the default group and the members.
_groups: dict[tuple[Any, tuple[int, ...]], dist.ProcessGroupGloo] = {}


def agreement_over(topology: Topology) -> Agreement:
    """Agreement of the data-parallel ranks, over a gloo group of their own.

    Raises:
        TopologyError: ``torch.distributed`` is not initialised, or has other ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise TopologyError(
            "row counts of this pipeline are not known beforehand, so that its ranks must agree where an "
            "epoch ends, and torch.distributed is not initialised: call init_process_group() first, or "
            "add .repeat() and count steps"
        )
    members = topology.members or tuple(range(dist.get_world_size()))
    if len(members) != topology.world_size:
        raise TopologyError(
            f"the pipeline is one of {topology.world_size} ranks, and torch.distributed has "
            f"{len(members)}, so that it is not known who must agree where an epoch ends: give "
            "pipe.distributed(mesh=...) the data-parallel dimension of a DeviceMesh"
        )
    world = dist.group.WORLD
    if (world, members) not in _groups:
        for known in [known for known in _groups if known[0] is not world]:
            del _groups[known]  # of a world that is no more
        _groups[world, members] = _group(members)
    group = _groups[world, members]
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]

    def least(number: int) -> int:
        shared = torch.tensor([number], dtype=torch.int64)
        group.allreduce([shared], options).wait()  # type: ignore[attr-defined]
        return int(shared.item())

    return least


def _group(members: tuple[int, ...]) -> dist.ProcessGroupGloo:
    """A gloo group that only its members have to make.

    Not by ``dist.new_group(use_local_synchronization=True)``: that names the group after the number
    of groups that a process is in, and hangs where members are in different numbers of them.
    """
    name = "trainpipes/agreement/" + "-".join(map(str, members))
    rank = members.index(dist.get_rank())
    return dist.ProcessGroupGloo(
        PrefixStore(name, _get_default_store()), rank, len(members), TIMEOUT
    )


class InOrder(Protocol):
    """What gives one rank's batches in order, and knows the state after each: see ``Consumer``."""

    @property
    def epoch(self) -> int: ...
    @property
    def m(self) -> int: ...
    @property
    def upcoming(self) -> int: ...
    def __next__(self) -> Any: ...
    def texts(self) -> dict[int, str]: ...
    def moved(self) -> dict[int, str]: ...
    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]: ...
    def next_pass_state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]: ...
    def close(self) -> None: ...
    def render(
        self, m: int, texts: dict[int, str], extra: dict[str, Any] | None
    ) -> dict[str, Any]: ...


class InStep:
    """What a rank's consumer gives, up to where all ranks end together.

    Args:
        consumer: this rank's; it stops before its first missing micro-batch.
        agree: gives the least of all ranks' numbers.
        origin: the micro-batch from which steps are counted.
        world_size: ranks.
    """

    def __init__(self, consumer: InOrder, agree: Agreement, origin: int, world_size: int) -> None:
        self._consumer = consumer
        self._agree = agree
        self._origin = origin
        self._world = world_size
        self._ready: deque[tuple[Any, int, dict[int, str]]] = deque()
        self._texts = consumer.texts()
        self._m = consumer.m
        self._moved: dict[int, str] = {}
        self._final = False

    @property
    def epoch(self) -> int:
        return self._consumer.epoch

    def __next__(self) -> Any:
        if not self._ready and not self._final:
            self._look_ahead()
        if not self._ready:
            raise StopIteration
        item, self._m, self._moved = self._ready.popleft()
        self._texts.update(self._moved)
        return item

    @property
    def m(self) -> int:
        return self._m

    @property
    def upcoming(self) -> int:
        return self._consumer.upcoming

    def texts(self) -> dict[int, str]:
        return dict(self._texts)

    def moved(self) -> dict[int, str]:
        return self._moved

    def render(self, m: int, texts: dict[int, str], extra: dict[str, Any] | None) -> dict[str, Any]:
        return self._consumer.render(m, texts, extra)

    def next_pass_state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._consumer.next_pass_state(extra)

    def _look_ahead(self) -> None:
        missing = _NONE_MISSING
        for _ in range(AHEAD):
            try:
                item = next(self._consumer)
            except StopIteration:
                missing = self._consumer.upcoming
                break
            self._ready.append((item, self._consumer.m, self._consumer.moved()))
        first = self._agree(missing)
        if first == _NONE_MISSING:
            return
        self._final = True
        end = self._origin + (first - self._origin) // self._world * self._world
        while self._ready and self._ready[-1][1] > end:
            self._ready.pop()

    def close(self) -> None:
        """Let go of what the consumer holds."""
        self._consumer.close()

    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """The state after the last item given: of the next pass's start after the last one."""
        if self._final and not self._ready:
            return self._consumer.next_pass_state()
        return self._consumer.render(self._m, self._texts, extra)
