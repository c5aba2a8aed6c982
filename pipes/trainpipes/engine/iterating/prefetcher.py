"""Items taken before they are asked for: batches on their way to a device while earlier ones are trained on,
and the next item where it is to be known whether there is one.

Used by the thread that iterates; the copies are the device's own work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from trainpipes.engine.iterating.consumer_iterator import ConsumerIterator, ConsumerState
from trainpipes.kinds.stage_kinds import PlaceStage


class Prefetcher:
    """Takes items from an iterator ahead of use, and gives them later; its state is that of the last one
    given. An error, or the end, is taken and given in its turn, as items are; asked again after one, the
    source is asked again.

    Args:
        source: gives the items.
        stages: that place them, in order, such as on a device.
    """

    def __init__(
        self, source: ConsumerIterator | Prefetcher, stages: Sequence[PlaceStage] = ()
    ) -> None:
        self._source = source
        self._stages = stages
        #: Items that are begun beyond the one that is given.
        self._depth = max((stage.ahead for stage in stages), default=0)
        #: Of each that was taken: what gives it, or the error that came in its place; the state after it.
        self._taken: deque[tuple[Any, Exception | None, ConsumerState]] = deque()
        #: After the last item given; ``moved`` has what the owner was not told yet. None till one is taken.
        self._last: ConsumerState | None = None

    def __next__(self) -> Any:
        if not self._depth and self._last is None:
            return _placed(self._stages, next(self._source))
        self._look_ahead()
        return self._give()

    def is_last(self, alone: bool) -> bool:
        """Whether the item given last is the last of the pass. From here on one more item is taken than
        is given, and only where the pass's end is not known by arithmetic.

        Args:
            alone: whether this consumer is the only one, so that the pass is over where it ends.
        """
        if not self._depth and isinstance(self._source, Prefetcher):
            return self._source.is_last(alone)
        if self._last is None:
            self._last = self._source.state()
        if not self._last.over and not self._taken:
            self._look_ahead()
        if self._taken and isinstance(self._taken[0][1], StopIteration):
            give, end, state = self._taken[0]
            over = alone or state.over
            self._taken[0] = give, end, state._replace(over=over)
            self._last = self._last._replace(over=over)  # though nobody was told yet
            return True
        return self._last.over

    def _look_ahead(self) -> None:
        """Have taken what comes next, at least."""
        wanted = min(len(self._taken) + 2, self._depth + 1)  # the first one does not wait for all
        while len(self._taken) < wanted and self._error is None:
            self._take()

    @property
    def _error(self) -> Exception | None:
        """What was taken last, if that is an error or the end (``StopIteration``)."""
        return self._taken[-1][1] if self._taken else None

    def _take(self) -> None:
        """Take one more item."""
        give = error = None
        if self._last is None:
            self._last = self._source.state()
        try:
            give = self._begun(next(self._source))
        except Exception as raised:
            error = raised
        self._taken.append((give, error, self._source.state()))

    def _give(self) -> Any:
        """The next item that was taken; raises the error that came in its place. An item that can't be placed
        is not given."""
        if not self._taken:
            raise StopIteration
        give, error, state = self._taken[0]
        item = give() if error is None else None
        del self._taken[0]
        self._last = state._replace(moved={**self.state().moved, **state.moved})
        if error is not None:
            raise error
        return item

    def _begun(self, item: Any) -> Callable[[], Any]:
        """Begin to place an item; what is returned gives it."""
        try:
            return _begin(self._stages, item)
        except Exception:  # it is tried again, and raised, when the item is due
            return lambda: _placed(self._stages, item)

    def state(self) -> ConsumerState:
        """The state after the last item given."""
        last = self._last
        if last is None:
            return self._source.state()
        self._last = last._replace(moved={})
        return last

    def close(self) -> None:
        """Let threads and worker processes go. The state stays."""
        self._source.close()
        self._taken.clear()


def _begin(stages: Sequence[PlaceStage], item: Any) -> Callable[[], Any]:
    for number, stage in enumerate(stages):
        if stage.ahead:
            ready, later = stage.begun(item), stages[number + 1 :]
            return lambda: _placed(later, ready())
        item = stage.place(item)
    return lambda: item


def _placed(stages: Sequence[PlaceStage], item: Any) -> Any:
    for stage in stages:
        item = stage.place(item)
    return item
