"""Items that a ``WorkQueue`` has handed out and that are not done, the oldest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import Any

from trainpipes._internal.checks import wrong
from trainpipes.state.work import WorkKey

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
        if isinstance(key, tuple) and len(key) == 2 and key <= newest:
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
