"""Batches on their way to a device while earlier ones are trained on, with the state of what was given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from trainpipes.runtime.iterating.agreement import InOrder
from trainpipes.runtime.planning.plan import Plan

__all__ = ["Ahead", "ahead_of", "placed"]

Source = TypeVar("Source", bound=InOrder)


def depth_of(plan: Plan) -> int:
    """How many batches are to be on their way beyond the one that is given."""
    return max((getattr(stage, "ahead", 0) for stage in plan.place), default=0)


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
        if getattr(stage, "ahead", 0):
            return partial(_finished, plan, number, stage.begun(item))
        item = stage.place(item)
    return lambda: item


def _finished(plan: Plan, number: int, ready: Callable[[], Any]) -> Any:
    item = ready()
    for stage in plan.place[number + 1 :]:
        item = stage.place(item)
    return item


class Ahead:
    """What a consumer gives, some batches later.

    Looks like a consumer. After an error everything before it is given still.

    Args:
        source: gives the batches.
        begin: begins to place one; what it returns gives it.
        depth: batches that are begun beyond the one that is given.
    """

    def __init__(
        self, source: InOrder, begin: Callable[[Any], Callable[[], Any]], depth: int
    ) -> None:
        self._source = source
        self._begin = begin
        self._depth = depth
        self._begun: deque[tuple[Callable[[], Any], int, dict[int, str]]] = deque()
        self._texts: dict[int, str] | None = None
        self._m = source.m
        self._moved: dict[int, str] = {}
        self._error: Exception | None = None
        self._cut = False  # whether batches on their way were let go

    @property
    def epoch(self) -> int:
        return self._source.epoch

    @property
    def m(self) -> int:
        return self._m

    @property
    def upcoming(self) -> int:
        return self._source.upcoming

    def __next__(self) -> Any:
        if self._texts is None:
            self._texts = self._source.texts()
        wanted = min(len(self._begun) + 2, self._depth + 1)  # the first one does not wait for all
        while len(self._begun) < wanted and self._error is None:
            try:
                item = next(self._source)
            except Exception as error:
                self._error = error
                break
            self._begun.append((self._begin(item), self._source.m, self._source.moved()))
        if not self._begun:
            failed, self._error = self._error, None  # asked again, the source is asked again
            assert failed is not None
            raise failed
        ready, self._m, self._moved = self._begun.popleft()
        self._texts.update(self._moved)
        return ready()

    def texts(self) -> dict[int, str]:
        return self._source.texts() if self._texts is None else dict(self._texts)

    def moved(self) -> dict[int, str]:
        return self._moved

    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """The state after the last batch given."""
        if self._texts is None or not (self._begun or self._cut):
            return self._source.state(extra)
        return self._source.render(self._m, self._texts, extra)

    def render(self, m: int, texts: dict[int, str], extra: dict[str, Any] | None) -> dict[str, Any]:
        return self._source.render(m, texts, extra)

    def next_pass_state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._source.next_pass_state(extra)

    def close(self) -> None:
        """Let go of what the source holds, and of batches on their way."""
        self._cut = self._cut or bool(self._begun)
        self._begun.clear()
        self._source.close()
