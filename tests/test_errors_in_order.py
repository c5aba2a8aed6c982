"""A batch that fails is raised when it is due: all before it are given first, whoever makes them ahead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa
import pytest

import trainpipes as tp

ROWS = 600
TABLE = pa.table({"x": list(range(ROWS)), "input_ids": [[n] * (1 + n % 7) for n in range(ROWS)]})


class Odd(Exception):
    """Raised for a row."""


class FailsAt:
    """Keeps two of three rows, and fails at some."""

    def __init__(self, *rows: int) -> None:
        self.rows = rows

    def __call__(self, row: dict[str, Any]) -> Any:
        if row["x"] in self.rows:
            raise Odd(f"cannot take row {row['x']}")
        return row["x"] % 3 > 0


def mapped(*rows: int) -> tp.Pipeline:
    """Counts are known."""
    fails = FailsAt(*rows)

    def same(row: dict[str, Any]) -> dict[str, Any]:
        fails(row)
        return row

    dealt = tp.from_arrow(TABLE).sharding_filter(12).shuffle(50, seed=3)
    return dealt.map(same, version="1").batch(4)


def filtered(*rows: int) -> tp.Pipeline:
    """Counts are not known."""
    dealt = tp.from_arrow(TABLE).sharding_filter(12).shuffle(50, seed=3)
    return dealt.filter(FailsAt(*rows), version="1").batch(4)


SLOW = partial(pytest.param, marks=pytest.mark.slow)
WAYS: dict[str, Callable[[tp.Pipeline], Any]] = {
    "pipeline": lambda pipe: pipe,
    "no threads": lambda pipe: tp.Loader(pipe, threads=0),
    "threads": lambda pipe: tp.Loader(pipe, threads=3),
    "one worker": lambda pipe: tp.Loader(pipe, num_workers=1),
    "workers": lambda pipe: tp.Loader(pipe, num_workers=3),
    "ahead": lambda pipe: tp.Loader(pipe.to("cpu", depth=5), threads=2),
    "workers, ahead": lambda pipe: tp.Loader(pipe.to("cpu", depth=5), num_workers=2),
}


@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [mapped, filtered])
@pytest.mark.parametrize("number", [SLOW(0), 1, SLOW(20), 43])
def test_batches_before_one_that_fails_are_given(make: Any, way: str, number: int) -> None:
    expected = list(make())
    failing = expected[number][-1]["x"]
    batches = iter(WAYS[way](make(failing)))
    assert list(islice(batches, number)) == expected[:number]
    for _ in range(3):
        with pytest.raises(Odd, match=f"cannot take row {failing}"):
            next(batches)


@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("way", ["pipeline", "threads", "workers", "workers, ahead"])
@pytest.mark.parametrize("make", [mapped, filtered])
def test_the_state_at_an_error_goes_on_with_the_batch_that_failed(make: Any, way: str) -> None:
    expected = list(make())
    loader = WAYS[way](make(expected[20][-1]["x"]))
    with pytest.raises(Odd):
        list(loader)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == expected[20:]


@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_of_several_workers_that_fail_the_one_whose_batch_is_due_first_is_heard(
    persistent_workers: bool,
) -> None:
    expected = list(mapped())
    failing = [expected[number][0]["x"] for number in (31, 17, 18)]
    loader = tp.Loader(mapped(*failing), num_workers=3, persistent_workers=persistent_workers)
    for _ in range(2):
        batches = iter(loader)
        with pytest.raises(Odd, match=r"cannot take row \d+"):
            list(batches)
        loader.load_state_dict(tp.Loader(mapped()).state_dict())
    assert list(islice(loader, 17)) == expected[:17]


@pytest.mark.parametrize("threads", [0, None, 2])
def test_an_error_that_does_not_come_again_is_raised_once_and_no_row_is_lost(threads: Any) -> None:
    expected = list(mapped())
    fails = FailsAt(expected[20][1]["x"])

    def once(table: pa.Table) -> pa.Table:
        for row in table.to_pylist():
            try:
                fails(row)
            except Odd:
                fails.rows = ()
                raise
        return table

    dealt = tp.from_arrow(TABLE).sharding_filter(12).shuffle(50, seed=3)
    batches = iter(tp.Loader(dealt.map_batches(once, version="1").batch(4), threads=threads))
    found: list[Any] = []
    raised = 0
    while len(found) < len(expected):
        try:
            found.append(next(batches))
        except Odd:
            raised += 1
    assert raised == 1
    assert found == expected
    assert next(batches, None) is None
