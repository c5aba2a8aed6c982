"""What a worker of a rank gets of a pass: its items in order, and the state after each. Where consumers
share shards, or count the items of all, each passes over the batches of the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import finalize

from trainpipes._internal.pool import Pool, default_threads
from trainpipes.columns.run import Run, Unroll
from trainpipes.engine.iterating.epoch_end import say_counts, say_left_out, warn_if_all_empty
from trainpipes.engine.planning.inputs import FILES
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.processes.loader_workers import LoaderWorkers, Workers
from trainpipes.engine.shards.lane import ENDED
from trainpipes.engine.shards.shard_items import ShardItems, items_of
from trainpipes.interfaces.stage import Numbers, is_aside
from trainpipes.interfaces.stage_kinds import DeviceStage
from trainpipes.order.layout import Topology
from trainpipes.state.format import Position, carried, render


class SharedItems:
    """The items of a consumer that passes over the batches of others: where ranks and workers do not
    divide the shards, or items of all shards are counted. A state has each shard's position after the
    same step on all of them.

    Args:
        first: the first batch of its shards, its own or not.
        step: the distance of batches of these shards.
        ended: shards that have no more batches.
        moved: gets the shards whose position has moved.
        count: batches before ``first`` that there were.
    """

    def __init__(
        self,
        items: ShardItems,
        first: int,
        step: int,
        num_shards: int,
        ended: set[int],
        moved: set[int],
        count: int = 0,
    ) -> None:
        self._items = items
        #: Batches that there were up to where it stands, ``at``.
        self.count = count
        self.at, self._step = first, step
        self._num_shards = num_shards
        self._ended, self._moved = ended, moved
        self.begin, self.cursor_text, self.close = items.begin, items.cursor_text, items.close

    def take(self, m: int) -> Any:
        self.pass_to(m)
        return self._next(m, own=True)

    def pass_to(self, m: int) -> None:
        """Pass over the batches before ``m``, which are of other consumers."""
        for other in range(self.at, m, self._step):
            self._next(other, own=False)

    def pass_over(self, m: int) -> Any:
        self.pass_to(m)
        return self._next(m, own=False)

    def pass_items(self, count: int) -> None:
        """Pass over so many items of all shards, or to the end of those."""
        while self.count < count and len(self._ended) < self._num_shards:
            self._next(self.at, own=False)

    def _next(self, m: int, own: bool) -> Any:
        shard, item = m % self._num_shards, ENDED
        if shard not in self._ended:
            self._moved.add(shard)
            item = self._items.take(m) if own else self._items.pass_over(m)
            if item is ENDED:
                self._ended.add(shard)
            else:
                self.count += 1
        self.at = m + self._step
        return item


@dataclass(frozen=True)
class RunOptions:
    """How items are made; they are the same with any of these.

    Args:
        threads: that work ahead; None for a thread per core, without user functions.
        workers: of a ``Loader``, which call functions.
        unroll: gives the items of a run.
        places: whether stages place batches on a device.
        step: batches of all ranks that are a step, with a whole one of which a pass ends; 0 for a batch of
            each rank.
        holds: whether states stand at a pass's start, or where ``hold`` was called last.
    """

    threads: int | None = 0
    workers: LoaderWorkers | None = None
    unroll: Unroll = Run.unroll
    places: bool = False
    step: int = 0
    holds: bool = False


#: In the thread that iterates.
SERIAL = RunOptions()


class ConsumerPosition(NamedTuple):
    """Where a consumer stands after an item.

    Args:
        m: batches of the pass that all ranks together have taken.
        upcoming: number of the next batch; at the end, of the first missing batch.
        over: whether the pass is over.
        moved: JSON cursors of the shards that moved since the item before; first all.
    """

    m: int
    upcoming: int
    over: bool
    moved: dict[int, str]


class Consumer:
    """What a worker of a rank gets of a pass from a position on.

    Args:
        origin: the batch from which workers took turns; the position's by default.
        between_items: held while a state is taken.
        after: the number of the pass that follows a pass.
    """

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        position: Position,
        *,
        origin: int | None = None,
        options: RunOptions = SERIAL,
        between_items: Callable[[], AbstractContextManager[None]] = nullcontext,
        after: Callable[[int], int] = lambda number: number + 1,
    ) -> None:
        plan = plan.reweighed(position.reweighed)
        self.plan = plan = plan.resized(position.sizes, position.m)
        self.topology = topology
        self.position = position
        self.origin = position.m if origin is None else origin
        self._options = options
        self._between_items = between_items
        self._after = after
        #: Whether its end was reported (``finish``); whether its iterator is gone, set from outside.
        self.ended = self.left = False
        #: Counts of stages when it began; set by ``_start_work``.
        self._counted: list[Numbers] | None = None
        #: Its items once opened, and once other threads work on them; with the workers and threads.
        self._items: ShardItems | SharedItems | None = None
        self._started: ShardItems | SharedItems | None = None
        self._workers: Workers | None = None
        self._pool: Pool | None = None
        #: Whether ``__next__`` came to the end.
        self._over = False
        self._num_shards = plan.chain.num_shards
        self._stride = topology.world_size * topology.num_workers
        #: The number of the next batch; ``__next__`` counts on.
        self._next = topology.next_slot(position.m, self.origin)
        #: Whether it ends at the first missing batch, with all ranks; else it gives the rest.
        may_end_together = plan.counts.ends_unevenly and not plan.chain.uneven
        self.ends_together = may_end_together and (options.step > 0 or topology.world_size > 1)
        #: Batches of a step of all ranks; a pass has whole ones, from its origin on.
        self.step = options.step or topology.world_size
        #: A state stands at a multiple of it from the origin on: after each rank's batch, or where ranks take
        #: different numbers of batches, after a step.
        self._round = self.step if self.step % topology.world_size else topology.world_size
        #: The batch at which it ends; inf if unknown.
        self.end = plan.counts.end(self.step, self.origin)
        #: Items of an epoch that come before its first, and that there are at most, where they are counted.
        self._least, self._most = 0, None
        if plan.counts.limits_items:
            self._least, self._most = plan.chain.skip_batches, plan.chain.stop_batches
        #: Shards that it reads; and those of them that had ended at the position. Set once.
        self._own = topology.shards(self.origin, plan.chain.num_shards)
        self._ended = {shard for shard, cursor in position.cursors.items() if "ended" in cursor}
        #: Shards that give it batches and may have more; ``__next__`` takes out those that end.
        self._running = topology.own_shards(self.origin, plan.chain.num_shards) - self._ended
        #: The batch number of the item made last; set by ``__next__``.
        self.m: int | None = None
        #: Whether a state has cursors, and which shards moved since the last item was looked at.
        self._has_cursors = not plan.counted
        self._moved = set(self._own) if self._has_cursors else set()
        #: Where it stands after the item given last, if items are made earlier; set by ``gave``.
        self.noted: ConsumerPosition | None = None
        #: Cursors by shard after that item; ``given_up_to`` updates those that moved.
        self._cursors: dict[int, str] = {}
        #: Where states stand meanwhile, and their cursors; set by ``hold``.
        self._held: tuple[ConsumerPosition, dict[int, str]] | None = None
        if self._has_cursors:
            position.require(self._own)

    def __iter__(self) -> Consumer:
        return self

    def __next__(self) -> Any:
        """The next item; as it is made, before stages place it."""
        items = self._started or self._start_work()
        while self._running and self._next < self.end:
            m = self._next
            if self._most is not None and self._items_before(m) >= self._most:
                break
            shard = m % self._num_shards
            if self._has_cursors:
                self._moved.add(shard)
            item = items.take(m) if shard in self._running else ENDED
            if item is ENDED:
                self._running.discard(shard)
                if self.ends_together:
                    self.end = m
                    break
            self._next += self._stride
            if item is not ENDED:
                self.m = m
                return item
        self._over = True
        if not self.ends_together:  # else it may be asked for the rest
            self.close()
            if self.m is None and self.position.m == 0:
                warn_if_all_empty(self.plan, self.topology, self.step)
        raise StopIteration

    def rest(self, most: int) -> int:
        """Make at most so many batches of shards that have not ended; returns how many there were."""
        count = 0
        while self._running and count < most:
            shard = self._next % self._num_shards
            if shard in self._running:
                if self.items.take(self._next) is ENDED:
                    self._running.discard(shard)
                else:
                    count += 1
            self._next += self._stride
        return count

    def _start_work(self) -> ShardItems | SharedItems:
        if self._counted is None:
            self._counted = [tally.numbers for tally in self.plan.tallies]
        if self._options.holds and self._held is None:
            self.hold()
        if not self.position.m:
            self.plan.inputs.check_lengths()
        items = self.items
        if self._workers is not None:
            self._workers.start()  # before threads are
        if not is_aside():  # others' threads stay as they are
            self.plan.settle(0 if self._pool is None else self._pool.threads)
        items.begin(self._next, self._stride, self.end)
        if self._least and not self.position.m:
            start = self.origin, self._next
            try:
                self._skip(items)
            except BaseException:  # the next call, and a state, begin at the position again
                self.close()
                self._items = self._pool = None
                self.origin, self._next = start
                self._moved = set(self._own) if self._has_cursors else set()
                raise
        self._started = items
        return items

    def _items_before(self, m: int) -> int:
        """How many items an epoch has before batch ``m``; those of other consumers are passed over."""
        if self.ends_together:  # where the first item is missing
            return m
        assert isinstance(self._items, SharedItems)
        self._items.pass_to(m)
        return self._items.count

    def _skip(self, items: ShardItems | SharedItems) -> None:
        """Pass over the items that ``skip`` leaves out; steps are counted from the first item that is
        left.
        """
        if isinstance(items, SharedItems) and not self.ends_together:
            items.pass_items(self._least)
            self.origin = items.at
        else:
            for m in range(self._next, self._least, self._stride):
                if self._has_cursors:
                    self._moved.add(m % self._num_shards)
                if items.pass_over(m) is ENDED:
                    self._next = self.end = m
                    return
            self.origin = self._least
        self._next = self.topology.next_slot(self.origin, self.origin)
        self._running = self.topology.own_shards(self.origin, self._num_shards)

    @property
    def items(self) -> ShardItems | SharedItems:
        # A cached_property would make each item 0.1 us slower.
        if self._items is None:
            items, step = self._open_items(), self.topology.step(self._num_shards)
            self._items = items
            counts = self.plan.counts.limits_items and not self.ends_together
            if self._has_cursors and (step < self._stride or counts):
                position = self.position
                first = position.m + (self._next - position.m) % step
                self._items = SharedItems(
                    items, first, step, self._num_shards, set(self._ended), self._moved,
                    sum(cursor["delivered"] for cursor in position.cursors.values()),
                )  # fmt: skip
        return self._items

    def _open_items(self) -> ShardItems:
        plan, options = self.plan, self._options
        if options.workers is not None:
            self._workers = options.workers.begin(plan)
            plan = plan.worked_by(self._workers)
        ours = not plan.runs_user_code and self._workers is None
        threads = default_threads() if options.threads is None else options.threads
        # The thread that iterates calls user functions, unless threads were asked for.
        asked = options.threads is not None and self._workers is None
        alone = not ours and (not asked or plan.in_caller)
        if threads:
            # Two threads never call a user function at once.
            self._pool = Pool(threads if ours or alone else 1, shares=ours or alone)
            finalize(self, self._pool.close)
        sharers = self._stride // self.topology.step(self._num_shards)
        first, stride, least = self._next, self._stride, self._least
        # Where workers begin to take turns is not known before skip() has counted.
        known = not least or self.topology.num_workers == 1
        passes = sharers > 1 or plan.chain.skip_batches > 0
        return items_of(
            plan, self.position, self._own, self._pool, alone, options.unroll, sharers=sharers,
            is_own=(
                (lambda m: m >= least and (not known or (m - first) % stride == 0)) if passes else None
            ),
        )  # fmt: skip

    # Where it stands

    def made_up_to(self) -> ConsumerPosition:
        """Where it stands after the item made last."""
        m, size = max(self.position.m, self.origin), self._round
        if self.m is not None:  # all ranks' batches up to there are given
            m = self.origin + ((self.m - self.origin) // size + 1) * size
        if isinstance(self._items, SharedItems):
            if self._over and not self.ends_together:  # it looked for more
                rounds = -(-(self._items.at - self.origin) // size)
                m = max(m, self.origin + rounds * size)
            if m > self.position.m:
                self._items.pass_to(m)
        moved = {shard: self.items.cursor_text(shard) for shard in self._moved}
        over = self.plan.counts.known and (self._over or m >= self.end)
        return ConsumerPosition(m, self._next, over, moved)

    def forget_moves(self, position: ConsumerPosition) -> None:
        """Its cursors are noted: not before, since Ctrl-C may come."""
        self._moved.difference_update(position.moved)

    def gave(self, position: ConsumerPosition) -> None:
        """Note where it stands, where items are made before they are given."""
        self.noted = position
        self._cursors.update(position.moved)

    def given_up_to(self) -> ConsumerPosition:
        """Where it stands after the item given last, or where it is held."""
        if self._held is not None:
            return self._held[0]
        if self.noted is not None:
            return self.noted
        position = self.made_up_to()
        self._cursors.update(position.moved)
        self.forget_moves(position)
        return position

    def hold(self) -> None:
        """Let states stand after the item given last, until the next call or the pass's end."""
        self._held = None
        self._held = self.given_up_to(), dict(self._cursors)

    @property
    def last_number(self) -> int:
        """The number of the item given last; before the first, one less than where it starts."""
        if self.noted is not None and self.m is not None:
            return self.noted.upcoming - self._stride
        return self.position.m - 1 if self.m is None else self.m

    def state(self, turn: bool = False, ends: bool = False) -> dict[str, Any]:
        """The state after the last item given; of an uncounted pipeline with this consumer's cursors.

        Args:
            turn: whether it says which of the workers that take turns this consumer is.
            ends: whether the state after the last item is that of the pass's end, not of the next
                one's start: for nodes and workers.
        """
        topology, extra = self.topology, {}
        if turn:
            who = {"worker": topology.worker, "num_workers": topology.num_workers}
            extra["turn"] = json.dumps({**who, "origin": self.origin}, separators=(",", ":"))
        if self.plan.files is not None:
            extra[FILES] = self.plan.files
        with self._between_items():
            consumer, given = self, self.given_up_to()
            if given.over and not (turn or ends):
                start = Position(self._after(self.pass_number), 0, self._num_shards)
                start.reweighed = carried(self.position.reweighed)
                consumer = Consumer(self.plan, topology, start)
                given = consumer.given_up_to()
            position = replace(consumer.position, m=given.m, cursors={}, extra=extra)
            cursors = consumer._cursors if consumer._held is None else consumer._held[1]
            return render(position, consumer.plan.identity, cursors)

    @property
    def pass_number(self) -> int:
        return self.position.pass_number

    @property
    def stages(self) -> tuple[DeviceStage, ...]:
        """Those that place its items, such as on a device."""
        return self.plan.chain.device_stages if self._options.places else ()

    # How it ends

    @property
    def begins_at_end(self) -> bool:
        """Whether it follows from the position that nothing is left of the pass."""
        start = self.position.m
        if not start or not self.plan.counted or self.plan.grows:
            return False
        own_first = start if self.plan.chain.uneven else self.topology.first(start)
        return own_first >= self.end

    @property
    def others_have_more(self) -> bool:
        """Whether the position leaves anything to other workers of its rank; and to other ranks, where these
        end apart. A rank's own state of an uncounted pipeline does not tell that.
        """
        position, whole = self.position, self.topology
        if self.plan.chain.uneven and len(position.cursors) in (0, self._num_shards):
            whole = Topology()
        elif whole.num_workers > 1:
            whole = replace(whole, worker=0, num_workers=1)
        if whole == self.topology:
            return False
        if self.plan.counted:
            return position.m < self.plan.counts.end(whole.world_size, self.origin)
        try:
            next(Consumer(self.plan, whole, position, origin=self.origin))
        except StopIteration:
            return False
        return True

    def was_left_unfinished(self) -> bool:
        if not self.left or self.ended:
            return False
        return not (self.plan.counts.known and self.given_up_to().over)

    @property
    def gave_one_step(self) -> bool:
        return self.given_up_to().m <= self.position.m + self.step

    def goes_on_as(self, other: Consumer) -> None:
        """Leave the rest of the pass to another consumer."""
        other.left, self.left, other._counted = self.left, True, self._counted
        self.close()

    def finish(self) -> None:
        """Report once the counts of its stages."""
        if not self.ended and self._counted is not None and not self.plan.quiet:
            say_counts(self.plan, self.topology, self.position, self._counted)
            say_left_out(self.plan, self.topology, self.pass_number, self.origin, self.step)
        self.ended, self._held = True, None
        self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._items is not None:
            self._items.close()
        self._end_workers()

    def leave(self) -> None:
        """Its iterator is gone: only where it stands may still be asked. The garbage collector may call it
        anywhere, also where this thread reads: it closes no reader, and waits for no lock.
        """
        self.left = True
        if self._pool is not None:
            self._pool.close()
        let_go = getattr(self._items, "let_go", None)  # no class: a program that ends has none
        if let_go is not None:
            let_go()
        self._end_workers()

    def _end_workers(self) -> None:
        workers, self._workers = self._workers, None
        if workers is not None and self._options.workers is not None:
            self._options.workers.end(workers, self.plan)
