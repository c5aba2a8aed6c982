"""The items of a ``WorkQueue``: those that it takes of a loader, and those that it has handed out and that
are not done, the oldest first.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass
from itertools import islice
from math import isnan, lcm
from time import monotonic
from typing import Any

from trainpipes._internal.checks import wrong
from trainpipes.engine.iterating.epoch_iterator import EpochIterator
from trainpipes.engine.iterating.iteration_state import iteration_of, plan_of
from trainpipes.errors import ConfigError, SchemaError, StateError
from trainpipes.interfaces.held import MOST_EMPTY_EPOCHS, MOST_EMPTY_ROWS
from trainpipes.loader import Loader
from trainpipes.state.cursor import encoded
from trainpipes.state.format import Position, read, render
from trainpipes.state.work import ClassWork, WorkKey, WorkState

#: Keys that a message names.
NAMED = 5


@dataclass(frozen=True, slots=True)
class Work:
    """An item that a ``WorkQueue`` has handed out.

    Args:
        key: names it in all runs: epoch and place.
        item: the loader's item: a row, or a batch.
    """

    key: WorkKey
    item: Any

    def _handed_out(self) -> Work:
        """With an item whose dicts and lists may be changed: the queue keeps the one that names the row."""
        return Work(self.key, _copied(self.item))


#: What may hold other values, of rows that Python or Arrow gave.
NESTS = {dict, list, tuple}


def _copied(value: Any) -> Any:
    """A value in which dicts and lists are copies, at any depth."""
    kind = type(value)
    if kind in NESTS:
        parts = value.values() if kind is dict else value
        if not NESTS.isdisjoint(map(type, parts)):
            if kind is dict:
                return {key: _copied(part) for key, part in value.items()}
            return kind(map(_copied, value))
    return copy(value) if isinstance(value, dict | list | MutableMapping) else value


class InFlight:
    """Items in the order of their keys, and which of them wait to be handed out again.

    Args:
        most: how many there may be.
        reach: how many may be read from the oldest on.
    """

    def __init__(self, most: int, reach: int) -> None:
        self.most, self._reach = most, reach
        #: Each item, since when, and its number among those that were read. Of a plain dict, the first is
        #: slow to find where those before it were removed.
        self._works: OrderedDict[WorkKey, tuple[Work, float, int]] = OrderedDict()
        self._again: OrderedDict[WorkKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._works)

    def __iter__(self) -> Iterator[WorkKey]:
        return iter(self._works)

    @property
    def oldest(self) -> WorkKey | None:
        return next(iter(self._works), None)

    def has_room(self, read: int) -> bool:
        """Whether another item may be handed out, after so many were read."""
        works = self._works
        if len(works) >= self.most:
            return False
        return read < self._reach or not works or read - works[next(iter(works))][2] < self._reach

    def add(self, work: Work, number: int) -> None:
        """An item is handed out, the number-th that was read."""
        self._works[work.key] = work, monotonic(), number

    def item(self, key: WorkKey) -> Any:
        return self._works[key][0].item

    def known(self, method: str, key: Any, newest: WorkKey) -> WorkKey:
        """The key of an item in flight; raises ConfigError if it is of another queue."""
        if isinstance(key, list):  # from JSON
            key = tuple(key)
        try:
            if key in self._works:
                return key  # type: ignore[no-any-return]
        except TypeError:
            pass
        way = "give the key of a Work that get() returned"
        is_key = isinstance(key, tuple) and len(key) == 2 and all(isinstance(n, int) for n in key)
        if is_key and key <= newest:
            way = "it is done already, or was handed out in an earlier run and not yet in this one"
        raise wrong(f"{method}(key)", "the key of an item in flight", key, way)

    def remove(self, key: WorkKey) -> None:
        del self._works[key]
        if self._again:
            self._again.pop(key, None)

    def clear(self) -> None:
        self._works.clear()
        self._again.clear()

    def give_back(self, key: WorkKey) -> None:
        """An item is to be handed out again."""
        if key in self._again:
            raise wrong("again(key)", "an item that was handed out", key, "it waits already")
        self._again[key] = None

    def not_handed_out(self, work: Work) -> None:
        """Ctrl-C came as it was to be."""
        if work.key in self._works:
            self._again[work.key] = None

    @property
    def next_again(self) -> Work | None:
        """The item that waits longest to be handed out again, if any does."""
        return self._works[next(iter(self._again))][0] if self._again else None

    def take_again(self, work: Work) -> None:
        """It is handed out again."""
        self._works[work.key] = work, monotonic(), self._works[work.key][2]
        del self._again[work.key]

    def waits_for(self) -> str:
        """What a caller who asks for an item waits for, if there are some."""
        keys = [tuple(key) for key in islice(self._works, NAMED)]
        more = f" and {len(self) - len(keys):,} more" if len(self) > len(keys) else ""
        since = next(iter(self._works.values()))[1]
        return (
            f"{len(self)} of {self.most} are in flight, {', '.join(map(str, keys))}{more}, the oldest for "
            f"{monotonic() - since:.0f} s"
        )


#: Items between two states of the loader that are kept, and how many of these.
BETWEEN, MOST_STARTS = 64, 256

#: What was read: its key, the item, and now and then a state of the loader after it. At an epoch's end, the
#: key before the first of the next.
Read = tuple[WorkKey, Any, dict[str, Any] | None]


class WorkItems:
    """Reads a loader in its order, and knows which of its items are done or retired.

    All but ``read`` is called by one thread at a time, and nothing but ``take`` between it and ``read``
    changes the order of items.

    Args:
        loader: iterated by nobody else.
        epochs: after which it ends; None for no end.
        by: a column that names a row in all epochs.
    """

    def __init__(self, loader: Loader, epochs: int | None, by: str | None) -> None:
        _check(loader, epochs)
        self._loader, self._epochs, self._by = loader, epochs, by
        saved = read(loader.state_dict())
        position = saved.position
        if position.sizes is not None:
            rule = "at an epoch's start, as the batch size was changed in this one"
            raise wrong("WorkQueue(loader)", rule, f"batch {position.m}", "begin the next epoch")
        if saved.reweighed:
            rule = "without set_weights(), which a queue's state does not hold"
            way = "write the weights into mix(weights=...)"
            raise wrong("WorkQueue(loader)", rule, "new weights", way)
        iteration_of(loader).is_queued = True
        self._first_epoch = position.pass_number
        self._retired: set[int] = set()
        #: Where filters or a mix were changed within an epoch.
        self._since: WorkKey | None = None
        self._begin(WorkKey(position.pass_number, position.m), loader.state_dict())

    def _begin(
        self, start: WorkKey, state: dict[str, Any], loaded: WorkState | None = None
    ) -> None:
        """Stand where a loader's state says."""
        self._loaded = loaded  # until all that it knows of is read
        #: All items up to it were read, and how many that were not retired.
        self.newest, self.count = WorkKey(start.epoch, start.place - 1), 0
        #: Where a loader can begin to read, the last at or before the oldest in flight first.
        self._starts: deque[tuple[WorkKey, dict[str, Any]]] = deque([(start, state)])
        self._items: EpochIterator | None = None
        self._since_start = 0  # items read since the last of ``_starts``
        self._lives = start.place > 0  # whether the epoch has items that are not retired
        #: Epochs in a row that had none, and how many retired items were read in these.
        self._empty = self._passed = 0
        #: Whether nothing is left to read.
        self.ended = self._epochs is not None and start.epoch >= self._first_epoch + self._epochs

    # Reading

    def read(self) -> Read:
        """Read the next item. What is read counts once ``take`` was called with it."""
        if self._items is None:
            self._loader.load_state_dict(self._starts[-1][1])
            self._items = iter(self._loader)
        items = self._items
        try:
            item = next(items)
        except StopIteration:
            epoch = items.last_item()[0] + 1
            self._items = None
            return WorkKey(epoch, -1), None, self._loader.pipeline.state_at(0, epoch=epoch)
        self._since_start += 1
        state = items.state_dict() if self._since_start >= BETWEEN else None
        return WorkKey(*items.last_item()), item, state

    def take(self, key: WorkKey, item: Any, state: dict[str, Any] | None) -> bool:
        """Note an item that was read; whether it is to be handed out."""
        if key <= self.newest:  # read before
            return False
        is_item, loaded = key.place >= 0, self._loaded
        done = is_item and loaded is not None and key in loaded
        retired = is_item and not done and self.is_retired(item)
        if key.epoch > self.newest.epoch:
            past = self._epochs is not None and key.epoch >= self._first_epoch + self._epochs
            self._empty, self._lives = 0 if self._lives else self._empty + 1, False
            self.ended = past or self._is_over()
            if self.ended:  # a loader that stood at an epoch's end goes on with the next
                key, self._items, is_item = WorkKey(key.epoch, -1), None, False
        if loaded is not None and key > loaded.newest:
            self._loaded = None
        self.newest = key
        if state is not None:
            self._starts.append((WorkKey(state["epoch"], state["batches"]), state))
            self._since_start = 0
            if len(self._starts) > MOST_STARTS:
                self._starts = deque(start for n, start in enumerate(self._starts) if n % 2 == 0)
        if not is_item:
            return False
        self._lives = self._lives or not retired
        self._passed = 0 if self._lives else self._passed + 1
        self.count += 1
        return not (done or retired)

    def _is_over(self) -> bool:
        """Whether all is retired, or no epoch has any, as far as empty epochs can tell: in one of few rows, a
        rank may have none that is left.
        """
        if self._epochs is not None and not self._retired:
            return False
        world = iteration_of(self._loader).ranks()[1]
        many = self._empty >= MOST_EMPTY_EPOCHS * world
        return many or (self._empty > 0 and self._passed >= MOST_EMPTY_ROWS)

    def standing(self) -> tuple[Any, ...]:
        """What ``take`` changes."""
        of_epoch = self._lives, self._empty, self._passed
        return self.newest, of_epoch, self.ended, self.count, self._loaded

    def open_again(self, standing: tuple[Any, ...]) -> None:
        """After an error in reading an item, read it again; items taken before are passed over."""
        self._items = None
        self.newest, of_epoch, self.ended, self.count, self._loaded = standing
        self._lives, self._empty, self._passed = of_epoch

    def forget(self, oldest: WorkKey | None) -> None:
        """What is before the oldest item in flight is not read again."""
        starts = self._starts
        if len(starts) > 1:
            oldest = oldest or WorkKey(self.newest.epoch, self.newest.place + 1)
            while len(starts) > 1 and starts[1][0] <= oldest:
                starts.popleft()

    # Rows that are retired

    def retire(self, item: Any) -> None:
        batching = iteration_of(self._loader).batching()
        if batching is not None:
            raise ConfigError(
                f"retire(key) must be of a row, got a batch of {batching}, and later epochs have others; "
                "give the queue the pipeline without batches, and make batches of what it hands out"
            )
        row = self._row(item)
        name = "" if self._by is None else item[self._by]
        if name is None or (isinstance(name, float) and isnan(name)):  # other rows have it, too
            raise SchemaError(
                f"WorkQueue(by): {self._by!r} must name a row, got {name}; name a column without nulls, such "
                "as one of .enumerate()"
            )
        self._retired.add(row)

    def is_retired(self, item: Any) -> bool:
        return bool(self._retired) and self._row(item) in self._retired

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

    # State

    def state(self, in_flight: Iterable[WorkKey], rests: bool) -> WorkState:
        """What is done.

        Args:
            in_flight: items taken, and not done.
            rests: whether that is nothing, and nobody reads.
        """
        if rests and self._items is not None:  # a loader begins after all that was read
            state = self._items.state_dict()
            self._starts = deque([(WorkKey(state["epoch"], state["batches"]), state)])
            self._since_start = 0
        plan, (rank, world) = plan_of(self._loader), iteration_of(self._loader).ranks()
        start, state = self._starts[0]
        cursors = read(state).position.cursors
        loaded, shards = self._loaded, plan.chain.num_shards
        step = lcm(shards, world, 1 if loaded is None else loaded.num_classes)
        opened: dict[int, list[WorkKey]] = {}
        for key in sorted(in_flight):
            opened.setdefault(key.place % step, []).append(key)
        before = {} if loaded is None else loaded.in_classes(step)
        classes = {}
        for number in range(rank, step, world):
            newest, keys = self.newest, opened.get(number, [])
            if loaded is not None:
                keys += [key for key in before[number].open if key > newest]
                newest = max(newest, before[number].read)
            cursor = cursors.get(number % shards)
            classes[number] = ClassWork(newest, tuple(keys), start, cursor, self._since)
        return WorkState(
            plan.identity, shards, step, self._first_epoch, classes, frozenset(self._retired),
            json.dumps(self._by),
        )  # fmt: skip

    def load(self, loaded: WorkState, allow_changes: Collection[str]) -> None:
        """Stand where a state says; raises StateError if it does not fit."""
        if loaded.retired and loaded.by not in ("", json.dumps(self._by)):
            raise StateError(
                f"WorkQueue(by): the retired rows of the state are named by {json.loads(loaded.by)!r}, got "
                f"{self._by!r}; name rows as the run did that saved it"
            )
        start = self._start_of(loaded, bool(allow_changes))
        self._loader.load_state_dict(start, allow_changes=allow_changes)
        if read(self._loader.state_dict()).position.sizes is not None:
            raise StateError(
                "batch/batch_size: for a WorkQueue it may change only between epochs, as its state does not "
                f"hold where it did, and this one is within epoch {start['epoch']} (batches = "
                f"{start['batches']}): finish the epoch with the size that the state was saved with"
            )
        self._first_epoch, self._retired = loaded.first_epoch, set(loaded.retired)
        begin, plan = WorkKey(start["epoch"], start["batches"]), plan_of(self._loader)
        changed = not plan.counted and begin.place > 0 and plan.identity != loaded.identity
        self._since = begin if changed else _latest_change(loaded.classes.values())
        self._begin(begin, self._loader.state_dict(), loaded)

    def _start_of(self, loaded: WorkState, changes: bool) -> dict[str, Any]:
        """A loader's state from which all comes that is not done."""
        plan, (rank, world) = plan_of(self._loader), iteration_of(self._loader).ranks()
        classes = loaded.of_rank(rank, world)
        firsts = [
            min([*work.open, WorkKey(work.read[0], work.read[1] + 1)]) for work in classes.values()
        ]
        at = first = min(firsts)
        shards, places = loaded.num_shards, {work.at for work in classes.values()}
        cursors: dict[int, Any] = {}
        if not plan.counted:
            reads_all = plan.counts.topology(rank, world).reads_all
            read = loaded.classes if reads_all else classes
            cursors = {n % shards: c for n, work in read.items() if (c := work.cursor) is not None}
            # Ranks stand at different places: cursors fit together only where they stood at the same place.
            together = len({work.at for work in read.values()}) == 1
            if together and not (reads_all and len(cursors) < shards):
                at = min(places)
            else:
                at = WorkKey(first.epoch, 0)
                since = _latest_change(read.values())
                if since is not None and since > at:
                    raise StateError(
                        "a state whose ranks stand at different places is read from the epoch's start, and "
                        f"filters or a mix changed within epoch {since.epoch} (batches = {since.place}): "
                        "load it on the number of ranks that saved it"
                    )
        is_open = sum(len(work.open) for work in classes.values())
        if changes and (is_open or min(at, *places) < max(firsts)):
            got = f"one with {is_open} items; finish them before you save"
            if not is_open:
                got = "one whose ranks stand at different places; load it as it is, and finish the epoch"
            raise StateError(
                f"load_state_dict(allow_changes) takes a state in which nothing is in flight, got {got}"
            )
        if changes:  # the next epoch's start, where one has ended
            at = max(at, min(places))
        position = Position(at.epoch, at.place, shards, cursors if at.place else {})
        return render(position, loaded.identity)


def _latest_change(classes: Iterable[ClassWork]) -> WorkKey | None:
    return max((work.since for work in classes if work.since is not None), default=None)


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
