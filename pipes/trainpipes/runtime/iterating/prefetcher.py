"""Batches on their way to where the stages that place them say, such as a device, while earlier ones are
trained on.

Used by the thread that iterates; the copies are the device's own work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainpipes.kinds.stage_kinds import PlaceStage
from trainpipes.runtime.iterating.delivered_state import DeliveredState, ItemIterator

__all__ = ["Prefetcher"]


class Prefetcher(DeliveredState):
    """Places the items of a source, some of them before they are asked for. Errors come in their turn; asked
    again after one, the source is asked again.

    Args:
        source: gives the items.
        stages: that place them, in order.
    """

    def __init__(self, source: ItemIterator, stages: Sequence[PlaceStage]) -> None:
        super().__init__(source)
        self._stages = stages
        #: Items that are begun beyond the one that is given.
        self._depth = max(stage.ahead for stage in stages)

    def __next__(self) -> Any:
        if not self._depth:
            return _placed(self._stages, next(self._source))
        wanted = min(len(self._taken) + 2, self._depth + 1)  # the first one does not wait for all
        while len(self._taken) < wanted and self._error is None:
            self._take()
        return self._give()

    def _begun(self, item: Any) -> Callable[[], Any]:
        try:
            return self._begin(item)
        except Exception:  # it is tried again, and raised, when the item is due
            return lambda: self._begin(item)()

    def _finished(self, begun: Callable[[], Any]) -> Any:
        return begun()

    def _begin(self, item: Any) -> Callable[[], Any]:
        """Begin to place an item; what is returned gives it."""
        for number, stage in enumerate(self._stages):
            if stage.ahead:
                ready, later = stage.begun(item), self._stages[number + 1 :]
                return lambda: _placed(later, ready())
            item = stage.place(item)
        return lambda: item


def _placed(stages: Sequence[PlaceStage], item: Any) -> Any:
    for stage in stages:
        item = stage.place(item)
    return item
