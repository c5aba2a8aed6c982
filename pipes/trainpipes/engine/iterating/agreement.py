"""How ranks agree where an epoch ends: on the first batch that any of them lacks."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from trainpipes.engine.topology import Topology
from trainpipes.errors import TopologyError

#: The least of one integer of each rank.
Agreement = Callable[[int], int]

#: How long to wait for a rank whose batches take long.
TIMEOUT = timedelta(minutes=30)

#: By the default group and the members.
_groups: dict[tuple[Any, tuple[int, ...]], dist.ProcessGroupGloo] = {}
# Their threads must end before the interpreter does: later the process may be aborted.
atexit.register(_groups.clear)


def agreement_over(topology: Topology) -> Agreement:
    """An all-reduce of the minimum over the data-parallel ranks, in a gloo group of their own.

    Raises:
        TopologyError: ``torch.distributed`` is not initialized, or has other ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise TopologyError(
            "row counts of this pipeline are not known in advance, so that its ranks must agree where an "
            "epoch ends, and torch.distributed is not initialized: call init_process_group() first, or "
            "add .repeat() and count steps"
        )
    members = topology.members or tuple(range(dist.get_world_size()))
    if len(members) != topology.world_size:
        raise TopologyError(
            f"the pipeline is one of {topology.world_size} ranks, and torch.distributed has "
            f"{len(members)}, so that it is not known which ranks must agree where an epoch ends: give "
            "pipe.distributed(mesh=...) the data-parallel dimension of a DeviceMesh"
        )
    world = dist.group.WORLD
    if (world, members) not in _groups:
        for known in [known for known in _groups if known[0] is not world]:
            del _groups[known]  # of an earlier world
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
    """A gloo group that only its members have to make:
    ``dist.new_group(use_local_synchronization=True)`` hangs where members are in different numbers
    of groups."""
    name = "trainpipes/agreement/" + "-".join(map(str, members))
    rank = members.index(dist.get_rank())
    return dist.ProcessGroupGloo(
        PrefixStore(name, _get_default_store()), rank, len(members), TIMEOUT
    )
