"""Batches on their way to a device while earlier ones are trained on.

Used by the thread that iterates; the copies are the device's own work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from trainpipes.runtime.iterating.delivered_state import (
    ConsumerState,
    DeliveredState,
    ItemIterator,
)
from trainpipes.runtime.planning.plan import Plan

__all__ = ["Prefetcher", "placed", "prefetched"]


def depth_of(plan: Plan) -> int:
    """How many batches are to be on their way beyond the one that is given."""
    return max((stage.ahead for stage in plan.chain.place_stages), default=0)


def prefetched(plan: Plan, source: ItemIterator) -> ItemIterator:
    """Items that are placed ahead of use where a stage asks for that; else as they are."""
    depth = depth_of(plan)
    return Prefetcher(source, partial(_begun, plan), depth) if depth else source


def placed(plan: Plan, item: Any) -> Any:
    """A batch where it is to lie, if that is not done ahead."""
    if depth_of(plan):
        return item
    for stage in plan.chain.place_stages:
        item = stage.place(item)
    return item


def _begun(plan: Plan, item: Any) -> Callable[[], Any]:
    """Begin to place a batch; what is returned gives it."""
    for number, stage in enumerate(plan.chain.place_stages):
        if stage.ahead:
            return partial(_finished, plan, number, stage.begun(item))
        item = stage.place(item)
    return lambda: item


def _finished(plan: Plan, number: int, ready: Callable[[], Any]) -> Any:
    item = ready()
    for stage in plan.chain.place_stages[number + 1 :]:
        item = stage.place(item)
    return item


class Prefetcher:
    """Items of a source, some of which are made ready before they are asked for. Errors come in their turn;
    asked again after one, the source is asked again.

    Args:
        source: gives the items.
        begin: begins to make one ready; what it returns gives it.
        depth: items that are begun beyond the one that is given.
    """

    def __init__(
        self, source: ItemIterator, begin: Callable[[Any], Callable[[], Any]], depth: int
    ) -> None:
        self._queue = DeliveredState(source)
        self._begin = begin
        self._depth = depth

    def __next__(self) -> Any:
        queue = self._queue
        wanted = min(len(queue) + 2, self._depth + 1)  # the first one does not wait for all
        while len(queue) < wanted and queue.error is None:
            queue.take(self._begun)
        return queue.give(_call)

    def _begun(self, item: Any) -> Callable[[], Any]:
        try:
            return self._begin(item)
        except Exception:  # it is tried again, and raised, when the item is due
            return lambda: self._begin(item)()

    def state(self) -> ConsumerState:
        return self._queue.state()

    def close(self) -> None:
        self._queue.close()


def _call(ready: Callable[[], Any]) -> Any:
    return ready()
