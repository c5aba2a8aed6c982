"""Items with one taken ahead where it is to be known whether another one comes. Used by the thread that
iterates."""

from __future__ import annotations

from typing import Any

from trainpipes.runtime.iterating.delivered_state import DeliveredState, ItemIterator

__all__ = ["OneAhead"]


class OneAhead(DeliveredState):
    """Says of the item given last whether it is the last of the pass.

    Holds one item more than its source, and only where the pass's end is not known by arithmetic.

    Args:
        source: gives the items.
        alone: whether this consumer is the only one, so that the pass is over where it ends.
    """

    def __init__(self, source: ItemIterator, alone: bool) -> None:
        super().__init__(source)
        self._alone = alone

    def __next__(self) -> Any:
        if not self._taken:
            self._take()
        return self._give()

    def is_last(self) -> bool:
        last = self._last = self._last or self._source.state()
        if last.over:
            return True
        if not self._taken:
            self._take()
        if not isinstance(self._error, StopIteration):
            return False
        if self._alone or self._taken[-1][2].over:
            self._last = last._replace(over=True)
        return True
