"""What stages and sources of one's own must not be: refused with one message, or done as it was meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import trainpipes as tp
from trainpipes.errors import ConfigError, DataError, StateError


class Own(tp.Source):
    """Rows 0, 1, 2, … in blocks, read by a function."""

    lengths: Any
    reads: Any = None
    prints: Any = None

    def open(self) -> Any:
        return OwnRows(self.lengths, self.reads, self.prints)


class OwnRows(tp.RowSource):
    def __init__(self, lengths: Any, reads: Any, prints: Any) -> None:
        self.lengths, self.reads, self.prints = lengths, reads, prints

    def read(self, block: int, start: int, stop: int) -> Any:
        if self.reads is not None:
            return self.reads(block, start, stop)
        first = int(np.sum(self.lengths[:block]))
        return [{"n": first + n} for n in range(start, stop)]

    def fingerprint(self) -> Any:
        return {"rows": 1} if self.prints is None else self.prints


def own(lengths: Any = (10, 10), **options: Any) -> tp.Pipeline:
    return tp.Pipeline([Own(np.array(lengths), **options)])


READS: dict[str, tuple[Callable[[int, int, int], Any], str]] = {
    "too few": (lambda b, low, high: pa.table({"n": range(low, high - 1)}), "got [0-9]+ rows"),
    "too many": (lambda b, low, high: pa.table({"n": range(10)}), "got 10 rows"),
    "too few dicts": (lambda b, low, high: [{"n": 1}] * (high - low - 1), "got [0-9]+ rows"),
    "nothing": (lambda b, low, high: None, "got NoneType"),
    "a dict": (lambda b, low, high: {"n": [1]}, "got dict"),
    "an array": (lambda b, low, high: np.arange(high - low), "got ndarray"),
    "a tuple": (lambda b, low, high: tuple(range(high - low)), "got tuple"),
}


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("name", READS)
def test_a_source_that_gives_other_rows_than_it_was_asked_for_is_refused(
    name: str, shuffled: bool
) -> None:
    read, said = READS[name]
    pipe = own([10, 10], reads=read).sharding_filter(2)
    pipe = pipe.shuffle(4) if shuffled else pipe
    with pytest.raises(DataError, match=rf"OwnRows.read\([0-9, ]+\) returns the .* {said}"):
        list(pipe.batch(3))


@pytest.mark.parametrize(
    "lengths", [[3, -1, 5], [2.5, 2.5], [[1, 2]], [True, False], None, "ab", [2**62, 2**62]]
)
def test_lengths_that_are_no_counts_are_refused(lengths: Any) -> None:
    with pytest.raises(ConfigError, match="lengths must be the rows of each block"):
        len(tp.Pipeline([Own(lengths)]))


@pytest.mark.parametrize("prints", [{"rows": np.int64(3)}, {"rows": {1}}, {"rows": b"x"}])
def test_a_fingerprint_that_no_state_can_keep_is_refused_at_once(prints: Any) -> None:
    with pytest.raises(ConfigError, match=r"fingerprint\(\) must be a dict .* as JSON: "):
        next(iter(own(prints=prints)))


@pytest.mark.parametrize("opened", [None, [1], OwnRows, "rows"])
def test_what_opens_no_rows_is_refused(opened: Any) -> None:
    class Opens(tp.Source):
        what: Any

        def open(self) -> Any:
            return self.what

    with pytest.raises(ConfigError, match=r"open\(\) returns a RowSource or a RowStream, got"):
        list(tp.Pipeline([Opens(opened)]))


def test_a_source_without_rows_by_number_is_not_shuffled_as_if_it_had() -> None:
    class ByNumber(Own):
        random_access = True

    pipe = tp.Pipeline([ByNumber(np.array([10, 10]))]).shuffle(scope="global")
    with pytest.raises(ConfigError, match=r"reads rows by number, and .* cannot"):
        list(pipe)


# Streams


class Slowly(tp.Source):
    """Rows of a stream that gives a few at a time, as a socket does."""

    rows: int
    at_once: int = 7
    states: bool = False

    def open(self) -> tp.RowStream:
        return SlowRows(self.rows, self.at_once, self.states)


class SlowRows(tp.RowStream):
    def __init__(self, rows: int, at_once: int, states: bool) -> None:
        self.rows, self.at_once, self.states = rows, at_once, states

    def open(self, epoch: int, state: dict[str, Any] | None) -> tp.StreamReader:
        return SlowReader(self.rows, self.at_once, self.states)

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": self.rows}


class SlowReader(tp.StreamReader):
    def __init__(self, rows: int, at_once: int, states: bool) -> None:
        self.left, self.at_once, self.states = list(range(rows)), at_once, states

    def read(self, rows: int) -> list[int] | None:
        found, self.left = (
            self.left[: min(rows, self.at_once)],
            self.left[min(rows, self.at_once) :],
        )
        return found or None

    def state(self) -> dict[str, Any]:
        return {"left": len(self.left)} if self.states else {}


@pytest.mark.parametrize("states", [False, True])
def test_a_stream_that_gives_a_few_rows_at_a_time_gives_all_of_them(states: bool) -> None:
    rows = tp.Pipeline([Slowly(50, states=states)])
    assert list(rows) == list(range(50))
    assert sorted(rows.shuffle(20)) == list(range(50))
    pipe = rows.sharding_filter(4).shuffle(20).batch(2)
    run = iter(pipe)
    first = [next(run) for _ in range(5)]
    state = run.state_dict()
    rest = list(run)
    assert sorted(row for batch in first + rest for row in batch) == list(range(50))
    again = iter(pipe)
    again.load_state_dict(state)
    assert list(again) == rest


# Stages


def test_attributes_that_are_no_options_are_refused_and_cached_ones_are_not() -> None:
    class Sets(tp.RowStage):
        hits = 0

        def check(self) -> None:
            object.__setattr__(self, "hits", 100)

    class Caches(tp.RowStage):
        @cached_property
        def hits(self) -> int:
            return 100

        def check(self) -> None:
            assert self.hits

        def apply(self, row: int) -> int:
            return row + self.hits

    with pytest.raises(ConfigError, match=r"check\(\) sets 'hits', and a stage keeps its options"):
        Sets()
    assert list(tp.from_dataset([1]).then(Caches())) == [101]


@pytest.mark.parametrize("name", ["role", "check", "name", "options", "process", "apply"])
def test_an_option_with_a_name_that_every_stage_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"every stage has '{name}'.* another name"):
        type("Odd", (tp.RowStage,), {"__annotations__": {name: str}, name: "x"})


def test_a_class_that_says_nothing_of_how_it_is_carried_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="RowStage, TableStage or BatchStage"):
        type("Bare", (tp.Stage,), {})
    with pytest.raises(ConfigError, match="__post_init__"):
        type("Late", (tp.RowStage,), {"__post_init__": lambda self: None})


def test_a_type_that_cannot_be_looked_up_is_not_looked_at() -> None:
    odd = type("Odd", (tp.RowStage,), {"__annotations__": {"x": "dict['a', 1 / 0]"}})
    assert odd(x=3).options == {"x": 3}


def test_free_options_are_those_of_the_class_and_of_those_above_it() -> None:
    class Above(tp.RowStage):
        free = frozenset({"shown"})
        shown: int = 0

        def apply(self, row: Any) -> Any:
            return row

    class Below(Above):
        free = frozenset({"told"})
        told: int = 0

    rows = tp.from_dataset(range(9))
    run = iter(rows.then(Below(shown=1, told=1)))
    next(run)
    again = iter(rows.then(Below(shown=2, told=2)))
    again.load_state_dict(run.state_dict())
    assert list(again) == list(range(1, 9))
    with pytest.raises(
        ConfigError, match="free must be a frozenset of options, and there is no 'other'"
    ):
        type("Wrong", (tp.RowStage,), {"free": frozenset({"other"})})


def weights() -> Sequence[tuple[Any, Any]]:
    tensor = torch.zeros(5000)
    other = tensor.clone()
    other[9:2000] = 7
    table = pa.table({"x": range(3000)})
    return [
        (tensor, other),
        (table, pa.table({"x": [*range(1500), 0, *range(1501, 3000)]})),
        (np.array(["a", "b"], dtype=object), np.array(["a", "c"], dtype=object)),
    ]


class Weighs(tp.RowStage):
    by: Any

    def apply(self, row: Any) -> Any:
        return row


@pytest.mark.parametrize("number", range(3))
def test_a_resume_with_other_values_of_an_option_is_refused_however_long_they_are(
    number: int,
) -> None:
    one, other = weights()[number]
    same, _ = weights()[number]
    rows = tp.from_dataset(range(9))
    run = iter(rows.then(Weighs(one)))
    next(run)
    state = run.state_dict()
    iter(rows.then(Weighs(same))).load_state_dict(state)
    with pytest.raises(StateError, match="weighs/by"):
        iter(rows.then(Weighs(other))).load_state_dict(state)


def test_a_wrong_call_names_the_method_and_its_options() -> None:
    with pytest.raises(TypeError, match=r"batch\(\): too many positional arguments; it is batch\("):
        tp.from_dataset([1]).batch(2, True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"map\(\): missing a required argument: 'fn'; it is map\("):
        tp.from_dataset([1]).map()  # type: ignore[call-arg]
