"""One pass over a plan, with a state after every item."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakMethod

from torch.utils.data import get_worker_info

from trainpipes.errors import TopologyError
from trainpipes.runtime.iterating.agreement import InStep, agreement_over
from trainpipes.runtime.iterating.ahead import ahead_of
from trainpipes.runtime.iterating.consumer import Consumer
from trainpipes.runtime.iterating.delayed import InOrder
from trainpipes.runtime.iterating.one_at_a_time import OneAtATime
from trainpipes.runtime.planning.plan import Plan
from trainpipes.state import Position
from trainpipes.topology import Topology

__all__ = ["Pass", "RoundedFrom"]

#: What one rank's workers make from a position on: see ``Loader``.
RoundedFrom: TypeAlias = Callable[[Topology, Position, bool], InOrder]


class Pass:
    """A pass from a position on. A position with nothing left goes on with the next pass.

    Args:
        plan: the pipeline's.
        topology: which consumer this is.
        position: where to start.
        origin: the micro-batch from which workers took turns.
        go_on: whether a position with nothing left goes on with the next pass.
        threads: that work ahead, as ``Consumer`` takes them.
        places: whether batches are placed ahead of use, where a stage asks for that.
        rounded: gives what a ``Loader``'s workers make from a position on. A bound method, which is not
            held: the loader keeps its latest pass.
        one_at_a_time: of the iterator that gives this pass's items.
    """

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        position: Position,
        origin: int,
        go_on: bool = True,
        threads: int | None = 0,
        places: bool = False,
        rounded: RoundedFrom | None = None,
        one_at_a_time: OneAtATime | None = None,
    ) -> None:
        self._plan = plan
        self._places = places
        self._threads = threads
        self._topology = topology
        self._rounded = None if rounded is None else WeakMethod(rounded)
        self.position = position
        if go_on and self._has_nothing_left(position):
            position, origin = Position(position.epoch + 1, 0, plan.num_shards), 0
        self.origin = origin
        #: Whether it has no more items.
        self.ended = False
        #: Whether the iterator that gave its items is no more.
        self.left = False
        self.one_at_a_time = one_at_a_time or OneAtATime()
        #: Gives the items.
        self.consumer = self._open(position)
        self.epoch = self.consumer.epoch
        self._may_go_on = go_on and position.m > 0

    def __next__(self) -> Any:
        try:
            item = next(self.consumer)
        except StopIteration:
            if not self._may_go_on or self._other_workers_have_more():
                raise
            self._may_go_on = False
            self.origin = 0
            self.consumer = self._open(Position(self.epoch + 1, 0, self._plan.num_shards))
            self.epoch = self.consumer.epoch
            return next(self)
        self._may_go_on = False
        return item

    def _has_nothing_left(self, position: Position) -> bool:
        """Whether it is known that a position within a pass is the end for this rank: all its workers begin
        the next pass then, also those that are not asked for anything yet."""
        plan, topology = self._plan.resized(position.sizes), self._topology
        if not plan.seekable or position.m == 0:
            return False
        return topology.first(position.m) >= plan.last_slot(topology.world_size, position.m)

    def _other_workers_have_more(self) -> bool:
        """Whether a worker of this rank has something left where this pass started."""
        topology = self._topology
        if topology.num_workers == 1:
            return False
        rank = Topology(topology.rank, topology.world_size, members=topology.members)
        try:
            next(Consumer(self._plan, rank, self.position, self.origin))
        except StopIteration:
            return False
        return True

    def _open(self, position: Position) -> InOrder:
        found = self._opened(position)
        return ahead_of(self._plan, found) if self._places else found

    def _opened(self, position: Position) -> InOrder:
        plan, topology = self._plan, self._topology
        if not plan.ends_unevenly or plan.ragged or topology.world_size == 1:
            return self._alone(position, False)
        if topology.num_workers > 1 or get_worker_info() is not None:
            raise TopologyError(
                "row counts of this pipeline are not known beforehand, so that several ranks would end an "
                f"epoch at different steps and hang, got {topology.world_size} ranks with DataLoader "
                "workers, which cannot agree: add .repeat() and count steps, or use trainpipes.Loader"
            )
        consumer = self._alone(position, True)
        return InStep(consumer, agreement_over(topology), self.origin, topology.world_size)

    def _alone(self, position: Position, stops_at_holes: bool) -> InOrder:
        """This rank's batches, not agreed with others."""
        if self._rounded is None:
            return Consumer(
                self._plan, self._topology, position, self.origin, stops_at_holes, self._threads
            )
        rounded = self._rounded()
        assert rounded is not None  # whoever iterates holds the loader
        return rounded(self._topology, position, stops_at_holes)

    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """The state after the last item given."""
        with self.one_at_a_time.between_items():
            return self.consumer.state(extra)

    def close(self) -> None:
        """Let go of workers, or of threads. The state stays."""
        self.consumer.close()
