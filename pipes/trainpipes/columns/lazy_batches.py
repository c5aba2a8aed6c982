"""Items of a run that are made when somebody takes them."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

from trainpipes._internal import activity

#: Bytes of an item up to which it is made when it is taken.
LATE_BYTES = 1 << 19


def late_if_small(make: Callable[[int], Any], count: int, nbytes: float) -> MutableSequence[Any]:
    """Items of so many bytes together; small ones are made by whoever takes them."""
    items = LazyBatches(activity.within(make) if activity.is_on else make, count)
    return items if nbytes <= count * LATE_BYTES else list(items)


class LazyBatches(MutableSequence[Any]):
    """Like a list whose items are made when first asked for, and let go when set to None.

    Not locked: threads that ask at once may each make an item; a single item stays.
    """

    def __init__(self, make: Callable[[int], Any], count: int) -> None:
        self._make = make
        self._items: list[Any] = [None] * count
        self._gone = [False] * count

    def among(self, places: Sequence[int], count: int) -> LazyBatches:
        """The same items at these places of ``count``; there are no others."""
        place_of = {k: place for place, k in enumerate(places)}
        return LazyBatches(lambda k: self._make(place_of[k]), count)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        item = self._items[k]
        if item is None:
            item = self._make(k)
            if not self._gone[k]:
                self._items[k] = item
        return item

    def __setitem__(self, k: Any, item: Any) -> None:
        self._gone[k] = item is None
        self._items[k] = item

    def __delitem__(self, k: Any) -> None:
        raise TypeError("the items of a run are not taken out")

    def insert(self, k: int, item: Any) -> None:
        raise TypeError("nothing is put between the items of a run")
