"""What the workers of a ``Loader`` make, given in the order of m. Used by the thread that iterates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch._utils import ExceptionWrapper

from trainpipes.errors import WorkerError
from trainpipes.runtime.iterating.consumer_iterator import ConsumerIterator
from trainpipes.runtime.iterating.delivered_state import ConsumerState
from trainpipes.runtime.iterating.empty_epoch import warn_if_all_empty
from trainpipes.runtime.iterating.loader_workers import LoaderWorkers
from trainpipes.runtime.iterating.worker_message import WorkerMemory, WorkerMessage
from trainpipes.runtime.planning.plan import Plan
from trainpipes.state import Position
from trainpipes.topology import Topology

__all__ = ["WorkerReceiver"]

_INTERRUPTED = (
    "this iteration was interrupted while it waited for its workers: iterate the Loader anew, after "
    "loader.load_state_dict(loader.state_dict()) to go on with the batch that comes next"
)


class WorkerReceiver:
    """One rank's pass, made by workers. An error of theirs is raised when its batch is due, and again
    whenever one is asked for.

    Args:
        workers: of the ``Loader``.
        plan: the pipeline's.
        topology: this rank.
        position: where to start.
        stops_at_holes: whether it ends before the first micro-batch that is missing.
    """

    def __init__(
        self,
        workers: LoaderWorkers,
        plan: Plan,
        topology: Topology,
        position: Position,
        stops_at_holes: bool,
    ) -> None:
        self._workers = workers
        self._plan = plan.resized(position.sizes)
        self._topology = topology
        self._position = position
        self._stops_at_holes = stops_at_holes
        start = ConsumerIterator(self._plan, topology, position, position.m, stops_at_holes)
        self._moved = start.state().moved  # cursors that the owner was not told yet
        self._m = position.m
        self._given = False  # whether any batch was
        self._next = topology.first(position.m)
        self._end = self._last_slot = self._plan.counts.end(topology.world_size, position.m)
        own = topology.shards(position.m, self._plan.chain.num_shards)
        self._useful = min(workers.most, len(own))
        self._running = {s for s in own if "ended" not in position.cursors.get(s, ())}
        self._over = False  # whether it has said that there are no more items
        self._started: tuple[WorkerMemory, Iterator[WorkerMessage]] | None = None
        self._error: Exception | None = None  # what was raised
        #: By m: batches that have arrived, each with its shard's cursor after it, and those that failed.
        self._ready: dict[int, tuple[Any, str]] = {}
        self._failed: dict[int, ExceptionWrapper] = {}
        self._ended: dict[int, str] = {}  # cursors of shards that were found to have ended

    def __next__(self) -> Any:
        world = self._topology.world_size
        while self._running and self._next < self._end:
            m = self._next
            shard = m % self._plan.chain.num_shards
            if shard in self._running:
                while not (m in self._ready or shard in self._ended):
                    self._receive(m)
                if m not in self._ready:
                    self._running.discard(shard)
                    self._move(shard, self._ended[shard])
            found = self._ready.pop(m, None)
            if found is None and self._stops_at_holes:
                self._end = m
                break
            self._next += world
            if found is not None:
                item, text = found
                self._move(shard, text)
                self._m = self._position.m + ((m - self._position.m) // world + 1) * world
                self._given = True
                return item
        self._over = self._next >= self._last_slot
        if not self._given and self._position.m == 0:
            warn_if_all_empty(self._plan, self._topology)
        raise StopIteration

    def _move(self, shard: int, text: str) -> None:
        if text:
            self._moved[shard] = text

    def _receive(self, due: int) -> None:
        """Take in one message, or raise why the batch that is due does not come."""
        if self._error is None:
            try:
                self._take_in(due)
                return
            except BaseException as error:
                self._started = None
                self._error = error if isinstance(error, Exception) else WorkerError(_INTERRUPTED)
                raise
        raise self._error

    def _take_in(self, due: int) -> None:
        if due in self._failed:
            self._failed[due].reraise()  # type: ignore[no-untyped-call]
        if self._started is None:
            ranks = self._topology.rank, self._topology.world_size
            # Schemas that are not known yet are found in the workers: a function that opens a file when it
            # is first called must not do so here, before they are forked.
            position = replace(self._position, notes=self._plan.notes)
            self._started = self._workers.start(self._plan, ranks, self._useful, position)
        memory, messages = self._started
        memory.due = due
        message = next(messages, None)
        if message is None:
            shard = due % self._plan.chain.num_shards
            raise WorkerError(
                f"the workers ended early: batch {due} of shard {shard} is missing; "
                "load the state again, or report this with the state"
            )
        if message.notes and message.notes != self._plan.notes:
            self._plan.adopt(message.notes)
        parts = zip(memory.unpack(message), message.cursors, strict=True)
        self._ready.update(zip(message.numbers, parts, strict=True))
        self._ended.update(message.ended)
        if message.failed is not None:
            number, error = message.failed
            self._failed[number] = error

    def state(self) -> ConsumerState:
        moved, self._moved = self._moved, {}
        over = self._plan.counts.known and (self._over or self._m >= self._last_slot)
        return ConsumerState(self._m, self._next, over, moved)

    def close(self) -> None:
        """Let the workers go."""
        self._started = None
        self._ready.clear()
