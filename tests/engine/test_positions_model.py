"""Any order of iterators, loads, states and epochs that are set, against a model of a few lines."""

from __future__ import annotations

import warnings
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples, rows_of, table_of_rows

PIPE = tp.from_arrow(table_of_rows(0, 30)).sharding_filter(2).shuffle(7, seed=2).batch(8)
LENGTH = 4
EPOCHS = [[rows_of(item) for item in PIPE] for _ in range(60)]


class Model:
    """Where a pipeline or a ``Loader`` stands, and its iterators.

    Attributes:
        upcoming: number of the next epoch.
        loaded: position that was loaded for it, as epoch and batches taken.
        offset: what is added to the caller's numbers.
        named: what the caller called the next epoch.
        places: each iterator's position; None before its first item.
        ended: iterators that have said that they have no more.
        last: the iterator that gave the last batch.
    """

    def __init__(self) -> None:
        self.upcoming, self.offset = 0, 0
        self.loaded: tuple[int, int] | None = None
        self.named: int | None = None
        self.places: list[tuple[int, int] | None] = []
        self.ended: set[int] = set()
        self.last: int | None = None

    def start(self) -> tuple[int, int]:
        return self.loaded or (self.upcoming, 0)

    def next(self, one: int) -> list[int] | None:
        place = self.places[one]
        if place is None:
            place = self.start()
            if self.named is not None:
                self.offset = place[0] - self.named
            self.upcoming, self.loaded, self.named = place[0] + 1, None, None
        epoch, taken = place
        if taken == LENGTH:
            self.ended.add(one)
            return None
        self.last = one
        self.places[one] = epoch, taken + 1
        return EPOCHS[epoch][taken]

    def load(self, epoch: int, taken: int) -> None:
        self.upcoming, self.loaded, self.offset, self.last = epoch, (epoch, taken), 0, None

    def set_epoch(self, epoch: int) -> bool:
        if self.loaded is None:
            number = epoch + self.offset
            if number < 0:
                return False
            if self.last in self.ended and number != self.upcoming:
                self.last = None
            self.upcoming = number
        self.named = epoch
        return True

    def state(self, one: int | None) -> dict[str, Any]:
        place = None if one is None else self.places[one]
        epoch, taken = self.start() if place is None else place
        return PIPE.state_at(taken, epoch=epoch)


WHICH = st.integers(0, 3)
OPERATIONS = st.one_of(
    st.just(("iter",)),
    st.tuples(st.just("next"), WHICH),
    st.tuples(st.just("next"), WHICH),
    st.tuples(st.just("rest"), WHICH),
    st.tuples(st.just("state"), WHICH),
    st.tuples(st.just("whole state")),
    st.tuples(st.just("peek")),
    st.tuples(st.just("load"), st.integers(0, 5), st.integers(0, LENGTH - 1)),
    st.tuples(st.just("set_epoch"), st.integers(0, 5)),
    st.tuples(st.just("other")),
)


@examples(300, often=25)
@given(st.sampled_from(["pipeline", "Loader"]), st.lists(OPERATIONS, min_size=10, max_size=25))
def test_what_is_given_and_saved_is_what_the_model_says(
    kind: str, operations: list[tuple[Any, ...]]
) -> None:
    pipe = PIPE.distributed(rank=0, world_size=1)  # which stands at the start
    subject: Any = tp.Loader(pipe, threads=0) if kind == "Loader" else pipe
    other = iter(pipe)
    model = Model()
    running: list[Any] = []
    for name, *values in operations:
        one = values[0] % len(running) if values and running else None
        if name == "iter":
            running.append(iter(subject))
            model.places.append(None)
        elif name in ("next", "rest") and one is not None:
            for _ in range(1 if name == "next" else LENGTH + 1):
                item = next(running[one], None)
                assert (None if item is None else rows_of(item)) == model.next(one)
        elif name == "state" and one is not None:
            assert running[one].state_dict() == model.state(one)
        elif name == "whole state":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert subject.state_dict() == model.state(model.last)
        elif name == "peek":
            epoch, taken = model.start()
            assert rows_of(subject.peek()) == EPOCHS[epoch][taken]
        elif name == "load":
            subject.load_state_dict(PIPE.state_at(values[1], epoch=values[0]))
            model.load(*values)
        elif name == "set_epoch":
            try:
                subject.set_epoch(values[0])
            except tp.ConfigError:
                assert not model.set_epoch(values[0])
            else:
                assert model.set_epoch(values[0])
        elif name == "other" and kind == "Loader":
            next(other, None)  # an iterator of the loader's pipeline
