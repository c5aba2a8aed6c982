"""What gives a rank's items, and how some are taken before they are asked for. Used by the thread that
iterates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NamedTuple, Protocol

__all__ = ["ConsumerState", "DeliveredState", "ItemIterator"]


class ConsumerState(NamedTuple):
    """Where a consumer stands after the last item that it gave.

    Args:
        m: micro-batches of the pass that all ranks together have taken: that item's step is over.
        upcoming: number of the micro-batch that comes next. Where the consumer has ended at one that is
            missing, the number of that one.
        over: whether the pass is over: what is saved then is the start of the next one.
        moved: cursors, as JSON, of the shards that moved since the state was asked for before; the first
            time, of all. Empty where the pipeline is counted.
    """

    m: int
    upcoming: int
    over: bool
    moved: dict[int, str]


class ItemIterator(Protocol):
    """Gives one rank's items in the order of m. Only its owner asks for its state."""

    def __next__(self) -> Any: ...

    def state(self) -> ConsumerState:
        """The state after the last item given."""
        ...

    def close(self) -> None:
        """Let threads and worker processes go. The state stays."""
        ...


class DeliveredState(ABC):
    """Takes items from an iterator ahead of use, and gives them later; its state is that of the last one
    given. An error, or the end, is taken and given in its turn, as items are. How many are taken ahead, and
    when, is for ``__next__`` to say.

    Args:
        source: gives the items.
    """

    def __init__(self, source: ItemIterator) -> None:
        self._source = source
        self._taken: deque[tuple[Any, Exception | None, ConsumerState]] = deque()
        self._last: ConsumerState | None = None  # ``moved`` has what the owner was not told yet

    @abstractmethod
    def __next__(self) -> Any: ...

    @property
    def _error(self) -> Exception | None:
        """What was taken last, if that is an error or the end (``StopIteration``)."""
        return self._taken[-1][1] if self._taken else None

    def _begun(self, item: Any) -> Any:
        """What is kept of an item that is taken."""
        return item

    def _finished(self, begun: Any) -> Any:
        """The item, of what was kept. If that fails, it is not given."""
        return begun

    def _take(self) -> None:
        """Take one more item."""
        item = error = None
        if self._last is None:
            self._last = self._source.state()
        try:
            item = self._begun(next(self._source))
        except Exception as raised:
            error = raised
        self._taken.append((item, error, self._source.state()))

    def _give(self) -> Any:
        """The next item that was taken; raises the error that came in its place."""
        if not self._taken:
            raise StopIteration
        item, error, state = self._taken[0]
        if error is None:
            item = self._finished(item)
        del self._taken[0]
        self._last = state._replace(moved={**self.state().moved, **state.moved})
        if error is not None:
            raise error
        return item

    def state(self) -> ConsumerState:
        last = self._last
        if last is None:
            return self._source.state()
        self._last = last._replace(moved={})
        return last

    def close(self) -> None:
        self._source.close()
        self._taken.clear()
