"""Items with one taken ahead where it is to be known whether another one comes. Used by the thread that
iterates."""

from __future__ import annotations

from typing import Any

from trainpipes.runtime.iterating.delivered_state import (
    ConsumerState,
    DeliveredState,
    ItemIterator,
)

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
        if self._last is None:
            self._last = self._source.state()
        if not self._last.over and not self._taken:
            self._take()
        return self._last.over or isinstance(self._error, StopIteration)

    def _take(self) -> None:
        super()._take()
        if self._alone and isinstance(self._error, StopIteration):
            item, error, state = self._taken[-1]
            self._taken[-1] = item, error, state._replace(over=True)

    def state(self) -> ConsumerState:
        state = super().state()
        if isinstance(self._error, StopIteration):  # the pass ends here, though nobody was told yet
            return state._replace(over=self._taken[-1][2].over)
        return state
