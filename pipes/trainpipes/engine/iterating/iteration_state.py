from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from typing import Any, Protocol

from trainpipes._internal import callers
from trainpipes._internal.checks import whole_number
from trainpipes._internal.locks import Living
from trainpipes._internal.messages import has_warned, warn_once
from trainpipes.engine.iterating.consumer import Consumer
from trainpipes.engine.iterating.epoch_counter import EpochCounter
from trainpipes.engine.iterating.epoch_end import from_first_rank
from trainpipes.engine.planning.inputs import FILES, check_after, files_of, of_run
from trainpipes.engine.planning.migrate import at_start, checked_changes, migrate, position_of
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError, DataChangedError, StateError
from trainpipes.interfaces.stage import Stage
from trainpipes.order.layout import Topology
from trainpipes.state.format import Position, Reweighed, carried

#: Numbers of epochs are below this.
MOST_EPOCHS = 1 << 40


class IterationState:
    """Where a pipeline object, or a ``Loader``, stands.

    Args:
        make_plan: of the files of an epoch, if they are given; of those that stand there now by default.
        own_ranks: gives rank and world size, as no library shares out the rows again.
        source: the pipeline's, where a ``Loader``'s own starts.
        fixed: the epoch of every pass that starts from no load, or None.
    """

    def __init__(
        self,
        make_plan: Callable[[Sequence[Sequence[str] | None] | None], Plan],
        own_ranks: Callable[[], tuple[int, int]],
        source: IterationState | None = None,
        fixed: int | None = None,
    ) -> None:
        self.make_plan = make_plan
        self._plan: Plan | None = None
        self.own_ranks = own_ranks
        self.members: tuple[int, ...] | None = None
        self.passes = EpochCounter(fixed or 0, fixed)
        #: The last load, and where its state says to start.
        self.pending: tuple[int, Position] | None = None
        #: The pass that gave the last item.
        self.last: Consumer | None = None
        #: Those whose items were asked for.
        self.begun: Living[Consumer] = Living()
        #: What gives the items of passes.
        self.iterators: Living[Iterator[Any]] = Living()
        #: States of loaders that were made of this pipeline.
        self.derived: Living[IterationState] = Living()
        #: Threads and workers of the loader that it is of, as ``profile`` says them.
        self.how: dict[str, int | None] = {"threads": 0, "workers": 0}
        #: A pass, and the weights of a mix that change in it; the last ones hold in later passes.
        self._reweighed: tuple[int, Reweighed] = 0, ()
        #: Whether all ranks read the same version of tables that do not grow.
        self._agreed = False
        #: Seconds that loops of this process have waited for items.
        self.wait_seconds = 0.0
        #: Whether a ``WorkQueue`` reads it.
        self.is_queued = False
        #: How often a worker has iterated it.
        self.iterated = 0
        #: Whether the current pass is the first, which may be a look at a single item.
        self._may_look = True
        self.source = source
        self._from_source = 0  # the source's load that this starts from, or 0
        if source is not None:
            source.derived.add(self)
            self.members = source.members
            self.passes = EpochCounter(source.passes.now.upcoming)
            self._reweighed = source._reweighed
            if source._goes_on:
                self._expect(source.upcoming())
            elif source.pending is not None and source.pending[0] == source.passes.now.loaded:
                self._from_source = source.pending[0]
                self._expect(source.pending[1])

    def __getstate__(self) -> dict[str, Any]:
        self.warn_of_copy()
        # Without fields of this process.
        of_process = dict.fromkeys(("_plan", "last", "begun", "iterators", "derived"))
        return {**vars(self), **of_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.begun, self.iterators, self.derived = Living(), Living(), Living()

    @property
    def place_at_hand(self) -> dict[str, Any]:
        """What another object takes over that stands where this one does."""
        return {name: getattr(self, name) for name in ("passes", "pending", "_reweighed")}

    def stand_at(self, place: dict[str, Any]) -> None:
        vars(self).update(place)

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            self._plan = self.make_plan(None)
        return self._plan

    def ranks(self) -> tuple[int, int]:
        """Rank and world size to read by."""
        return callers.reading_ranks(self.own_ranks(), self.batching)

    def batching(self) -> Stage | None:
        """The stage that makes batches."""
        chain = self.plan.chain
        first = chain.stages[0]
        return chain.batch or (first if first.traits.makes_batches else None)

    def plan_of(self, position: Position) -> Plan:
        """The plan of a pass from a position on, with the files that its epoch began with."""
        return self._plan_of(position.extra.get(FILES), position.m > 0)

    def _plan_of(self, files: Any, within: bool) -> Plan:
        """The plan with a state's files, of its run alone where it is not ``within`` an epoch."""
        plan = self.plan
        if files is None or not plan.growing or (plan.inputs.is_open and plan.files == files):
            return plan
        names: Sequence[Sequence[str] | None] = files_of(files, plan.growing)
        if not within:
            names = of_run(names, plan.chain.stages)  # type: ignore[arg-type]
        if any(own is not None for own in names):
            self._plan = self.make_plan(names)
        return self.plan

    def list_files(self, position: Position) -> None:
        """A pass begins: where folders grow and it is an epoch's start, all ranks take the files that stand
        there now on rank 0, and of tables the version. A collective then.
        """
        before = self.plan
        self._agreed |= position.extra.get(FILES) is not None
        if not before.growing or position.m:
            return
        topology = self.topology()
        if not before.grows and (self._agreed or topology.world_size == 1):
            return
        self._agreed = True

        def listed() -> str:
            if before.grows:
                self._plan = self.make_plan(self.of_run())
            return self.plan.files or ""

        why = (
            "list_files(refresh) lists files for each epoch",
            "on the files of an epoch",
            "leave out refresh",
        )
        if not before.grows:
            why = "the newest version of a table is read", "on its number", "name the version"
        files = listed() if topology.world_size == 1 else from_first_rank(topology, listed, *why)
        if topology.rank:
            self._plan = self.make_plan(files_of(files, before.growing))
        if position.pass_number and before.inputs.is_open:
            try:
                check_after(before.files or "", self.plan.inputs)
            except DataChangedError:
                self._plan = before  # which the next epoch is compared with, too
                raise
        if before.has_same_files(self.plan):
            self._plan = before  # whose workers can go on

    def of_run(self) -> list[Sequence[str] | None]:
        """The versions that all epochs of a run have; None for what each epoch lists."""
        files, stages = self.plan.files, self.plan.chain.stages
        return of_run(files_of(files, self.plan.growing), stages)

    def topology(self) -> Topology:
        """This consumer, checked against the pipeline's shards."""
        rank, world = self.ranks()
        info = callers.reading_worker()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        topology = self.plan.counts.topology(rank, world, worker, workers, self.members)
        chain = self.plan.chain
        topology.check(chain.num_shards, chain.shard is not None, chain.opener.traits.one_consumer)
        return topology

    def parse(self, state: Any) -> Position:
        return position_of(*self._fitting(state))

    def looked_at(self, state: Any) -> tuple[Position, Plan]:
        """Where a state stands, and the plan of the files that it names; the run keeps its own files."""
        own = self.plan
        try:
            position = self.parse(state)
            return position, self.plan_of(position)
        finally:
            self._plan = own

    def _fitting(self, state: Any) -> tuple[Any, Plan]:
        """A state, and the plan of the files that it names; at an epoch's start they are listed again, so
        that those of the epoch before do not count.
        """
        plan = self.plan
        if not plan.growing or not isinstance(state, Mapping) or "trainpipes" not in state:
            return state, plan
        within = state.get("batches") != 0
        plan = self._plan_of(state.get(FILES), within)
        if within or not plan.grows:
            return state, plan
        if FILES in state and state.get("epoch"):
            check_after(state[FILES], plan.inputs)
        return at_start(state, plan), plan

    def load(self, state: dict[str, Any], allow_changes: Collection[str] = ()) -> None:
        own = self._plan
        try:
            self._load(state, allow_changes)
        except BaseException:
            self._plan = own  # what is refused leaves its files, too
            raise

    def _load(self, state: dict[str, Any], allow_changes: Collection[str] = ()) -> None:
        allowed = bool(allow_changes) if isinstance(allow_changes, list | tuple) else True
        if allowed and isinstance(state, Mapping) and "pipeline" in state:
            changes = checked_changes(allow_changes)
            if "version" in changes and state.get("batches") == 0:
                state = {key: value for key, value in state.items() if key != FILES}
                self._plan = self.make_plan(None)
            state = migrate(*self._fitting(state), changes)
        self.place(state)

    def place(self, state: Any) -> tuple[int, Position]:
        """Let the next pass start at a state. Returns this load's number and position."""
        position = self.parse(state)
        if callers.reading_worker() is None:
            position.require_all_workers()
            rank, world = self.ranks()
            if not self.plan.counted:
                topology = self.plan.counts.topology(rank, world)
                position.require(topology.shards(position.m, position.num_shards))
        return self._expect(position), position

    def _expect(self, position: Position) -> int:
        load = self.passes.load(position.pass_number, position.m > 0)
        self.pending = load, position
        self._reweighed = position.pass_number, position.reweighed
        self.last = None
        self._may_look = False
        self.begun.clear()
        return load

    def start_over(self) -> None:
        """Let the next pass begin where the first one did, also of a pipeline that goes on. Unlike a state,
        that takes no look at the data.
        """
        self._expect(Position(0, 0, self.plan.chain.num_shards))

    def set_epoch(self, epoch: int) -> None:
        whole_number(epoch, 0, "set_epoch(epoch)", "the number of an epoch", MOST_EPOCHS - 1)
        if self.passes.fixed is not None:
            raise ConfigError(
                f"set_epoch(): epoch must be left to a Loader that was made with epoch={self.passes.fixed}, "
                f"which begins that one each time, got {epoch}; make the Loader without epoch, or leave out "
                "set_epoch()"
            )
        if not self.plan.chain.endless:
            before = self.passes.now.upcoming
            self.passes.set_epoch(epoch)
            if self.last is not None and self.last.ended and self.passes.now.upcoming != before:
                self.last = None  # another epoch comes next

    def begin(self, consumer: Consumer) -> None:
        """A pass is claimed, and its first item is asked for."""
        self.begun.add(consumer)
        self.last = consumer

    def claim(
        self, loaded: tuple[int, Position] | None, upcoming: tuple[tuple[int, int], Position]
    ) -> Position:
        """Where the pass that begins now starts; ``loaded``: an iterator's load and position. ``found``: what
        came next before, and where it starts: a loaded position takes time, in which Ctrl-C may come.
        """
        self._warn_of_rest()
        if loaded is not None:
            position = self.loaded(loaded[1])
            self.passes.claim((position.pass_number, loaded[0]))
        elif self._goes_on:
            return self.upcoming()
        else:
            number, load = self.passes.claim()
            is_found = load > 0 and (number, load) == upcoming[0]
            position = upcoming[1] if is_found else self.start(number, load)
        if self.source is not None:
            self.source.passes.begin_in_loader(position.pass_number, self._from_source)
        return position

    def _warn_of_rest(self) -> None:
        """Warn once where a loop ended before its epoch did, unless it looked at a single item only."""
        last, now, chain = self.last, self.passes.now, self.plan.chain
        starts_elsewhere = now.loaded or now.named >= 0 or self.passes.fixed is not None
        if last is None or starts_elsewhere or chain.endless:
            return
        is_first, self._may_look = self._may_look, False
        # Else another thread may be at an item, or all data would be hashed.
        if last.ended or not last.left:
            return
        key = "rest", self.plan.identity
        if (is_first and last.gave_one_step) or has_warned(key) or not last.was_left_unfinished():
            return
        epoch = f"epoch {last.pass_number}"
        if any(stage.traits.reorders for stage in chain.stages):
            said = (
                f"and this one begins the next epoch: the rest of {epoch} is skipped",
                "repeat() makes one epoch without an end",
            )
        else:
            said = (
                f"and this one begins at the first item again: nothing is shuffled, so that the same items "
                f"come, and the rest of {epoch} never does",
                "to evaluate the same first batches each time, use Loader(pipe, epoch=0)",
            )
        warn_once(
            f"the loop before was left within {epoch}, {said[0]}. To continue within an epoch, keep its "
            f"iterator, batches = iter(loader); to look at one item, use peek(); {said[1]}",
            key,
        )

    def warn_of_copy(self) -> None:
        """Warn once where a copy is made within an epoch, unless a single item was looked at."""
        last = self.last
        if last is None or last.ended or get_spawning_popen() is not None or last.gave_one_step:
            return
        if not (last.plan.counts.known and last.given_up_to().over):
            warn_once(
                f"a copy within epoch {last.pass_number} does not go on in it, and begins with another pass: "
                "save state_dict(), and load it into the copy",
                ("copy", self.plan.identity),
            )

    def upcoming(self) -> Position:
        if self._goes_on and self.last is not None:
            return self.parse(self.last.state())
        return self.start(self.passes.now.upcoming, self.passes.now.loaded)

    @property
    def _goes_on(self) -> bool:
        """Whether the next pass continues the last: that of an endless pipeline does."""
        loads = self.passes.now.loaded or self.passes.fixed is not None
        return self.last is not None and self.plan.chain.endless and not loads

    def start(self, number: int, load: int) -> Position:
        """Where a pass starts; raises StateError if its load came after this process had started."""
        if self.pending is not None and self.pending[0] == load:
            return self.loaded(self.pending[1])
        if load % 2:
            raise StateError(
                f"a state from within epoch {number} was loaded into the pipeline after its "
                "persistent workers had started, and they do not see it: make a new DataLoader after "
                "load_state_dict(), or use StatefulDataLoader or trainpipes.Loader"
            )
        return self.start_of(number)

    def start_of(self, number: int) -> Position:
        of_pass, reweighed = self._reweighed
        weights = reweighed if number == of_pass else carried(reweighed)
        return Position(number, 0, self.plan.chain.num_shards, reweighed=weights)

    def reweighed(self) -> Reweighed:
        """The weights of a mix that have been changed for the pass at hand, or else for the next."""
        if self.last is not None and not self.last.ended:
            return self._reweighed[1]
        return self.upcoming().reweighed

    def reweigh(self, position: Position, goes_on: Consumer | None) -> None:
        """From a position on, the weights of a mix change: ``goes_on`` gives what was left of the last pass,
        or None where none is at hand.
        """
        self._reweighed = position.pass_number, position.reweighed
        if goes_on is not None:
            assert self.last is not None
            self.last.goes_on_as(goes_on)
            self.begin(goes_on)
            return
        self.last = None
        if self.pending is not None and self.pending[0] == self.passes.now.loaded:
            self.pending = self.pending[0], position

    def loaded(self, position: Position) -> Position:
        """A copy of a loaded position: stages may change their cursors."""
        return deepcopy(position)

    def start_of_epoch_at_hand(self) -> Position:
        last, now = self.last, self.passes.now
        if last is not None and not last.ended:
            position = last.position
            if last.pass_number != position.pass_number:
                return self.start_of(last.pass_number)
        else:
            if self.pending is None or self.pending[0] != now.loaded:
                return self.start_of(now.upcoming)
            position = self.loaded(self.pending[1])
        return replace(position, m=0, cursors={}, extra={})

    def state(self) -> dict[str, Any] | None:
        """The state after the last item given, or at the next pass's start; None in a worker."""
        if callers.reading_worker() is not None:
            return None
        last = self.last
        if last is not None:
            left = last.left and not last.ended
            if left and any(not (consumer.ended or consumer.left) for consumer in self.begun):
                warn_once(
                    "two iterators of this pipeline are unfinished, and this state is of the one "
                    "that gave the last item. For the other one, save its own state_dict(); to "
                    "only look at an item, use peek()"
                )
            return last.state()
        if self.passes.now.elsewhere:
            raise StateError(
                "this pipeline was last iterated by a trainpipes.Loader or by workers of a DataLoader, and "
                "does not know how far they are: save the state_dict() of the Loader or StatefulDataLoader; "
                "for a plain DataLoader count batches, and use pipe.state_at(batches, epoch=...)"
            )
        # With cursors of a rank's own shards, also of a state that had all of them.
        after = self.passes.after
        start = self.upcoming()
        return Consumer(self.plan_of(start), self.topology(), start, after=after).state()


class PipelineOrLoader(Protocol):
    """What stands somewhere in its epochs."""

    _iteration: IterationState


def iteration_of(subject: PipelineOrLoader) -> IterationState:
    """Where a pipeline or a loader stands."""
    return subject._iteration


def plan_of(subject: PipelineOrLoader) -> Plan:
    """The plan of a pipeline or a loader."""
    return iteration_of(subject).plan
