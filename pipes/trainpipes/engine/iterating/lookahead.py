"""Items taken before they are asked for: to copy them to a device, to know the last one, and to
agree with other ranks on the end.

Where shards end at unknown steps, each rank looks 2 to 16 steps ahead, and all agree, by one
all-reduce of a number, on the first batch that any of them lacks. There the epoch ends for all:
otherwise a rank that has ended would leave the others waiting in their next collective.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.utils.data import get_worker_info

from trainpipes.engine.iterating.epoch_end import MANY, MOST_COUNTED
from trainpipes.engine.iterating.worker_iterator import ConsumerPosition, WorkerIterator
from trainpipes.errors import MissingFilesError, TopologyError
from trainpipes.interfaces.stage_kinds import DeviceStage
from trainpipes.order.topology import Topology

#: Most items that are held for ranks to agree on; the number grows by one an item.
AHEAD = 16
_NONE_MISSING = (1 << 62) - 1


@dataclass(slots=True, eq=False)
class _Taken:
    """An item, or the error or ``StopIteration`` in its place; the state after it; what gives it."""

    item: Any
    error: Exception | None
    state: ConsumerPosition
    give: Callable[[], Any] | None = None


@dataclass(eq=False)
class Lookahead:
    """The items of one consumer; its state is that of the last one given.

    Where ranks end together, an error is raised only after they have agreed, and on every later call:
    the other ranks have gone on.

    Args:
        origin: the batch from which steps are counted.
        stages: that place items, such as on a device.
    """

    source: WorkerIterator
    topology: Topology
    origin: int
    stages: Sequence[DeviceStage] = ()

    def __post_init__(self) -> None:
        #: Items begun ahead of the one given.
        self._depth = max((stage.ahead for stage in self.stages), default=0)
        self._taken: deque[_Taken] = deque()
        #: After the last item given, with what moved since the last ``state()``.
        self._last: ConsumerPosition | None = None
        self._agrees = self.source.ends_together
        #: How many items a rank without an error holds, and on how many all ranks agreed: the same on
        #: all ranks. One is always left, so that one rank alone may call ``is_last``.
        self._held = self._agreed = 0
        self._ends = False
        self._raised: Exception | None = None
        if self._agrees and (self.topology.num_workers > 1 or get_worker_info() is not None):
            raise TopologyError(
                "row counts of this pipeline are not known in advance, so that several ranks would end an "
                f"epoch at different steps and hang, got {self.topology.world_size} ranks with DataLoader "
                "workers, which cannot agree: add .repeat() and count steps, or use trainpipes.Loader"
            )

    def __next__(self) -> Any:
        if self._last is None and not self._depth and not self._agrees:
            item = next(self.source)
            return _placed(self.stages, item) if self.stages else item
        if self._raised is not None:
            raise self._raised
        self._look_ahead()
        return self._give()

    def is_last(self, alone: bool) -> bool:
        """Whether the item given last ends the pass; asks no other rank. May take one more item."""
        if self._agrees:
            return self._last is not None and self._last.over
        if self._last is None:
            self._last = self.source.state()
        if not self._last.over and not self._taken:
            self._look_ahead()
        if self._taken and isinstance(self._taken[0].error, StopIteration):
            coming = self._taken[0]
            over = alone or coming.state.over
            coming.state = coming.state._replace(over=over)
            self._last = self._last._replace(over=over)  # before StopIteration is raised
            return True
        return self._last.over

    def _look_ahead(self) -> None:
        if self._agrees:
            self._agree()
        else:
            # The first one does not wait for all.
            self._take(min(len(self._taken) + 2, self._depth + 1))
        for coming in islice(self._taken, self._depth + 1 if self._depth else 0):
            if coming.give is None and coming.error is None:
                coming.give, coming.item = self._begun(coming.item), None

    @property
    def _error(self) -> Exception | None:
        return self._taken[-1].error if self._taken else None

    def _take(self, count: int) -> None:
        if self._last is None:
            self._last = self.source.state()
        while len(self._taken) < count and self._error is None:
            item = error = None
            try:
                item = next(self.source)
            except Exception as raised:
                error = raised
            self._taken.append(_Taken(item, error, self.source.state()))

    def _agree(self) -> None:
        """Take what comes next, and agree where that is due."""
        if self._ends:
            return
        held = max(self._depth + 1, min(self._held + 2, AHEAD))
        is_due = self._agreed <= held // 2
        agree = agreement_over(self.topology) if is_due else None
        self._take(held)
        self._held = held
        if agree is None:
            return
        ended = isinstance(self._error, StopIteration)
        first = agree(self._taken[-1].state.upcoming if ended else _NONE_MISSING, False)
        self._agreed = held
        if first != _NONE_MISSING:
            self._ends = True
            world = self.topology.world_size
            end = self.origin + (first - self.origin) // world * world
            past = sum(one.error is None and one.state.m > end for one in self._taken)
            self._end_at(end)
            self._say_what_is_left(agree, end, past, first)

    def _say_what_is_left(self, agree: Agreement, end: int, past: int, first: int) -> None:
        """All ranks count the batches that they have after the end; one says how many."""
        source, left = self.source, past
        with suppress(Exception):  # of a row that no rank gets
            left += source.rest(MOST_COUNTED)
        left = agree(left if left < MOST_COUNTED else left + MANY, True)
        source.close()
        if self.topology.rank == 0:
            source.say_end(end, left, first)

    def _end_at(self, end: int) -> None:
        while self._taken:
            last = self._taken[-1]
            if last.error is not None and last.state.upcoming < end:
                return
            if last.error is None and last.state.m <= end:
                last.state = last.state._replace(over=True)
                return
            self._taken.pop()
        self._last = self.state()._replace(over=True)

    def _give(self) -> Any:
        if not self._taken:
            raise StopIteration
        coming = self._taken[0]
        item = None
        if coming.error is None:
            item = _placed(self.stages, coming.item) if coming.give is None else coming.give()
        del self._taken[0]
        self._last = coming.state._replace(moved={**self.state().moved, **coming.state.moved})
        if coming.error is not None:
            if self._agrees:
                self._raised = coming.error
            raise coming.error
        self._held, self._agreed = self._held - 1, self._agreed - 1
        return item

    def _begun(self, item: Any) -> Callable[[], Any]:
        try:
            return _begin(self.stages, item)
        except Exception:  # raised again when the item is due
            return lambda: _placed(self.stages, item)

    def state(self) -> ConsumerPosition:
        last = self._last
        if last is None:
            return self.source.state()
        self._last = last._replace(moved={})
        return last

    def close(self) -> None:
        self.source.close()
        self._taken.clear()


def _begin(stages: Sequence[DeviceStage], item: Any) -> Callable[[], Any]:
    for number, stage in enumerate(stages):
        if stage.ahead:
            ready, later = stage.begun(item), stages[number + 1 :]
            return lambda: _placed(later, ready())
        item = stage.place(item)
    return lambda: item


def _placed(stages: Sequence[DeviceStage], item: Any) -> Any:
    for stage in stages:
        item = stage.place(item)
    return item


#: Of one integer of each rank the least, or with True the sum.
Agreement = Callable[[int, bool], int]

#: How long to wait for a rank whose batches take long.
TIMEOUT = timedelta(minutes=30)

#: By the default group and the members.
_groups: dict[tuple[Any, tuple[int, ...]], dist.ProcessGroupGloo] = {}
# Their threads must end before the interpreter does: later the process may be aborted.
atexit.register(_groups.clear)


def agreement_over(topology: Topology) -> Agreement:
    """An all-reduce of the minimum, or the sum, over the data-parallel ranks, in a gloo group of their own.

    Raises:
        TopologyError: ``torch.distributed`` is not initialized, or has other ranks.
    """
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


def from_first_rank(topology: Topology, make: Callable[[], str]) -> str:
    """A text that rank 0 makes, on all data-parallel ranks; if it fails there, it fails on all.

    Raises:
        TopologyError: as ``agreement_over`` does, or the ranks are not all of ``torch.distributed``.
    """
    why, what = "list_files(refresh) lists files for each epoch", "on the files of an epoch"
    group = _group_over(topology, why, what, "leave out refresh")
    if topology.members and len(topology.members) != dist.get_world_size():
        raise TopologyError(
            f"{why}, which all processes must agree on, and the mesh has {len(topology.members)} of "
            f"{dist.get_world_size()} of them: make a pipeline of the files of each epoch, list_files(names)"
        )
    text, failed = "", None
    if topology.rank == 0:
        try:
            text = f"+{make()}"
        except Exception as error:
            text, failed = f"-{type(error).__name__}: {error}", error
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


def _group_over(topology: Topology, why: str, what: str, or_else: str) -> dist.ProcessGroupGloo:
    if not (dist.is_available() and dist.is_initialized()):
        raise TopologyError(
            f"{why}, so that its ranks must agree {what}, and torch.distributed is not initialized: call "
            f"init_process_group() first, or {or_else}"
        )
    members = topology.members or tuple(range(dist.get_world_size()))
    if len(members) != topology.world_size:
        raise TopologyError(
            f"the pipeline is one of {topology.world_size} ranks, and torch.distributed has "
            f"{len(members)}, so that it is not known which ranks must agree {what}: give "
            "pipe.distributed(mesh=...) the data-parallel dimension of a DeviceMesh"
        )
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
