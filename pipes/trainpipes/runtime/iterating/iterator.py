"""Iterators over a plan: one pass, with a state before and after every item."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias
from weakref import WeakMethod, WeakSet

from torch.utils.data import get_worker_info

from trainpipes.errors import ConfigError, StateError, TopologyError
from trainpipes.merge import merge_states
from trainpipes.runtime.iterating.agreement import InStep, agreement_over
from trainpipes.runtime.iterating.ahead import ahead_of, placed
from trainpipes.runtime.iterating.consumer import Consumer
from trainpipes.runtime.iterating.delayed import InOrder
from trainpipes.runtime.iterating.one_at_a_time import OneAtATime
from trainpipes.runtime.iterating.passes import Passes, Shared, shared_by_workers
from trainpipes.runtime.iterating.worker_end import end_in_peace
from trainpipes.runtime.planning.change import adapt
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.shards.lane import check_places
from trainpipes.runtime.warn_once import warn_once
from trainpipes.state import Position, parse
from trainpipes.topology import Topology

__all__ = ["Pass", "PipelineIterator", "Runner"]

#: What one rank's workers make from a position on: see ``Loader``.
RoundedFrom: TypeAlias = Callable[[Topology, Position, bool], InOrder]

#: Above it, numbers of epochs no longer fit where they are kept.
MOST_EPOCHS = 1 << 40


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
        self.origin = origin
        self.position = position
        self.ended = False
        self.one_at_a_time = one_at_a_time or OneAtATime()
        self._consumer = self._open(position)
        self.epoch = self._consumer.epoch
        self._may_go_on = go_on and position.m > 0

    def __next__(self) -> Any:
        try:
            item = next(self._consumer)
        except StopIteration:
            self.ended = not self._may_go_on or self._other_workers_have_more()
            if self.ended:
                raise
            self._may_go_on = False
            self.origin = 0
            self._consumer = self._open(Position(self.epoch + 1, 0, self._plan.num_shards))
            self.epoch = self._consumer.epoch
            return next(self)
        self._may_go_on = False
        return item

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
            return self._consumer.state(extra)

    def close(self) -> None:
        """Let go of workers, or of threads. The state stays."""
        self._consumer.close()


class Runner:
    """Where one pipeline object, or one ``Loader``, stands.

    Args:
        stages: makes the pipeline's stages.
        ranks: gives rank and world size.
        source: what a ``Loader``'s own starts out from: that of its pipeline.
    """

    def __init__(
        self,
        stages: Callable[[], Plan],
        ranks: Callable[[], tuple[int, int]],
        source: Runner | None = None,
    ) -> None:
        self._make = stages
        self._plan: Plan | None = None
        self.ranks = ranks
        self.members: tuple[int, ...] | None = None
        self.passes = Passes()
        #: The number of the last load, and its state.
        self.pending: tuple[int, dict[str, Any]] | None = None
        #: The pass that gave the last item.
        self.last: Pass | None = None
        self._iterated = (0, 0)
        self._unfinished: WeakSet[PipelineIterator] = WeakSet()
        self._source = source
        self._from_source = 0  # the source's load that this starts from, 0 if from none
        #: Those of ``Loader``s that have not started.
        self._followers: WeakSet[Runner] = WeakSet()
        if source is not None:
            self.members = source.members
            self.passes = Passes(source.passes.upcoming)
            source._followers.add(self)
            if source.pending is not None and source.pending[0] == source.passes.loaded:
                self._follow(*source.pending, self.passes.upcoming)

    def __getstate__(self) -> dict[str, Any]:
        alone = {"_plan", "last", "_unfinished", "_followers"}  # of this process
        return {name: value for name, value in vars(self).items() if name not in alone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._plan = self.last = None
        self._unfinished, self._followers = WeakSet(), WeakSet()

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            self._plan = self._make()
        return self._plan

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
        return position

    def load(self, state: dict[str, Any], allow_changes: Collection[str] = ()) -> None:
        """Let the next pass start where the state says: ours, or a StatefulDataLoader's."""
        if isinstance(state, Mapping) and "trainpipes" not in state and "pipeline" not in state:
            state = merge_states([state])
        if allow_changes and isinstance(state, Mapping) and "pipeline" in state:
            state = adapt(state, self.plan, allow_changes)
        self.place(state)

    def place(self, state: Mapping[str, Any]) -> int:
        """Let the next pass start at a state, if it fits. Returns the number of this load."""
        position = self.parse(state)
        self._part()
        return self._expect(state, position.epoch, position.m > 0)

    def _expect(self, state: Mapping[str, Any], epoch: int, within: bool) -> int:
        load = self.passes.load(epoch, within)
        self.pending = load, dict(state)
        self.last = None
        for follower in self._followers:
            follower._follow(load, state, epoch)
        return load

    def _follow(self, load: int, state: Mapping[str, Any], epoch: int) -> None:
        """A ``Loader`` that has not started: start where its pipeline was told to."""
        self._from_source = load
        self._expect(state, epoch, bool(load % 2))

    def _part(self) -> None:
        """From here on a ``Loader`` stands where it stands, whatever its pipeline is told."""
        if self._source is not None:
            self._source._followers.discard(self)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be that of an epoch, as ``Pipeline.set_epoch`` says."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < MOST_EPOCHS:
            raise ConfigError(
                f"set_epoch(epoch) takes the number of an epoch, an integer from 0 on, got {epoch!r:.80}"
            )
        if not self.plan.endless:
            self._part()
            self.passes.set_epoch(epoch)

    def claim(self, own: tuple[int, dict[str, Any]] | None = None) -> Position:
        """Where the pass that begins now starts.

        Args:
            own: the load and the state that are the iterator's own, if it was given one.
        """
        self._part()
        if own is not None:
            position = self.parse(own[1])
            self.passes.begin(position.epoch, own[0])
        else:
            goes_on = self._goes_on()
            if goes_on is not None:
                return goes_on
            position = self.start(*self.passes.claim())
        if self._source is not None:
            self._source.passes.outrun(position.epoch, self._from_source)
        return position

    def upcoming(self) -> Position:
        """Where the next pass starts."""
        return self._goes_on() or self.start(self.passes.upcoming, self.passes.loaded)

    def _goes_on(self) -> Position | None:
        """An endless pipeline goes on where it stands."""
        if self.last is None or not self.plan.endless or self.passes.loaded:
            return None
        return self.parse(self.last.state())

    def start(self, number: int, load: int) -> Position:
        """Where a pass starts, given the load that it starts from.

        Raises:
            StateError: that was done after this process had started.
        """
        if self.pending is not None and self.pending[0] == load:
            return self.parse(self.pending[1])
        if load % 2:
            raise StateError(
                "persistent workers that have started do not see a state that is loaded into the pipeline "
                f"afterwards, got one from within epoch {number}: make a new DataLoader after "
                "load_state_dict(), or use StatefulDataLoader or trainpipes.Loader"
            )
        return Position(number, 0, self.plan.num_shards)

    def count(self) -> int:
        """How often this was iterated in this process before."""
        process, times = self._iterated
        if process != os.getpid():
            times = 0
        self._iterated = (os.getpid(), times + 1)
        return times

    def began(self, iterator: PipelineIterator) -> None:
        """An iterator of this process takes items from here on."""
        self._unfinished.add(iterator)

    def ended(self, iterator: PipelineIterator) -> None:
        """An iterator has no more items."""
        self._unfinished.discard(iterator)

    def state_at(self, batches: int, epoch: int) -> dict[str, Any]:
        """The state after so many batches of each rank in a pass."""
        if isinstance(batches, bool) or not isinstance(batches, int) or batches < 0:
            raise StateError(f"state_at(batches_delivered) counts from 0, got {batches!r}")
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

    def peek(self) -> Any:
        """The first item of the next pass, from an iterator of its own."""
        position = self.upcoming()
        return next(Pass(self.plan, self.topology(), position, position.m))

    def state(self) -> dict[str, Any] | None:
        """The state after the last item given; of the next pass's start where none was. None in a worker,
        whose iterator has it."""
        if get_worker_info() is not None:
            return None
        last = self.last
        if last is not None:
            unfinished = [one.current for one in self._unfinished]
            if unfinished and last not in unfinished and not last.ended:
                warn_once(
                    "the iterator that gave the last item was left before its end, and another one is "
                    "unfinished: this state is that of the last item. To save where the other one is, ask "
                    "it for its own state_dict(); peek() looks at an item without an iterator"
                )
            return last.state()
        if self.passes.elsewhere:
            raise StateError(
                "this pipeline was last iterated by a trainpipes.Loader or by workers of a DataLoader, and "
                "does not know how far they are: ask the Loader or StatefulDataLoader for its state_dict(); "
                "for a plain DataLoader count batches, and use pipe.state_at(batches, epoch=...)"
            )
        start = self.upcoming()
        # A rank's own shards, also of a state that had all of them.
        return Consumer(self.plan, self.topology(), start, start.m).state()


class PipelineIterator:
    """One pass over a pipeline, in a training process or in a DataLoader's worker.

    Starts at the first ``next`` or ``state_dict``, and is the next epoch from the first ``next`` on. Has
    ``state_dict`` and ``load_state_dict``, as ``StatefulDataLoader`` looks for. One thread's at a time.

    Args:
        runner: the pipeline's, or a ``Loader``'s.
        threads: that work ahead in a training process, as ``Consumer`` takes them; a worker has none.
        rounded: gives what a ``Loader``'s workers make, as ``Pass`` takes it.
    """

    def __init__(
        self, runner: Runner, threads: int | None = None, rounded: RoundedFrom | None = None
    ) -> None:
        self.current: Pass | None = None
        self._runner = runner
        self._threads = threads
        self._rounded = rounded
        self._one_at_a_time = OneAtATime()
        #: The load and the state that were given to this iterator.
        self._own: tuple[int, dict[str, Any]] | None = None
        self._taken = False  # whether the pass is taken: the next one is another
        self._epoch = -1
        self._places = False  # whether batches are placed somewhere by this process
        self._info = get_worker_info()
        self._shared: Shared | None = None  # what the workers of a pass have in common
        end_in_peace()
        iterated = runner.count()
        if self._info is None:
            runner.passes.here()
        else:
            self._shared = shared_by_workers(self._info, iterated)

    def __iter__(self) -> PipelineIterator:
        return self

    def __next__(self) -> Any:
        with self._one_at_a_time:
            current = self._take()
            try:
                item = next(current)
            except BaseException:
                if current.ended:
                    self._runner.ended(self)
                if self._rounded is not None:
                    current.close()
                raise
            if self._info is None:
                self._runner.last = current
            if current.epoch != self._epoch:  # it went on with the next one
                self._epoch = current.epoch
                self._runner.passes.go_on(self._epoch, self._shared)
            return placed(self._runner.plan, item) if self._places else item

    def __del__(self) -> None:
        if self.current is not None and self._rounded is not None:
            self.current.close()  # its workers go with it

    def state_dict(self) -> dict[str, Any]:
        """The state after the last item given: integers and strings in a flat dict."""
        with self._one_at_a_time.between_items():
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
        with self._one_at_a_time.between_items():
            if self._shared is None:
                self._own = self._runner.place(state), dict(state)
            else:
                self._runner.passes.settle(self._shared, self._runner.parse(state).epoch)
                self._own = 0, dict(state)
            if self.current is not None and self._rounded is not None:
                self.current.close()
            self.current = None
            self._taken = False

    def _take(self) -> Pass:
        """The pass, which is this iterator's from here on."""
        if self._taken:
            assert self.current is not None
            return self.current
        if self._info is None:
            current = self._open(self._runner.claim(self._own))
            self._runner.began(self)
            self._places = bool(self._runner.plan.place)
        else:
            current = self._begin()
        self._taken = True
        self._epoch = current.epoch
        return current

    def _begin(self) -> Pass:
        """The pass as it is, or as it would be if it was taken now."""
        if self._info is not None:
            self.current = self.current or self._begin_worker()
        elif not self._taken:
            own = self._own
            self._open(self._runner.upcoming() if own is None else self._runner.parse(own[1]))
        assert self.current is not None
        return self.current

    def _open(self, position: Position) -> Pass:
        if self.current is None or self.current.position != position:
            runner = self._runner
            self.current = Pass(
                runner.plan,
                runner.topology(),
                position,
                position.m,
                threads=self._threads,
                places=True,
                rounded=self._rounded,
                one_at_a_time=self._one_at_a_time,
            )
        return self.current

    def _begin_worker(self) -> Pass:
        runner = self._runner
        topology = runner.topology()
        if runner.plan.place:
            warn_once(
                f"{runner.plan.place[0]} is carried out by the process that trains, not by a worker "
                "of a plain DataLoader: pass pin_memory=True to the DataLoader, or use trainpipes.Loader"
            )
        if self._own is None:
            assert self._shared is not None
            position = runner.start(*runner.passes.join(self._shared))
            return Pass(runner.plan, topology, position, position.m)
        position = runner.parse(self._own[1])
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
