"""A batch that fails is raised when it is due: all before it are given first, whoever makes them ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import pyarrow as pa
import pytest

import trainpipes as tp

ROWS = 360
TABLE = pa.table({"x": list(range(ROWS)), "input_ids": [[n] * (1 + n % 7) for n in range(ROWS)]})
DEALT = tp.from_arrow(TABLE).sharding_filter(12).shuffle(50, seed=3)


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

    return DEALT.map(same, version="1").batch(4)


def filtered(*rows: int) -> tp.Pipeline:
    """Counts are not known."""
    return DEALT.filter(FailsAt(*rows), version="1").batch(4)


WAYS: dict[str, Callable[[tp.Pipeline], Any]] = {
    "pipeline": lambda pipe: pipe,
    "no threads": lambda pipe: tp.Loader(pipe, threads=0),
    "threads": lambda pipe: tp.Loader(pipe, threads=3),
    "one worker": lambda pipe: tp.Loader(pipe, num_workers=1),
    "workers": lambda pipe: tp.Loader(pipe, num_workers=3),
    "ahead": lambda pipe: tp.Loader(pipe.to("cpu", depth=5), threads=2),
    "workers, ahead": lambda pipe: tp.Loader(pipe.to("cpu", depth=5), num_workers=2),
}


def cases() -> Iterator[Any]:
    """Every way with the first batches and late ones; fewer with workers, unless slow tests are run."""
    for make, way, number in product((mapped, filtered), WAYS, (0, 1, 20, 43)):
        late = number == 43
        few = late or (number == 1 and ("worker" in way) is (make is mapped))
        named = f"{make.__name__}, {way}, {number}"
        yield pytest.param(make, way, number, id=named, marks=[] if few else pytest.mark.slow)


@pytest.mark.sample(8)
@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize(("make", "way", "number"), list(cases()))
def test_batches_before_one_that_fails_are_given(make: Any, way: str, number: int) -> None:
    """And the state at the error goes on with the batch that failed."""
    expected = list(make())
    failing = expected[number][-1]["x"]
    loader = WAYS[way](make(failing))
    batches = iter(loader)
    assert list(islice(batches, number)) == expected[:number]
    for _ in range(3):
        with pytest.raises(Odd, match=f"cannot take row {failing}"):
            next(batches)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == expected[number:]


@pytest.mark.usefixtures("no_processes_left")
def test_of_several_workers_that_fail_the_one_whose_batch_is_due_first_is_heard() -> None:
    expected = list(mapped())
    failing = [expected[number][0]["x"] for number in (31, 17, 18)]
    loader = tp.Loader(mapped(*failing), num_workers=3, persistent_workers=True)
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

    batches = iter(tp.Loader(DEALT.map_batches(once, version="1").batch(4), threads=threads))
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
