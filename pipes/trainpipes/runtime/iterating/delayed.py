"""What a consumer gives, some items after it gave it, with the state of what was given."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

__all__ = ["Delayed", "InOrder"]


class InOrder(Protocol):
    """What gives one rank's batches in order, and knows the state after each: see ``Consumer``."""

    @property
    def epoch(self) -> int: ...
    @property
    def m(self) -> int: ...
    @property
    def upcoming(self) -> int: ...
    def __next__(self) -> Any: ...
    def texts(self) -> dict[int, str]: ...
    def moved(self) -> dict[int, str]: ...
    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]: ...
    def next_pass_state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]: ...
    def close(self) -> None: ...
    def render(
        self, m: int, texts: dict[int, str], extra: dict[str, Any] | None
    ) -> dict[str, Any]: ...


class Delayed:
    """Looks like a consumer that is where the last item given was.

    A subclass takes items from ``source`` with ``_fetch``, gives them with ``_give``, and says what
    the state is.

    Args:
        source: gives the items.
    """

    def __init__(self, source: InOrder) -> None:
        self._source = source
        #: Items that were taken and not given, each with the position after it and what moved there.
        self._taken: deque[tuple[Any, int, dict[int, str]]] = deque()
        self._texts: dict[int, str] | None = None  # of the shards' cursors, from the first item on
        self._m = source.m
        self._moved: dict[int, str] = {}

    @property
    def epoch(self) -> int:
        return self._source.epoch

    @property
    def m(self) -> int:
        return self._m

    @property
    def upcoming(self) -> int:
        return self._source.upcoming

    def _fetch(self) -> tuple[Any, int, dict[int, str]]:
        """The source's next item, with the position after it."""
        if self._texts is None:
            self._texts = self._source.texts()
        item = next(self._source)
        return item, self._source.m, self._source.moved()

    def _give(self) -> Any:
        """The first of the items that were taken."""
        item, self._m, self._moved = self._taken.popleft()
        assert self._texts is not None
        self._texts.update(self._moved)
        return item

    def texts(self) -> dict[int, str]:
        return self._source.texts() if self._texts is None else dict(self._texts)

    def moved(self) -> dict[int, str]:
        return self._moved

    def render(self, m: int, texts: dict[int, str], extra: dict[str, Any] | None) -> dict[str, Any]:
        return self._source.render(m, texts, extra)

    def next_pass_state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._source.next_pass_state(extra)

    def close(self) -> None:
        """Let go of what the source holds."""
        self._source.close()
