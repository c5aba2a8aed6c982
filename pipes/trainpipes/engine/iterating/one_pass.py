from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from trainpipes.engine.iterating.epoch_end import say_counts, say_left_out
from trainpipes.engine.iterating.lookahead import Lookahead
from trainpipes.engine.iterating.worker_iterator import (
    SERIAL,
    ConsumerPosition,
    RunOptions,
    WorkerIterator,
)
from trainpipes.engine.planning.growing import FILES
from trainpipes.engine.planning.plan import Plan
from trainpipes.interfaces.tally import Numbers
from trainpipes.order.topology import Topology
from trainpipes.state.format import Position, render


class IteratorLock:
    """Held while an iterator makes an item, or gives a state. A second thread that asks for an item
    meanwhile is refused; Ctrl-C does not leave it held.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        #: ``acquire()`` returns at once. These are no methods, which would make each row 5 % slower.
        self.acquire, self.release = partial(lock.acquire, False), lock.release
        self._wait = lock.acquire
        self._gives_state = False

    def wait(self, gives_state: bool | None = None) -> bool:
        """Acquire it after a state; raises RuntimeError if an item is being made."""
        if not (self._gives_state if gives_state is None else gives_state):
            raise RuntimeError(
                "iterator already executing: another thread, or a function of the pipeline's own, takes an "
                "item from it; take items and states in the thread that iterates, and hand them on"
            )
        return self._wait()

    @contextmanager
    def between_items(self) -> Iterator[None]:
        """Held while a state is taken; raises RuntimeError if an item is being made."""
        held, gives_state = True, self._gives_state
        self._gives_state = True
        try:
            if not self.acquire():
                held = False
                held = self.wait(gives_state)
            self._gives_state = True
            yield
        finally:
            self._gives_state = False
            if held:
                self.release()


class OnePass:
    """A pass from a position on.

    Args:
        origin: the batch from which workers took turns; the position's by default.
        go_on: whether a position with nothing left continues with the next pass.
        after: the number of the pass that follows one.
        together: whether it ends where several ranks would, though it is one.
    """

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        position: Position,
        *,
        origin: int | None = None,
        go_on: bool = False,
        options: RunOptions = SERIAL,
        iterator_lock: IteratorLock | None = None,
        after: Callable[[int], int] = lambda number: number + 1,
        together: bool = False,
    ) -> None:
        self._plan = plan
        self._after = after
        self._topology = topology
        self.options = options
        self.position = position
        self.origin = position.m if origin is None else origin
        #: Whether it has no more items.
        self.ended = False
        #: What stages had counted when it began.
        self._counted: list[Numbers] | None = None
        #: Whether its iterator is gone.
        self.left = False
        self.iterator_lock = iterator_lock or IteratorLock()
        self._may_go_on = go_on and position.m > 0
        self._together = together
        self._open(position)

    def _open(self, start: Position) -> None:
        self._start = start
        #: The number of the current pass.
        self.epoch = start.epoch
        self._cursors: dict[int, str] = {}
        plan, topology = self._plan, self._topology
        consumer = WorkerIterator(plan, topology, start, self.origin, self.options)
        stages = plan.chain.device_stages if self.options.places else ()
        #: Gives the items, up to where all ranks end together.
        self.items = Lookahead(consumer, topology, self.origin, stages)
        consumer.ends_together |= self._together and consumer.may_end_together
        # All workers of a rank begin the next pass together, asked or not.
        if self._may_go_on and plan.counted and topology.first(start.m) >= consumer.end:
            self._go_on()

    def __next__(self) -> Any:
        if self._counted is None:
            self._counted = [tally.numbers for tally in self._plan.tallies]
        try:
            item = next(self.items)
        except StopIteration:
            if not self._may_go_on or self._other_workers_have_more():
                self.end()
                raise
            self._go_on()
            return next(self.items)
        self._may_go_on = False
        return item

    def is_last(self) -> bool:
        if self._plan.chain.endless:
            return False
        return self.items.is_last(self._topology.world_size * self._topology.num_workers == 1)

    def consumer_position(self) -> ConsumerPosition:
        """Where it stands after the last item given; notes whose cursors moved."""
        state = self.items.state()
        self._cursors.update(state.moved)
        return state

    def _go_on(self) -> None:
        self._may_go_on, self.origin = False, 0
        self._open(Position(self._after(self.epoch), 0, self._plan.chain.num_shards))

    def _other_workers_have_more(self) -> bool:
        topology = self._topology
        if topology.num_workers == 1:
            return False
        rank = replace(topology, worker=0, num_workers=1)
        try:
            next(WorkerIterator(self._plan, rank, self.position, self.origin))
        except StopIteration:
            return False
        return True

    def state(self, turn: bool = False, ends: bool = False) -> dict[str, Any]:
        """The state after the last item given; of an uncounted pipeline with this consumer's cursors.

        Args:
            turn: whether it says which of the workers that take turns this consumer is.
            ends: whether the state after the last item is that of the pass's end, not of the next
                one's start: for nodes and workers.
        """
        topology, extra = self._topology, {}
        if turn:
            who = {"worker": topology.worker, "num_workers": topology.num_workers}
            extra["turn"] = json.dumps({**who, "origin": self.origin}, separators=(",", ":"))
        if self._plan.files is not None:
            extra[FILES] = self._plan.files
        with self.iterator_lock.between_items():
            state, plan, start = self.consumer_position(), self._plan, self._start
            cursors = self._cursors
            if state.over and not (turn or ends):
                after = self._after(start.epoch)
                start = Position(after, 0, start.num_shards)
                state = WorkerIterator(plan, topology, start, 0).state()
                cursors = state.moved
            position = replace(start, m=state.m, cursors={}, extra=extra)
            return render(position, plan.identity, cursors)

    def was_left_unfinished(self) -> bool:
        if not self.left or self.ended:
            return False
        return not (self._plan.counts.known and self.items.state().over)

    @property
    def gave_one_step(self) -> bool:
        return self.consumer_position().m <= self.position.m + self._topology.world_size

    def end(self) -> None:
        """Say once what stages counted in it."""
        if not self.ended and self._counted is not None and not self._plan.quiet:
            say_counts(self._plan, self._name, self._counted)
            say_left_out(self._plan, self.epoch, self.origin, self._topology)
        self.ended = True
        self.close()

    @property
    def _name(self) -> str:
        one, since = self._topology, self._start.m
        rank = f", rank {one.rank}" if one.world_size > 1 else ""
        worker = f", worker {one.worker}" if one.num_workers > 1 else ""
        return f"epoch {self.epoch}{rank}{worker}{f' from batch {since} on' if since else ''}"

    def close(self) -> None:
        self.items.close()
