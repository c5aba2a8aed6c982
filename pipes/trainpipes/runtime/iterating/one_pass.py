"""One pass over a plan, with a state after every item. Used by the thread that iterates.

Puts together what gives the items: a consumer, or what receives from workers; the agreement of ranks where
it ends; what places batches ahead. Writes the state of where they stand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.utils.data import get_worker_info

from trainpipes.errors import TopologyError
from trainpipes.runtime.iterating.consumer_iterator import ConsumerIterator
from trainpipes.runtime.iterating.delivered_state import ConsumerState, ItemIterator
from trainpipes.runtime.iterating.epoch_end_sync import EpochEndSync, agreement_over
from trainpipes.runtime.iterating.loader_workers import LoaderWorkers
from trainpipes.runtime.iterating.one_at_a_time import OneAtATime
from trainpipes.runtime.iterating.prefetcher import prefetched
from trainpipes.runtime.iterating.worker_receiver import WorkerReceiver
from trainpipes.runtime.planning.plan import Plan
from trainpipes.state import Position, render
from trainpipes.topology import Topology

__all__ = ["OnePass", "state_dict_at"]


class OnePass:
    """A pass from a position on. A position with nothing left goes on with the next pass.

    Args:
        plan: the pipeline's.
        topology: which consumer this is.
        position: where to start.
        origin: the micro-batch from which workers took turns.
        go_on: whether a position with nothing left goes on with the next pass.
        threads: that work ahead, as ``ConsumerIterator`` takes them.
        places: whether batches are placed ahead of use, where a stage asks for that.
        workers: of a ``Loader``, which make the items.
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
        workers: LoaderWorkers | None = None,
        one_at_a_time: OneAtATime | None = None,
    ) -> None:
        self._plan = plan
        self._places = places
        self._threads = threads
        self._topology = topology
        self._workers = workers
        self.position = position
        if go_on and self._has_nothing_left(position):
            position, origin = Position(position.epoch + 1, 0, plan.chain.num_shards), 0
        self.origin = origin
        #: Whether it has no more items.
        self.ended = False
        #: Whether the iterator that gave its items is no more.
        self.left = False
        self.one_at_a_time = one_at_a_time or OneAtATime()
        self._may_go_on = go_on and position.m > 0
        self._open(position)

    def _open(self, start: Position) -> None:
        self._start = start
        self._cursors: dict[int, str] = {}
        found = self._in_step(start)
        #: Gives the items.
        self.items = prefetched(self._plan, found) if self._places else found

    @property
    def epoch(self) -> int:
        """The number of the pass that is under way."""
        return self._start.epoch

    def __next__(self) -> Any:
        try:
            item = next(self.items)
        except StopIteration:
            if not self._may_go_on or self._other_workers_have_more():
                raise
            self._may_go_on, self.origin = False, 0
            self._open(Position(self.epoch + 1, 0, self._plan.chain.num_shards))
            return next(self.items)
        self._may_go_on = False
        return item

    def _has_nothing_left(self, position: Position) -> bool:
        """Whether it is known that a position within a pass is the end for this rank: all its workers begin
        the next pass then, also those that are not asked for anything yet."""
        plan, topology = self._plan.resized(position.sizes), self._topology
        if not plan.counted or position.m == 0:
            return False
        return topology.first(position.m) >= plan.counts.end(topology.world_size, position.m)

    def _other_workers_have_more(self) -> bool:
        """Whether a worker of this rank has something left where this pass started."""
        topology = self._topology
        if topology.num_workers == 1:
            return False
        rank = Topology(topology.rank, topology.world_size, members=topology.members)
        try:
            next(ConsumerIterator(self._plan, rank, self.position, self.origin))
        except StopIteration:
            return False
        return True

    def _in_step(self, start: Position) -> ItemIterator:
        """This rank's items from a position on, up to where all ranks end together."""
        plan, topology = self._plan, self._topology
        if not plan.counts.ends_unevenly or plan.chain.ragged or topology.world_size == 1:
            return self._alone(start, False)
        if topology.num_workers > 1 or get_worker_info() is not None:
            raise TopologyError(
                "row counts of this pipeline are not known in advance, so that several ranks would end an "
                f"epoch at different steps and hang, got {topology.world_size} ranks with DataLoader "
                "workers, which cannot agree: add .repeat() and count steps, or use trainpipes.Loader"
            )
        agree = agreement_over(topology)
        return EpochEndSync(self._alone(start, True), agree, self.origin, topology.world_size)

    def _alone(self, start: Position, stops_at_holes: bool) -> ItemIterator:
        """This rank's items, whatever others have."""
        plan, topology = self._plan, self._topology
        if self._workers is not None:
            return WorkerReceiver(self._workers, plan, topology, start, stops_at_holes)
        return ConsumerIterator(plan, topology, start, self.origin, stops_at_holes, self._threads)

    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """The state after the last item given; see ``state_dict_at``."""
        with self.one_at_a_time.between_items():
            state = self.items.state()
            self._cursors.update(state.moved)
            whole = state._replace(moved=self._cursors)
            return state_dict_at(self._plan, self._topology, self._start, whole, extra)

    def close(self) -> None:
        """Let go of worker processes, or of threads. The state stays."""
        self.items.close()


def state_dict_at(
    plan: Plan,
    topology: Topology,
    start: Position,
    state: ConsumerState,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What a state's dict says: whole where the pipeline is counted, else with the cursors of this
    consumer's own shards.

    Args:
        plan: the pipeline's.
        topology: which consumer this is.
        start: where it started.
        state: where it stands, with the cursors of all its shards.
        extra: more keys. With them, the state after the last item of a pass is not that of the next one's
            start: a worker, which has more to say, can't know that the others have come to the end too, and
            a node tells of the end.
    """
    plan = plan.resized(start.sizes)
    if extra is None and state.over:
        start = Position(start.epoch + 1, 0, plan.chain.num_shards, notes=start.notes)
        plan = plan.resized(None)
        state = ConsumerIterator(plan, topology, start, 0).state()
    notes = {**start.notes, **plan.notes}
    position = replace(start, m=state.m, cursors={}, extra=extra or {}, notes=notes)
    return render(position, plan.identity, state.moved)
