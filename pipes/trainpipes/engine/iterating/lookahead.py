"""Items taken before they are asked for: to copy them to a device, to know the last item, and to
agree with other ranks on the end.

Where shards end at unknown steps, each rank looks 2 to 16 steps ahead, and all agree, by one
all-reduce of a number, on the first batch that any of them lacks. There the epoch ends for all:
otherwise a rank that has ended would leave the others waiting in their next collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import get_worker_info

from trainpipes._internal.activity import doing
from trainpipes.engine.iterating.consumer import Consumer, ConsumerPosition
from trainpipes.engine.iterating.epoch_end import (
    MANY,
    MOST_COUNTED,
    Agreement,
    agreement_over,
    say_uneven,
)
from trainpipes.errors import TopologyError
from trainpipes.interfaces.stage_kinds import DeviceStage

#: Most items that are held for ranks to agree on; the number grows by 1 an item.
AHEAD = 16
_NONE_MISSING = (1 << 62) - 1


def items_to_give(consumer: Consumer) -> Iterator[Any]:
    """The items of a consumer, on the device where they are asked for; taken ahead only for a reason. None
    is lost that cannot be placed.
    """
    return Lookahead(consumer) if consumer.ends_together or consumer.stages else consumer


@dataclass(slots=True, eq=False)
class _Taken:
    """An item, or the error or ``StopIteration`` in its place; the state after it; what gives it."""

    item: Any
    error: Exception | None
    state: ConsumerPosition
    give: Callable[[], Any] | None = None


class Lookahead(Iterator[Any]):
    """The items of a consumer, some taken before they are asked for. It is used only where device
    stages place items, where ranks must agree on an epoch's end, or once somebody asks whether an item
    is the last. The state is that of the items given.

    Where ranks end together, an error is raised only after they have agreed, and on every later call:
    the other ranks have gone on. A batch is given only where all those of its step are there.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._stages = consumer.stages
        #: Items begun ahead of the item given last.
        self._depth = max((stage.ahead for stage in self._stages), default=0)
        self._taken: deque[_Taken] = deque()
        #: An item that was made and is yet to be among them.
        self._made: list[Any] = []
        self._agrees = consumer.ends_together
        #: How many items a rank without an error holds, and on how many all ranks agreed: the same on
        #: all ranks. One is always left, so that one rank alone may call ``is_last``.
        self._held = self._agreed = 0
        #: Batches of a step that this rank gets, and how many of the step at hand it has yet to get.
        self._of_step = self._to_come = consumer.step // consumer.topology.world_size
        self._ends = False
        self._raised: Exception | None = None
        topology = consumer.topology
        if self._agrees and topology.world_size > 1 and get_worker_info() is not None:
            raise TopologyError(
                "row counts of this pipeline are not known in advance, so that several ranks would end an "
                f"epoch at different steps and hang, got {topology.world_size} ranks with DataLoader "
                "workers, which cannot agree: add .repeat() and count steps, or use trainpipes.Loader"
            )

    def __next__(self) -> Any:
        if self._raised is not None:
            raise self._raised
        self._look_ahead()
        return self._give()

    def is_last(self) -> bool:
        """Whether the item given last ends the pass; asks no other rank. May take one more item."""
        consumer, position = self._consumer, self._given()
        if self._agrees:
            return position.over
        if not position.over and not self._taken:
            self._look_ahead()
        if self._taken and isinstance(self._taken[0].error, StopIteration):
            coming, topology = self._taken[0], consumer.topology
            over = coming.state.over or topology.world_size * topology.num_workers == 1
            coming.state = coming.state._replace(over=over)
            consumer.gave(position._replace(over=over))  # before StopIteration is raised
            return True
        return position.over

    def _look_ahead(self) -> None:
        if self._agrees:
            self._agree()
        else:
            # The first item does not wait for all.
            self._take(min(len(self._taken) + 2, self._depth + 1))
        for coming in islice(self._taken, self._depth + 1 if self._depth else 0):
            if coming.give is None and coming.error is None:
                coming.give, coming.item = self._begun(coming.item), None

    def _given(self) -> ConsumerPosition:
        """Where the consumer stands after the item given last; from now on it notes that."""
        consumer = self._consumer
        if consumer.noted is None:
            state = consumer.made_up_to()
            consumer.gave(state)
            consumer.forget_moves(state)
        assert consumer.noted is not None
        return consumer.noted

    @property
    def _error(self) -> Exception | None:
        return self._taken[-1].error if self._taken else None

    def _take(self, count: int) -> None:
        self._given()
        consumer = self._consumer
        while len(self._taken) < count and self._error is None:
            error: Exception | None = None
            if not self._made:
                try:
                    self._made.extend(islice(consumer, 1))  # in C: Ctrl-C loses none
                    error = None if self._made else StopIteration()
                except Exception as raised:
                    error = raised
            state = consumer.made_up_to()
            self._taken += (_Taken(self._made[0] if self._made else None, error, state),)
            self._made = []  # with no call since it was taken
            consumer.forget_moves(state)

    def _agree(self) -> None:
        """Take the next item, and agree where that is due."""
        if self._ends:
            return
        needed = self._to_come
        if needed == 1 < self._of_step:  # is_last() is to know of the next step
            needed += self._of_step
        held = max(self._depth + 1, needed, min(self._held + 2, AHEAD))
        is_due = self._agreed < needed or self._agreed <= held // 2
        agree = agreement_over(self._consumer.topology) if is_due else None
        self._take(held)
        self._held = held
        if agree is None:
            return
        ended = isinstance(self._error, StopIteration)
        first = agree(self._taken[-1].state.upcoming if ended else _NONE_MISSING, False)
        if first != _NONE_MISSING:
            origin, step = self._consumer.origin, self._consumer.step
            end = origin + (first - origin) // step * step
            past = sum(taken.error is None and taken.state.m > end for taken in self._taken)
            self._end_at(end)
            self._ends = True  # not before: Ctrl-C may come
            self._say_what_is_left(agree, end, past, first)
        self._agreed = held

    def _say_what_is_left(self, agree: Agreement, end: int, past: int, first: int) -> None:
        """All ranks count the batches that they have after the end; one says how many."""
        consumer, left = self._consumer, past
        with suppress(Exception):  # of a row that no rank gets
            left += consumer.rest(MOST_COUNTED)
        left = agree(left if left < MOST_COUNTED else left + MANY, True)
        consumer.close()
        if consumer.topology.rank == 0:
            say_uneven(
                consumer.plan,
                consumer.topology,
                consumer.pass_number,
                end,
                left,
                first,
                consumer.step,
            )

    def _end_at(self, end: int) -> None:
        while self._taken:
            last = self._taken[-1]
            if last.error is not None and last.state.upcoming < end:
                return
            if last.error is None and last.state.m <= end:
                last.state = last.state._replace(over=True)
                return
            self._taken.pop()
        self._consumer.gave(self._given()._replace(over=True))

    def _give(self) -> Any:
        if not self._taken:
            raise StopIteration
        coming, consumer = self._taken[0], self._consumer
        item = None
        if coming.error is None:
            item = _placed(self._stages, coming.item) if coming.give is None else coming.give()
        state = coming.state
        if coming.error is not None:  # in whose place other shards may have ended
            state = state._replace(upcoming=self._given().upcoming)
        # As ``gave`` does, but with no call: Ctrl-C would come between what is given and what is noted.
        consumer._cursors |= state.moved
        consumer.noted = state
        del self._taken[0]
        if coming.error is not None:
            if self._agrees:
                self._raised = coming.error
            raise coming.error
        self._held, self._agreed = self._held - 1, self._agreed - 1
        self._to_come = (self._to_come - 1) or self._of_step
        return item

    def _begun(self, item: Any) -> Callable[[], Any]:
        try:
            return _begin(self._stages, item)
        except Exception:  # raised again when the item is due
            return lambda: _placed(self._stages, item)


def _begin(stages: Sequence[DeviceStage], item: Any) -> Callable[[], Any]:
    for number, stage in enumerate(stages):
        if stage.ahead:
            ready, later = stage.begun(item), stages[number + 1 :]
            return lambda: _placed(later, ready())
        item = stage.place(item)
    return lambda: item


def _placed(stages: Sequence[DeviceStage], item: Any) -> Any:
    for stage in stages:
        with doing(stage):
            item = stage.place(item)
    return item
