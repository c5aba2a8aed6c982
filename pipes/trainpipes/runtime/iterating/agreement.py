"""How ranks end an epoch at the same step, where shards end at steps that nobody knows beforehand.

Each rank looks a few steps ahead; then all agree, by one all-reduce of a single number, on the first
micro-batch that is missing on any of them. What lies before it is delivered, in whole steps; there
the epoch ends for all. Without that, a rank that has ended leaves the others waiting in their
next collective.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from trainpipes.errors import TopologyError
from trainpipes.runtime.iterating.delayed import Delayed, InOrder
from trainpipes.topology import Topology

__all__ = ["Agreement", "InStep", "agreement_over"]

#: Steps between two agreements.
AHEAD = 16
_NONE_MISSING = (1 << 62) - 1

#: The least of one integer of each rank.
Agreement = Callable[[int], int]

#: For a rank that comes late to an agreement, because its batches take long.
TIMEOUT = timedelta(minutes=30)

#: By the default group and the members.
_groups: dict[tuple[Any, tuple[int, ...]], dist.ProcessGroupGloo] = {}
# Their threads end while the interpreter is whole: later, the process may be aborted.
atexit.register(_groups.clear)


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


class InStep(Delayed):
    """What a rank's consumer gives, up to where all ranks end together.

    Args:
        source: this rank's consumer; it stops before its first missing micro-batch.
        agree: gives the least of all ranks' numbers.
        origin: the micro-batch from which steps are counted.
        world_size: ranks.
    """

    def __init__(self, source: InOrder, agree: Agreement, origin: int, world_size: int) -> None:
        super().__init__(source)
        self._agree = agree
        self._origin = origin
        self._world = world_size
        self._final = False

    def __next__(self) -> Any:
        if not self._taken and not self._final:
            self._look_ahead()
        if not self._taken:
            raise StopIteration
        return self._give()

    def _look_ahead(self) -> None:
        missing = _NONE_MISSING
        for _ in range(AHEAD):
            try:
                self._taken.append(self._fetch())
            except StopIteration:
                missing = self._source.upcoming
                break
        first = self._agree(missing)
        if first == _NONE_MISSING:
            return
        self._final = True
        end = self._origin + (first - self._origin) // self._world * self._world
        while self._taken and self._taken[-1][1] > end:
            self._taken.pop()

    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """The state after the last item given: of the next pass's start after the last one, unless there is
        ``extra`` to say."""
        if extra is None and self._final and not self._taken:
            return self._source.next_pass_state()
        return self._source.render(self._m, self.texts(), extra)
