"""``WorkQueue``: the items of a loader, handed out and done in any order, each exactly once an epoch."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf, lcm
from time import monotonic
from typing import Any

from trainpipes._internal.checks import require, whole_number, wrong
from trainpipes.engine.iterating.epoch_iterator import EpochIterator
from trainpipes.engine.iterating.iteration_state import iteration_of, plan_of
from trainpipes.errors import ConfigError, SchemaError, StateError
from trainpipes.loader import Loader
from trainpipes.state.format import Position, read, render
from trainpipes.state.kept import encoded
from trainpipes.state.work import ClassWork, WorkKey, WorkState, read_work, render_work

log = logging.getLogger("trainpipes")

#: Items that may be read after the oldest that is in flight: so many, or 4 for each that may be in flight.
#: With 100,000 in flight, anywhere among 500,000, a state takes less than 64 KB.
REACH = 500_000
#: Items between two states of the loader that are kept, and how many of these.
BETWEEN, MOST_STARTS = 64, 256
#: Seconds after which a thread that waits says what for.
PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Work:
    """An item that a ``WorkQueue`` has handed out.

    Args:
        key: names it in all runs: epoch and place.
        item: what the loader gave: a row, or a batch.
    """

    key: WorkKey
    item: Any


@dataclass(slots=True, eq=False)
class _InFlight:
    work: Work
    since: float
    number: int  # of the items that were read
    waits: bool = False  # to be handed out again


class WorkQueue:
    """Hands out the items of a loader to any number of threads, which finish them in any order.

    Iterate over it, or call ``get``; mark each item by ``done``, ``again`` or ``retire``. The state knows
    what is done and what is not: after ``load_state_dict`` items that were not done come first, in their
    order, and no item that was done comes again in its epoch. An iteration ends when all is done.

    Args:
        loader: a ``Loader`` of rows or batches, which the queue alone iterates. On several ranks its
            pipeline needs ``.sharding_filter(tail="uneven")``, so that no rank leaves items out.
        max_in_flight: items that are handed out and not done, at most. The queue also waits for an item
            after which 500,000 were read, or 4 times ``max_in_flight``.
        epochs: after which it ends; None for no end.
        by: a column that names a row in all epochs, for ``retire``. Without it all values of the
            item do.

    Raises:
        ConfigError: an option is out of range, or the pipeline does not fit.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"x": 10}, {"x": 20}, {"x": 30}])
    >>> queue = tp.WorkQueue(tp.Loader(rows))
    >>> first, second = queue.get(), queue.get()
    >>> queue.done(second.key)
    >>> resumed = tp.WorkQueue(tp.Loader(rows))
    >>> resumed.load_state_dict(queue.state_dict())
    >>> for work in resumed:
    ...     print(work.key, work.item)
    ...     resumed.done(work.key)
    WorkKey(epoch=0, place=0) {'x': 10}
    WorkKey(epoch=0, place=2) {'x': 30}
    """

    def __init__(
        self,
        loader: Loader,
        *,
        max_in_flight: int = 1024,
        epochs: int | None = 1,
        by: str | None = None,
    ) -> None:
        way = "write WorkQueue(tp.Loader(pipe))"
        require(isinstance(loader, Loader), "WorkQueue(loader)", "a trainpipes Loader", loader, way)
        self._most = whole_number(max_in_flight, 1, "WorkQueue(max_in_flight)", "items")
        if epochs is not None:
            whole_number(epochs, 1, "WorkQueue(epochs)", "passes over the data")
        require(by is None or isinstance(by, str), "WorkQueue(by)", "the name of a column", by)
        _check(loader, epochs)
        self.loader = loader
        self._epochs, self._by = epochs, by
        self._reach = max(REACH, 4 * self._most)
        #: Guards all below; waiting threads are woken when any of it changes.
        self._changed = threading.Condition(threading.Lock())
        position = read(loader.state_dict()).position
        if position.sizes is not None:
            rule = "at an epoch's start, as the batch size was changed in this one"
            raise wrong("WorkQueue(loader)", rule, f"batch {position.m}", "begin the next epoch")
        self._first_epoch = position.pass_number
        self._retired: set[int] = set()
        self._thread: ThreadPoolExecutor | None = None  # in which async iterations wait
        self._begin(WorkKey(position.pass_number, position.m), loader.state_dict())

    def _begin(
        self, start: WorkKey, state: dict[str, Any], loaded: WorkState | None = None
    ) -> None:
        """Stand where a loader's state says."""
        self._loaded = loaded  # until all that it knows of is read
        self._newest = WorkKey(start.epoch, start.place - 1)  # all up to it was read
        self._flight: dict[WorkKey, _InFlight] = {}
        self._again: deque[WorkKey] = deque()
        #: What is in flight in order, the oldest first, and some that are done.
        self._order: deque[WorkKey] = deque()
        self._reads = 0
        #: Where a loader can begin to read, the last at or before the oldest in flight first.
        self._starts: deque[tuple[WorkKey, dict[str, Any]]] = deque([(start, state)])
        self._items: EpochIterator | None = None
        self._since_start = 0  # items read since the last of ``_starts``
        self._lives = start.place > 0  # whether the epoch has items that are not retired
        self._ended = self._epochs is not None and start.epoch >= self._first_epoch + self._epochs
        self._reading = self._closed = False

    # Work

    def get(self, timeout: float | None = None) -> Work | None:
        """The next item; None if all is done, or the queue is closed.

        Waits where as many are in flight as may be, and at the end until those are done that others
        have: they may come again.

        Args:
            timeout: seconds to wait for others; None waits as long as it takes, and logs each minute for
                what.

        Raises:
            TimeoutError: nothing came in time.
            TrainpipesError: what the loader raised. Nothing is lost: the next call reads on at the same
                item.
        """
        begun = monotonic()
        end, says = inf if timeout is None else begun + timeout, begun + PATIENCE
        with self._changed:
            while not self._closed:
                if self._again and (work := self._next_again()):
                    return work
                if not self._reading and not self._ended and self._has_room():
                    if work := self._next_read():
                        return work
                    continue
                if self._ended and not self._flight:
                    break
                now = monotonic()
                if now >= end:
                    raise TimeoutError(
                        f"WorkQueue.get(timeout={timeout:g}): {self._waits_for(now)}"
                    )
                if now >= says:
                    log.warning(
                        "WorkQueue.get() waits for %.0f s: %s", now - begun, self._waits_for(now)
                    )
                    says = now + PATIENCE
                self._changed.wait(min(end, says) - now)
            self._changed.notify_all()
            return None

    def __iter__(self) -> Iterator[Work]:
        while (work := self.get()) is not None:
            yield work

    async def __aiter__(self) -> AsyncIterator[Work]:
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "trainpipes-work-queue")
        while True:
            waiting = loop.run_in_executor(self._thread, self._get_or_wait)
            try:
                work = await asyncio.shield(waiting)
            except asyncio.CancelledError:
                waiting.add_done_callback(self._take_back)
                raise
            if work is None:
                return
            if isinstance(work, Work):
                yield work

    def _get_or_wait(self) -> Work | str | None:
        try:
            return self.get(1.0)  # a thread ends soon after the loop
        except TimeoutError:
            return "waits"

    def _take_back(self, waiting: asyncio.Future[Work | str | None]) -> None:
        work = None if waiting.cancelled() or waiting.exception() else waiting.result()
        if isinstance(work, Work):
            self.again(work.key)

    def done(self, key: WorkKey) -> None:
        """An item is trained on, or written: it does not come again in its epoch.

        Raises:
            ConfigError: no such item is in flight.
        """
        with self._changed:
            self._finish("done", key)

    def again(self, key: WorkKey) -> None:
        """An item failed, or is stale: it is handed out again, next.

        Raises:
            ConfigError: no such item is in flight, or it waits for that already.
        """
        with self._changed:
            found = self._flight[self._known("again", key)]
            if found.waits:
                raise wrong("again(key)", "an item that was handed out", key, "it waits already")
            found.waits = True
            self._again.append(found.work.key)
            self._changed.notify()

    def retire(self, key: WorkKey) -> None:
        """An item is done, and its row is not handed out in later epochs, either.

        A queue for each rank retires for itself, until states are merged by ``merge_states`` and loaded.

        Raises:
            ConfigError: no such item is in flight.
            SchemaError: the item has no column ``by``, or it holds values that name no row.
        """
        with self._changed:
            self._retired.add(self._row(self._flight[self._known("retire", key)].work.item))
            self._finish("retire", key)

    def close(self) -> None:
        """End all iterations, also those that wait. The state stays; what is in flight can be marked."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def in_flight(self) -> int:
        """Items that are handed out and not done, those included that wait to come again."""
        return len(self._flight)

    def __repr__(self) -> str:
        return f"WorkQueue({self.in_flight} of {self._most} in flight) over\n{self.loader!r}"

    # State

    def state_dict(self) -> dict[str, Any]:
        """What is done, and where the loader begins for what is not: a flat dict of integers and strings.
        Can be called at any time, from any thread.
        """
        with self._changed:
            plan, (rank, world) = plan_of(self.loader), iteration_of(self.loader).ranks()
            if not self._flight and not self._reading:
                self._keep_start()
            start, state = self._starts[0]
            cursors = read(state).position.cursors
            loaded, shards = self._loaded, plan.chain.num_shards
            step = lcm(shards, world, 1 if loaded is None else loaded.num_classes)
            opened: dict[int, list[WorkKey]] = {}
            for key in sorted(self._flight):
                opened.setdefault(key.place % step, []).append(key)
            before = {} if loaded is None else loaded.in_classes(step)
            classes = {}
            for number in range(rank, step, world):
                newest, keys = self._newest, opened.get(number, [])
                if loaded is not None:
                    keys += [key for key in before[number].open if key > newest]
                    newest = max(newest, before[number].read)
                classes[number] = ClassWork(newest, tuple(keys), start, cursors.get(number))
            found = WorkState(
                plan.identity, shards, step, self._first_epoch, classes, frozenset(self._retired)
            )
        return render_work(found)

    def load_state_dict(
        self, state: dict[str, Any], *, allow_changes: Collection[str] = ()
    ) -> None:
        """Go on where a state was taken, on any number of ranks. What is in flight is forgotten.

        Args:
            state: of this queue's pipeline; on another number of ranks, that of all ranks merged.
            allow_changes: as for ``Loader.load_state_dict``, for a state in which nothing was in flight.

        Raises:
            StateError: it does not fit.
        """
        loaded = read_work(state)
        with self._changed:
            while self._reading:
                self._changed.wait(0.01)
            start = self._start_of(loaded, bool(allow_changes))
            self.loader.load_state_dict(start, allow_changes=allow_changes)
            self._first_epoch, self._retired = loaded.first_epoch, set(loaded.retired)
            self._begin(WorkKey(start["epoch"], start["batches"]), self.loader.state_dict(), loaded)
            self._changed.notify_all()

    def _start_of(self, loaded: WorkState, changes: bool) -> dict[str, Any]:
        """A loader's state from which all comes that is not done."""
        plan, (rank, world) = plan_of(self.loader), iteration_of(self.loader).ranks()
        classes = loaded.of_rank(rank, world)
        firsts = [
            min([*one.open, WorkKey(one.read[0], one.read[1] + 1)]) for one in classes.values()
        ]
        first, places = min(firsts), {one.at for one in classes.values()}
        if changes and (min(places) < max(firsts) or any(one.open for one in classes.values())):
            raise StateError(
                "load_state_dict(allow_changes) takes a state in which nothing is in flight, got one with "
                f"{sum(len(one.open) for one in classes.values())} items; finish them before you save"
            )
        cursors = {n: one.cursor for n, one in classes.items() if one.cursor is not None}
        position = Position(first.epoch, first.place, loaded.num_shards)
        if not plan.counted:
            # Ranks stand at different places: cursors fit together only where they stood at one.
            at = min(places) if len(places) == 1 else WorkKey(first.epoch, 0)
            position = Position(at.epoch, at.place, loaded.num_shards, cursors if at.place else {})
        return render(position, loaded.identity)

    # Within: the lock is held

    def _known(self, method: str, key: Any) -> WorkKey:
        if isinstance(key, list):  # from JSON
            key = tuple(key)
        try:
            if key in self._flight:
                return key  # type: ignore[no-any-return]
        except TypeError:
            pass
        way = "give the key of a Work that get() returned"
        if isinstance(key, tuple) and len(key) == 2 and key <= self._newest:
            way = "it is done already, or was handed out in an earlier run and not yet in this one"
        raise wrong(f"{method}(key)", "the key of an item in flight", key, way)

    def _finish(self, method: str, key: Any) -> None:
        del self._flight[self._known(method, key)]
        order, flight, starts = self._order, self._flight, self._starts
        if len(order) > 2 * len(flight) + 64:
            self._order = order = deque(key for key in order if key in flight)
        while order and order[0] not in flight:
            order.popleft()
        oldest = order[0] if order else WorkKey(self._newest.epoch, self._newest.place + 1)
        while len(starts) > 1 and starts[1][0] <= oldest:
            starts.popleft()
        self._wake()

    def _has_room(self) -> bool:
        if len(self._flight) >= self._most:
            return False
        return not self._order or self._reads - self._flight[self._order[0]].number < self._reach

    def _waits_for(self, now: float) -> str:
        if not self._flight:
            return "another thread reads"
        key = self._order[0]
        state = "all was handed out" if self._ended else "no more may be handed out"
        return (
            f"{state} until items are marked by done(): {len(self._flight)} of {self._most} are in flight, "
            f"the oldest is {tuple(key)}, for {now - self._flight[key].since:.0f} s"
        )

    def _next_again(self) -> Work | None:
        while self._again:
            found = self._flight.get(self._again.popleft())
            if found is None or not found.waits:  # done meanwhile
                continue
            if self._retired and self._row(found.work.item) in self._retired:
                self._finish("done", found.work.key)
                continue
            found.waits, found.since = False, monotonic()
            return found.work
        return None

    def _next_read(self) -> Work | None:
        """The next item, if it is to be handed out. Others may mark items while it is read."""
        self._reading = True
        try:
            self._changed.release()
            try:
                found = self._read()
            finally:
                self._changed.acquire()
            return self._took(*found)
        except BaseException:
            self._items = None  # it is opened again, and what was read is passed over
            raise
        finally:
            self._reading = False
            self._wake()

    def _wake(self) -> None:
        if self._ended and not self._flight:
            self._changed.notify_all()
        else:
            self._changed.notify()

    def _read(self) -> tuple[WorkKey, Any, dict[str, Any] | None]:
        """The next item, and now and then a state after it; at an epoch's end the key before the next
        one's first. Not under the lock."""
        if self._items is None:
            self.loader.load_state_dict(self._starts[-1][1])
            self._items = iter(self.loader)
        items = self._items
        try:
            item = next(items)
        except StopIteration:
            epoch = items.last_item()[0] + 1
            self._items = None
            return WorkKey(epoch, -1), None, self.loader.pipeline.state_at(0, epoch=epoch)
        self._since_start += 1
        state = items.state_dict() if self._since_start >= BETWEEN else None
        return WorkKey(*items.last_item()), item, state

    def _took(self, key: WorkKey, item: Any, state: dict[str, Any] | None) -> Work | None:
        """Note what was read; return it if it is to be handed out."""
        if key <= self._newest:  # read before
            return None
        loaded = self._loaded
        done = key.place >= 0 and loaded is not None and key in loaded
        retired = not done and key.place >= 0 and bool(self._retired)
        retired = retired and self._row(item) in self._retired
        if key.epoch > self._newest.epoch:
            past = self._epochs is not None and key.epoch >= self._first_epoch + self._epochs
            self._ended = past or not self._lives
            self._lives = False
            if self._ended:  # a loader that stood at an epoch's end goes on with the next
                key, self._items = WorkKey(key.epoch, -1), None
        if loaded is not None and key > loaded.newest:
            self._loaded = None
        self._newest = key
        if state is not None:
            self._starts.append((WorkKey(state["epoch"], state["batches"]), state))
            self._since_start = 0
            if len(self._starts) > MOST_STARTS:
                self._starts = deque(one for n, one in enumerate(self._starts) if n % 2 == 0)
        if key.place < 0:
            return None
        self._lives = self._lives or not retired
        self._reads += 1
        if done or retired:
            return None
        work = Work(key, item)
        self._flight[key] = _InFlight(work, monotonic(), self._reads)
        self._order.append(key)
        return work

    def _keep_start(self) -> None:
        """Where nothing is in flight, a loader begins after all that was read."""
        if self._items is not None:
            state = self._items.state_dict()
            self._starts = deque([(WorkKey(state["epoch"], state["batches"]), state)])
            self._since_start = 0

    def _row(self, item: Any) -> int:
        """What names an item's row in all epochs: its number, or 64 bits of its digest."""
        value = item
        if self._by is not None:
            if not isinstance(item, Mapping) or self._by not in item:
                there = list(item) if isinstance(item, Mapping) else type(item).__name__
                raise SchemaError(
                    f"WorkQueue(by): there is no column {self._by!r}; there are {there}"
                )
            value = item[self._by]
        if type(value) is int and 0 <= value < 1 << 63:
            return value
        try:
            text = json.dumps(encoded(value, "item"), sort_keys=True)
        except TypeError as error:
            way = "name a column that tells rows apart, WorkQueue(by=...), such as one of .enumerate()"
            raise SchemaError(
                f"retire: an item's values must be those of JSON, or arrays: {error}; {way}"
            ) from None
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _check(loader: Loader, epochs: int | None) -> None:
    plan, world = plan_of(loader), iteration_of(loader).ranks()[1]
    chain = plan.chain
    if plan.grows:
        raise ConfigError(
            "WorkQueue: list_files(refresh) must be left out, since the files of an epoch may be others when "
            "it is read again"
        )
    if world > 1 and not chain.uneven and not chain.endless:
        way = "else some items of an epoch are left out"
        raise wrong(
            "sharding_filter(tail)", '"uneven" for a WorkQueue on several ranks', "even", way
        )
    fixed = iteration_of(loader).passes.fixed
    if fixed is not None and epochs != 1:
        raise wrong("WorkQueue(epochs)", "1 for a Loader that was made with epoch=", epochs)
