"""How ranks end an epoch at the same step, where shards end at steps that nobody knows in advance.

Each rank looks some steps ahead: two at first, then more and more up to 16. Before what was agreed on is used
up, all agree, by one all-reduce of a single number, on the first batch that is missing on any of them.
What lies before it is delivered, in whole steps; there the epoch ends for all. Without that, a rank that has
ended leaves the others waiting in their next collective.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.utils.data import get_worker_info

from trainpipes.engine.iterating.consumer_iterator import ConsumerIterator
from trainpipes.engine.iterating.prefetcher import Prefetcher
from trainpipes.engine.topology import Topology
from trainpipes.errors import TopologyError

#: Items that are held at most; until there are so many, one more is taken than given.
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
            "row counts of this pipeline are not known in advance, so that its ranks must agree where an "
            "epoch ends, and torch.distributed is not initialised: call init_process_group() first, or "
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


class EpochEndSync(Prefetcher):
    """A rank's items, up to where all ranks end together.

    An error, too, is told to nobody before the ranks have agreed, and is raised when its item is due; then
    again whenever an item is asked for, since the other ranks have gone on.

    Args:
        source: this rank's; it stops before its first missing batch.
        topology: this rank.
        origin: the batch from which steps are counted.
    """

    def __init__(self, source: ConsumerIterator, topology: Topology, origin: int) -> None:
        super().__init__(source)
        if topology.num_workers > 1 or get_worker_info() is not None:
            raise TopologyError(
                "row counts of this pipeline are not known in advance, so that several ranks would end an "
                f"epoch at different steps and hang, got {topology.world_size} ranks with DataLoader "
                "workers, which cannot agree: add .repeat() and count steps, or use trainpipes.Loader"
            )
        self._topology = topology
        self._origin = origin
        #: How many items a rank holds that has not failed, and on how many of them all ranks agreed: the same
        #: on all ranks. After each item there is one at least, so that one rank alone may ask whether that
        #: was the last.
        self._held = self._agreed = 0
        self._ends = False
        self._raised: Exception | None = None

    def __next__(self) -> Any:
        self._look_ahead()
        if self._raised is None:
            try:
                item = self._give()
                self._held, self._agreed = self._held - 1, self._agreed - 1
                return item
            except Exception as error:
                self._raised = error
        raise self._raised

    def is_last(self, alone: bool) -> bool:
        """Whether the item given last is the last of the pass. No other rank has to ask."""
        return self._last is not None and self._last.over

    def _look_ahead(self) -> None:
        """Have taken what comes next, and agree on it where that is due: for all before the same item."""
        if self._raised or self._ends:
            return
        held = min(self._held + 2, AHEAD)
        is_due = self._agreed <= held // 2
        agree = agreement_over(self._topology) if is_due else None
        while len(self._taken) < held and self._error is None:
            self._take()
        self._held = held
        if agree is None:
            return
        ended = isinstance(self._error, StopIteration)
        first = agree(self._taken[-1][2].upcoming if ended else _NONE_MISSING)
        self._agreed = held
        if first != _NONE_MISSING:
            self._ends = True
            world = self._topology.world_size
            self._end_at(self._origin + (first - self._origin) // world * world)

    def _end_at(self, end: int) -> None:
        """Drop what was taken from batch ``end`` on: the pass is over after what is left."""
        while self._taken:
            give, error, state = self._taken[-1]
            if error is not None and state.upcoming < end:
                return
            if error is None and state.m <= end:
                self._taken[-1] = give, None, state._replace(over=True)
                return
            self._taken.pop()
        self._last = self.state()._replace(over=True)
