"""An iterator knows whether the item that it gave is the last, and its state does not run ahead for that."""

from __future__ import annotations

import time
from typing import Any

import pytest

import trainpipes as tp


def _fails(row: int) -> int:
    if row == 6:
        raise ValueError("row 6")
    return row


def numbers(count: int = 23) -> tp.Pipeline:
    return tp.from_dataset(range(count)).sharding_filter(4).shuffle(8, seed=0)


PIPELINES = {
    "counted": lambda: numbers().batch(3),
    "filtered": lambda: numbers().filter(lambda row: row % 3 > 0).batch(2),
    "filtered to nothing": lambda: numbers().filter(lambda row: row == 5).batch(2),
    "ragged": lambda: tp.from_dataset(range(23)).sharding_filter(4, tail="uneven").batch(3),
    "repeated twice": lambda: numbers().filter(lambda row: row % 3 > 0).repeat(2).batch(2),
    "placed": lambda: numbers().filter(lambda row: row > 4).batch(2).to("cpu"),
    "rows": lambda: numbers(),
}


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *((name, 0) for name in PIPELINES),
        ("repeated twice", 2),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("ragged", "placed")),
    ],
)
def test_the_last_item_is_known_and_the_state_is_that_of_the_item_given(
    name: str, workers: int
) -> None:
    pipe = PIPELINES[name]()
    plain, asked = tp.Loader(pipe), tp.Loader(pipe, num_workers=workers)
    epochs = [list(plain) for _ in range(3)]
    for epoch in (0, 1):
        batches, given, last = iter(asked), [], []
        assert not batches.is_last()
        for batch in batches:
            given.append(batch)
            last.append(batches.is_last())
            resumed = tp.Loader(pipe)
            resumed.load_state_dict(asked.state_dict())
            rest = epochs[epoch][len(given) :] or epochs[epoch + 1]
            assert list(resumed) == rest
        assert given == epochs[epoch]
        assert last == [False] * (len(given) - 1) + [True]
        assert asked.state_dict()["epoch"] == epoch + 1, "where the last is known, the pass is over"


@pytest.mark.parametrize("name", ["counted", "ragged", "rows"])
def test_each_rank_knows_its_last_item(name: str) -> None:
    for rank in range(4):
        batches = iter(tp.Loader(PIPELINES[name]().distributed(rank=rank, world_size=4)))
        last = [batches.is_last() for _ in batches]
        assert last == [False] * (len(last) - 1) + [True]


def test_no_item_of_a_pipeline_without_end_is_the_last() -> None:
    taken: list[int] = []
    pipe = tp.from_dataset(range(4)).map(lambda row: taken.append(row) or row).repeat().batch(2)
    batches = iter(tp.Loader(pipe, threads=0))
    for _ in range(5):
        next(batches)
        assert not batches.is_last()
    assert len(taken) <= 10, "and none is made in advance to know it"


def test_an_error_that_comes_next_is_raised_when_it_is_due() -> None:
    pipe = tp.from_dataset(range(9)).map(_fails).filter(lambda row: True).batch(2)
    loader = tp.Loader(pipe)
    batches = iter(loader)
    for _ in range(3):
        batch: Any = next(batches)
        assert not batches.is_last()
        assert not batches.is_last(), "however often it is asked"
    assert batch == [4, 5]
    assert loader.state_dict()["batches"] == 3
    with pytest.raises(ValueError, match="row 6"):
        next(batches)


def test_an_iterator_that_is_asked_goes_on_where_a_state_says() -> None:
    pipe = PIPELINES["filtered"]()
    loader, batches = tp.Loader(pipe), iter(tp.Loader(pipe))
    first = list(loader)
    next(batches)
    state = batches.state_dict()
    for _ in range(2):
        next(batches)
        batches.is_last()
    batches.load_state_dict(state)
    assert not batches.is_last()
    assert [(batch, batches.is_last()) for batch in batches] == [
        *((batch, False) for batch in first[1:-1]),
        (first[-1], True),
    ]


def test_waiting_for_the_batch_that_says_whether_one_is_the_last_counts() -> None:
    """Trainers ask after each batch, and would seem to wait for none."""

    def slow(row: int) -> int:
        time.sleep(0.002)
        return row

    loader = tp.Loader(tp.from_dataset(range(40)).map(slow).batch(4), threads=0)
    batches = iter(loader)
    assert [batches.is_last() for _ in batches] == [False] * 9 + [True]
    assert loader.wait_seconds > 40 * 0.002


@pytest.mark.parametrize("name", PIPELINES)
def test_the_number_of_the_last_item_stays_after_it(name: str) -> None:
    batches = iter(tp.Loader(PIPELINES[name]()))
    numbers = [(batches.last_item(), batches.is_last())[0] for _ in batches]
    assert batches.last_item() == numbers[-1]
