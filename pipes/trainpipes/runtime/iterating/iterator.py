"""Iterators over a plan: one pass, with a state before and after every item."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch.utils.data import get_worker_info

from trainpipes.cursor import is_count
from trainpipes.errors import StateError, TopologyError
from trainpipes.merge import merge_states
from trainpipes.runtime.iterating.agreement import InStep, agreement_over
from trainpipes.runtime.iterating.ahead import Ahead, ahead_of, placed
from trainpipes.runtime.iterating.consumer import Consumer
from trainpipes.runtime.iterating.passes import Passes
from trainpipes.runtime.iterating.worker_end import end_in_peace
from trainpipes.runtime.planning.change import adapt
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.shards.places import check_places
from trainpipes.runtime.warn_once import warn_once
from trainpipes.shown import shown
from trainpipes.state import Position, parse
from trainpipes.topology import Topology

__all__ = ["Pass", "PipelineIterator", "Runner"]


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
    ) -> None:
        self._plan = plan
        self._places = places
        self._threads = threads
        self._topology = topology
        self.origin = origin
        self._consumer = self._open(position)
        self.epoch = self._consumer.epoch
        self._may_go_on = go_on and position.m > 0

    def __next__(self) -> Any:
        try:
            item = next(self._consumer)
        except StopIteration:
            if not self._may_go_on:
                raise
            self.origin = 0
            self._consumer = self._open(Position(self.epoch + 1, 0, self._plan.num_shards))
            self.epoch = self._consumer.epoch
            item = next(self._consumer)
        self._may_go_on = False
        return item

    def _open(self, position: Position) -> Consumer | InStep | Ahead:
        found = self._opened(position)
        return ahead_of(self._plan, found) if self._places else found

    def _opened(self, position: Position) -> Consumer | InStep:
        plan, topology = self._plan, self._topology
        if not plan.ends_unevenly or plan.ragged or topology.world_size == 1:
            return Consumer(plan, topology, position, self.origin, threads=self._threads)
        if topology.num_workers > 1 or get_worker_info() is not None:
            raise TopologyError(
                "row counts of this pipeline are not known beforehand, so that several ranks would end an "
                f"epoch at different steps and hang, got {topology.world_size} ranks with DataLoader "
                "workers, which cannot agree: add .repeat() and count steps, or use trainpipes.Loader"
            )
        consumer = Consumer(plan, topology, position, self.origin, True, self._threads)
        return InStep(consumer, agreement_over(topology), self.origin, topology.world_size)

    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._consumer.state(extra)


class Runner:
    """Where one pipeline object stands: what is outside its record.

    Args:
        stages: makes the pipeline's stages.
        ranks: gives rank and world size.
    """

    def __init__(self, stages: Callable[[], Plan], ranks: Callable[[], tuple[int, int]]) -> None:
        self._make = stages
        self._plan: Plan | None = None
        self._notes: dict[str, Any] = {}
        self.ranks = ranks
        self.members: tuple[int, ...] | None = None
        self.passes = Passes()
        self.pending: dict[str, Any] | None = None
        self.last: PipelineIterator | None = None
        self.iterated = 0

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            self._plan = self._make()
            self._plan.adopt(self._notes)
        return self._plan

    @property
    def notes(self) -> dict[str, Any]:
        """What is known of the rows' schemas, for a copy of the pipeline."""
        return self._notes if self._plan is None else self._plan.notes

    @notes.setter
    def notes(self, notes: dict[str, Any]) -> None:
        self._notes = notes

    def topology(self) -> Topology:
        """This consumer, checked against the pipeline's shards."""
        rank, world = self.ranks()
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        topology = Topology(rank, world, worker, workers, self.members)
        topology.check(self.plan.num_shards, self.plan.shard is not None)
        return topology

    def parse(self, state: Any) -> Position:
        position = parse(state, self.plan.identity_for(state), self.plan.num_shards)
        check_places(self.plan.resized(position.sizes), position)
        self.plan.adopt(position.notes)
        return position

    def require_shards(self, position: Position) -> None:
        """Raise unless all shards of this rank are there."""
        rank, world = self.ranks()
        if get_worker_info() is None and self.plan.num_shards % world == 0:
            position.require(Topology(rank, world).shards(position.m, self.plan.num_shards))

    def load(self, state: dict[str, Any], allow_changes: Collection[str] = ()) -> None:
        """Let the next pass start where the state says: ours, or a StatefulDataLoader's."""
        if isinstance(state, Mapping) and "trainpipes" not in state and "pipeline" not in state:
            state = merge_states([state])
        if allow_changes and isinstance(state, Mapping) and "pipeline" in state:
            state = adapt(state, self.plan, allow_changes)
        position = self.parse(state)
        self.require_shards(position)
        self.pending = dict(state)
        self.last = None
        self.passes.rewind(position.epoch)

    def take_pending(self) -> Position | None:
        """The position that was loaded for the next pass, if any; it is used once."""
        state, self.pending = self.pending, None
        if state is None or state["epoch"] != self.passes.upcoming:
            return None
        return self.parse(state)

    def state_at(self, batches: int, epoch: int) -> dict[str, Any]:
        """The state after so many batches of each rank in a pass."""
        if isinstance(batches, bool) or not isinstance(batches, int) or batches < 0:
            raise StateError(f"state_at(batches_delivered) counts from 0, got {shown(batches)}")
        if not is_count(epoch):
            raise StateError(f"state_at(epoch) counts from 0, got {shown(epoch)}")
        plan, world = self.plan, self.ranks()[1]
        m = batches * world
        if plan.known and m > plan.pass_batches:
            raise StateError(
                f"state_at(batches_delivered): an epoch has {int(plan.pass_batches) // world} batches for "
                f"each of {world} ranks, got {batches}"
            )
        one = Topology()
        if plan.seekable:
            cursors = {s: plan.cursor_at(m, s, epoch) for s in range(plan.num_shards)}
            return Consumer(plan, one, Position(epoch, m, plan.num_shards, cursors), m).state()
        walk = Consumer(plan, one, Position(epoch, 0, plan.num_shards), 0)
        for taken in range(m):
            try:
                next(walk)
            except StopIteration:
                raise StateError(
                    f"state_at(batches_delivered): the epoch ended after {taken} batches, got {batches}"
                ) from None
        return walk.state()

    def peek(self, state: dict[str, Any] | None = None) -> Any:
        """The next item, from an iterator of its own; that after ``state``, if one is given."""
        plan = self.plan
        if state is not None:
            position = self.parse(state)
        elif self.last is not None and plan.endless:
            position = self.parse(self.last.state_dict())
        elif self.pending is not None and self.pending["epoch"] == self.passes.upcoming:
            position = self.parse(self.pending)
        else:
            position = Position(self.passes.upcoming, 0, plan.num_shards)
        return next(Pass(plan, self.topology(), position, position.m))

    def state(self) -> dict[str, Any] | None:
        """The state after the last item given; of the start where none was. None in a worker,
        whose iterator has it."""
        if get_worker_info() is not None:
            return None
        if self.last is not None:
            return self.last.state_dict()
        if self.pending is not None and self.pending["epoch"] == self.passes.upcoming:
            start = self.parse(self.pending)
        else:
            start = Position(self.passes.upcoming, 0, self.plan.num_shards)
        # A rank's own shards, also of a state that had all of them.
        return Consumer(self.plan, self.topology(), start, start.m).state()


class PipelineIterator:
    """One pass over a pipeline, in a training process or in a DataLoader's worker.

    Starts at the first ``next`` or ``state_dict``. Has ``state_dict`` and ``load_state_dict``, as
    ``StatefulDataLoader`` looks for.

    Args:
        runner: the pipeline's.
        threads: that work ahead in a training process, as ``Consumer`` takes them; a worker has none.
    """

    def __init__(self, runner: Runner, threads: int | None = None) -> None:
        self._runner = runner
        self._threads = threads
        self._pass: Pass | None = None
        self._loaded: dict[str, Any] | None = None
        self._counted = False
        self._epoch = -1
        self._places = False  # whether batches are placed somewhere by this process
        self._info = get_worker_info()
        end_in_peace()
        self._iterated = runner.iterated
        runner.iterated += 1
        self._before = runner.last

    def __iter__(self) -> PipelineIterator:
        return self

    def __next__(self) -> Any:
        current = self._pass
        if current is None or not self._counted:
            current = self._begin()
            self._count(current.epoch)
        item = next(current)
        if current.epoch != self._epoch:  # it went on with the next one
            self._epoch = current.epoch
            if self._epoch >= self._runner.passes.upcoming:
                self._runner.passes.rewind(self._epoch + 1)
        return placed(self._runner.plan, item) if self._places else item

    def state_dict(self) -> dict[str, Any]:
        """The state after the last item given: integers and strings in a flat dict."""
        current = self._begin()
        if self._info is None:
            return current.state()
        turn = {
            "worker": self._info.id,
            "num_workers": self._info.num_workers,
            "origin": current.origin,
        }
        return current.state({"turn": json.dumps(turn, separators=(",", ":"))})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            StateError: it does not fit the pipeline.
        """
        position = self._runner.parse(state)
        self._runner.require_shards(position)
        self._loaded = dict(state)
        self._pass = None
        if self._info is None:
            self._runner.passes.rewind(position.epoch)
            self._runner.last = self
            return
        worker, seed = self._info.id, self._info.seed - self._info.id
        self._runner.passes.settle(seed, self._iterated, position.epoch, worker)

    def _begin(self) -> Pass:
        if self._pass is None:
            if self._info is None:
                self._pass = self._begin_alone()
                self._runner.last = self
            else:
                self._pass = self._begin_worker()
        return self._pass

    def _begin_alone(self) -> Pass:
        runner = self._runner
        position = runner.take_pending()
        if self._loaded is not None:
            position = runner.parse(self._loaded)
        if position is None and runner.plan.endless and self._before is not None:
            position = runner.parse(self._before.state_dict())
        self._before = None
        if position is None:
            position = Position(runner.passes.upcoming, 0, runner.plan.num_shards)
        topology = runner.topology()
        plan, threads = runner.plan, self._threads
        return Pass(plan, topology, position, position.m, threads=threads, places=True)

    def _count(self, epoch: int) -> None:
        """From here on the pass is taken: the next one is another."""
        self._counted = True
        self._epoch = epoch
        if self._info is None:
            self._runner.passes.rewind(epoch + 1)
            self._places = bool(self._runner.plan.place)

    def _begin_worker(self) -> Pass:
        assert self._info is not None
        runner = self._runner
        topology = runner.topology()
        if runner.plan.place:
            warn_once(
                f"{runner.plan.place[0]} is carried out by the process that trains, not by a worker "
                "of a plain DataLoader: pass pin_memory=True to the DataLoader, or use trainpipes.Loader"
            )
        state = self._loaded
        if state is None:
            seed = self._info.seed - self._info.id
            number = runner.passes.join(seed, self._iterated, self._info.id)
            if runner.pending is not None and runner.pending["epoch"] == number:
                position = runner.parse(runner.pending)
                return Pass(runner.plan, topology, position, position.m, go_on=False)
            start = Position(number, 0, runner.plan.num_shards)
            return Pass(runner.plan, topology, start, 0)
        position = runner.parse(state)
        turn = position.extra.get("turn")
        if turn is None:
            return Pass(runner.plan, topology, position, position.m, go_on=False)
        saved = json.loads(turn)
        if (saved["worker"], saved["num_workers"]) != (topology.worker, topology.num_workers):
            raise StateError(
                f"this state is of worker {saved['worker']} of {saved['num_workers']}, loaded in "
                f"worker {topology.worker} of {topology.num_workers}: a StatefulDataLoader resumes with "
                "the number of workers it was saved with; trainpipes.Loader takes any"
            )
        return Pass(runner.plan, topology, position, saved["origin"], go_on=False)
