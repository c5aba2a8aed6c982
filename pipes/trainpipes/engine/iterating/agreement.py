"""What the data-parallel ranks agree on: where an epoch ends, and which files it has."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from trainpipes.errors import MissingFilesError, TopologyError
from trainpipes.order.layout import Topology

#: Of an integer of each rank the least, or with True the sum.
Agreement = Callable[[int, bool], int]

#: How long to wait for a rank whose batches take long.
TIMEOUT = timedelta(minutes=30)

#: By the default group and the members.
_groups: dict[tuple[Any, tuple[int, ...]], dist.ProcessGroupGloo] = {}
# Their threads must end before the interpreter does: later the process may be aborted.
atexit.register(_groups.clear)


def agreement_over(topology: Topology) -> Agreement:
    """An all-reduce of the minimum, or the sum, over the data-parallel ranks, in a gloo group of their own.
    One rank agrees with itself.

    Raises:
        TopologyError: ``torch.distributed`` is not initialized, or has other ranks.
    """
    if topology.world_size == 1:
        return lambda number, _: number
    group = _group_over(
        topology,
        "row counts of this pipeline are not known in advance",
        "where an epoch ends",
        "add .repeat() and count steps",
    )

    def agreed(number: int, total: bool) -> int:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if total else dist.ReduceOp.MIN  # type: ignore[assignment]
        shared = torch.tensor([number], dtype=torch.int64)
        group.allreduce([shared], options).wait()  # type: ignore[attr-defined]
        return int(shared.item())

    return agreed


def from_first_rank(
    topology: Topology, make: Callable[[], str], why: str, subject: str, or_else: str
) -> str:
    """A text that rank 0 makes, on all data-parallel ranks; if it fails there, it fails on all.

    Raises:
        TopologyError: as ``agreement_over`` does, or the ranks are not all of ``torch.distributed``.
    """
    text, failed = "", None
    if topology.rank == 0:
        try:
            text = f"+{make()}"
        except Exception as error:
            text, failed = f"-{type(error).__name__}: {error}", error
    group = _group_over(topology, why, subject, or_else)
    if topology.members and len(topology.members) != dist.get_world_size():
        raise TopologyError(
            f"{why}, which all processes must agree on, and the mesh has {len(topology.members)} of "
            f"{dist.get_world_size()} of them: make a pipeline of the files of each epoch, list_files(names)"
        )
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    size = torch.tensor([len(data)], dtype=torch.int64)
    group.broadcast([size], dist.BroadcastOptions()).wait()  # type: ignore[attr-defined]
    if topology.rank:
        data = torch.empty(int(size.item()), dtype=torch.uint8)
    group.broadcast([data], dist.BroadcastOptions()).wait()  # type: ignore[attr-defined]
    if failed is not None:
        raise failed
    said = data.numpy().tobytes().decode()
    if said[0] == "-":
        raise MissingFilesError(f"rank 0 could not list the files of this epoch: {said[1:]}")
    return said[1:]


def members_of(topology: Topology, why: str, subject: str, or_else: str) -> tuple[int, ...]:
    """The data-parallel ranks among those of ``torch.distributed``; raises TopologyError if unknown."""
    if not (dist.is_available() and dist.is_initialized()):
        raise TopologyError(
            f"{why}, so that its ranks must agree {subject}, and torch.distributed is not initialized: call "
            f"init_process_group() first, or {or_else}"
        )
    members = topology.members or tuple(range(dist.get_world_size()))
    if len(members) != topology.world_size:
        raise TopologyError(
            f"the pipeline is one of {topology.world_size} ranks, and torch.distributed has "
            f"{len(members)}, so that it is not known which ranks must agree {subject}: give "
            "pipe.distributed(mesh=...) the data-parallel dimension of a DeviceMesh"
        )
    return members


def _group_over(topology: Topology, why: str, subject: str, or_else: str) -> dist.ProcessGroupGloo:
    members = members_of(topology, why, subject, or_else)
    world = dist.group.WORLD
    if (world, members) not in _groups:
        for known in [known for known in _groups if known[0] is not world]:
            del _groups[known]  # of an earlier world
        _groups[world, members] = _group(members)
    return _groups[world, members]


def _group(members: tuple[int, ...]) -> dist.ProcessGroupGloo:
    """A gloo group that only its members make, since ``new_group(use_local_synchronization=True)`` hangs
    where members are in different numbers of groups.
    """
    name = "trainpipes/agreement/" + "-".join(map(str, members))
    store, rank = PrefixStore(name, _get_default_store()), members.index(dist.get_rank())
    return dist.ProcessGroupGloo(store, rank, len(members), TIMEOUT)
