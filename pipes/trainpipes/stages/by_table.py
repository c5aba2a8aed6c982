"""What was made of a table, for as long as the table is there. Any thread may ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import ref

T = TypeVar("T")


class ByTable(Generic[T]):
    """What was made of tables, each known by itself, not by what it holds. Threads that ask at once may
    both make it."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, T]] = {}

    def of(self, table: Any, make: Callable[[Any], T]) -> T:
        """What was made of a table, made if nothing was."""
        key = id(table)
        found = self._kept.get(key)
        if found is None or found[0]() is not table:
            kept = self._kept
            gone = ref(table, lambda _: kept.pop(key, None))
            found = kept[key] = gone, make(table)
        return found[1]
