"""What the workers of a ``Loader`` make, dealt in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias
from weakref import WeakMethod

from trainpipes.runtime.iterating.consumer import Consumer
from trainpipes.runtime.iterating.empty_epoch import warn_if_all_empty
from trainpipes.runtime.iterating.rounds import Message
from trainpipes.runtime.planning.plan import Plan
from trainpipes.state import Position
from trainpipes.topology import Topology

__all__ = ["Rounded"]

Messages: TypeAlias = Callable[[Position, tuple[int, int], int], Iterator[Message]]


class Rounded:
    """One pass made by workers, dealt in order, with the cursors of what was delivered.

    Looks to the ranks' agreement like a consumer.

    Args:
        plan: the pipeline's.
        messages: starts the workers of a pass: given where it starts, rank and world size, and how many
            workers it has use for, returns what they send. A bound method, which is not held: in a cycle,
            worker processes would outlive the last reference to their loader.
        num_workers: how many there may be.
        topology: this rank.
        position: where to start.
        stops_at_holes: whether it ends before the first micro-batch that is missing.
    """

    def __init__(
        self,
        plan: Plan,
        messages: Messages,
        num_workers: int,
        topology: Topology,
        position: Position,
        stops_at_holes: bool,
    ) -> None:
        self._start_workers = WeakMethod(messages)
        self._plan = plan.resized(position.sizes)
        self._topology = topology
        self._position = position
        self._stops_at_holes = stops_at_holes
        self._start = Consumer(self._plan, topology, position, position.m, stops_at_holes)
        self._texts = self._start.texts()
        self._m = position.m
        self._last = -1
        self._passed: list[int] = []  # shards found to have ended on the way to the last batch
        self._next = topology.first(position.m)
        self._end = self._last_slot = self._plan.last_slot(topology.world_size, position.m)
        own = topology.shards(position.m, self._plan.num_shards)
        self._workers = min(num_workers, len(own))
        self._running = {s for s in own if "ended" not in position.cursors.get(s, ())}
        self._over = False  # whether it has said that there are no more items
        self._messages: Iterator[Message] | None = None
        self._ready: dict[int, tuple[Any, str]] = {}
        self._ended: dict[int, str] = {}

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def m(self) -> int:
        return self._m

    @property
    def upcoming(self) -> int:
        return self._next

    def texts(self) -> dict[int, str]:
        return dict(self._texts)

    def moved(self) -> dict[int, str]:
        moved = (*self._passed, self._last) if self._texts else ()
        return {shard: self._texts[shard] for shard in moved}

    def __next__(self) -> Any:
        world = self._topology.world_size
        self._passed.clear()
        while self._running and self._next < self._end:
            m = self._next
            shard = m % self._plan.num_shards
            while shard in self._running and m not in self._ready and shard not in self._ended:
                self._receive()
            if m not in self._ready:
                if shard in self._running:
                    self._running.discard(shard)
                    self._move(shard, self._ended[shard])
                    self._passed.append(shard)
                if self._stops_at_holes:
                    self._end = m
                    break
                self._next += world
                continue
            item, text = self._ready.pop(m)
            self._move(shard, text)
            self._m = self._position.m + ((m - self._position.m) // world + 1) * world
            self._last = shard
            self._next += world
            return item
        self._over = self._next >= self._last_slot
        if self._last < 0 and self._position.m == 0:
            warn_if_all_empty(self._plan, self._topology)
        raise StopIteration

    def _move(self, shard: int, text: str) -> None:
        if text:
            self._texts[shard] = text

    def _receive(self) -> None:
        """Take in one message: a worker's part of a round."""
        if self._messages is None:
            ranks = (self._topology.rank, self._topology.world_size)
            start = self._start_workers()
            assert start is not None
            # Schemas that are not known yet are found in the workers: a function that opens a file when it
            # is first called must not do so here, before they are forked.
            position = replace(self._position, notes=self._plan.notes)
            self._messages = start(position, ranks, self._workers)
        message = next(self._messages, None)
        if message is None:
            raise RuntimeError("all workers have ended, and not all of their batches have come")
        if message.notes and message.notes != self._plan.notes:
            self._plan.adopt(message.notes)
        parts = zip(message.items, message.cursors, strict=True)
        self._ready.update(zip(message.slots, parts, strict=True))
        self._ended.update(message.ended)

    def close(self) -> None:
        """Let the workers go."""
        self._messages = None
        self._ready.clear()
        self._end = min(self._end, self._next)

    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        if self._plan.known and (self._over or self._m >= self._last_slot):
            return self._start.next_pass_state(extra)
        return self.render(self._m, self._texts, extra)

    def render(self, m: int, texts: dict[int, str], extra: dict[str, Any] | None) -> dict[str, Any]:
        return self._start.render(m, texts, extra)

    def next_pass_state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._start.next_pass_state(extra)
