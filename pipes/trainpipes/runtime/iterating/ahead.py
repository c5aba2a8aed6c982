"""Batches on their way to a device while earlier ones are trained on, with the state of what was given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from trainpipes.runtime.iterating.delayed import Delayed, InOrder
from trainpipes.runtime.planning.plan import Plan

__all__ = ["Ahead", "ahead_of", "placed"]

Source = TypeVar("Source", bound=InOrder)


def depth_of(plan: Plan) -> int:
    """How many batches are to be on their way beyond the one that is given."""
    return max((stage.ahead for stage in plan.place), default=0)


def ahead_of(plan: Plan, source: Source) -> Source | Ahead:
    """What a consumer gives, placed ahead of use where a stage asks for that; else the consumer."""
    depth = depth_of(plan)
    return Ahead(source, partial(_begun, plan), depth) if depth else source


def placed(plan: Plan, item: Any) -> Any:
    """A batch where it is to lie, if that is not done ahead."""
    if depth_of(plan):
        return item
    for stage in plan.place:
        item = stage.place(item)
    return item


def _begun(plan: Plan, item: Any) -> Callable[[], Any]:
    """Begin to place a batch; what is returned gives it."""
    for number, stage in enumerate(plan.place):
        if stage.ahead:
            return partial(_finished, plan, number, stage.begun(item))
        item = stage.place(item)
    return lambda: item


def _finished(plan: Plan, number: int, ready: Callable[[], Any]) -> Any:
    item = ready()
    for stage in plan.place[number + 1 :]:
        item = stage.place(item)
    return item


class Ahead(Delayed):
    """What a consumer gives, some batches later. After an error everything before it is given still.

    Args:
        source: gives the batches.
        begin: begins to place one; what it returns gives it.
        depth: batches that are begun beyond the one that is given.
    """

    def __init__(
        self, source: InOrder, begin: Callable[[Any], Callable[[], Any]], depth: int
    ) -> None:
        super().__init__(source)
        self._begin = begin
        self._depth = depth
        self._error: Exception | None = None
        self._cut = False  # whether batches on their way were let go

    def __next__(self) -> Any:
        wanted = min(len(self._taken) + 2, self._depth + 1)  # the first one does not wait for all
        while len(self._taken) < wanted and self._error is None:
            try:
                item, m, moved = self._fetch()
            except Exception as error:
                self._error = error
                break
            self._taken.append((self._begin(item), m, moved))
        if not self._taken:
            failed, self._error = self._error, None  # asked again, the source is asked again
            assert failed is not None
            raise failed
        ready = self._give()
        return ready()

    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """The state after the last batch given."""
        if not (self._taken or self._cut):
            return self._source.state(extra)
        return self._source.render(self._m, self.texts(), extra)

    def close(self) -> None:
        """Let go of what the source holds, and of batches on their way."""
        self._cut = self._cut or bool(self._taken)
        self._taken.clear()
        super().close()
