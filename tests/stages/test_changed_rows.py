"""A function may change the row that it gets: other epochs, a resume and other workers give the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from resuming import goes_on_exactly

Row = dict[str, Any]


def rows() -> list[Row]:
    return [{"n": n, "text": f"text {n}"} for n in range(40)]


def marked(row: Row) -> Row:
    row["text"] += "!"
    return row


def drawn(row: Row, rng: np.random.Generator) -> Row:
    row["n"] = 100 * row["n"] + int(rng.integers(100))
    return row


def all_marked(batch: list[Row]) -> list[Row]:
    return list(map(marked, batch))


def texts(batch: list[Row]) -> list[str]:
    return [marked(row).pop("text") for row in batch]


def three(row: Row) -> list[Row]:
    return [marked(row)] * 3


def one_by_one(row: Row) -> Iterator[Row]:
    for part in range(3):
        row["part"] = part
        yield row


class Marked(tp.RowStage):
    def apply(self, row: Row) -> Row:
        return marked(row)


class Parts(tp.StatefulStage):
    def process(self, row: Row) -> Iterator[Row]:
        return one_by_one(row)

    def finish(self) -> Iterator[Row]:
        row: Row = {"n": -1, "text": "end"}
        return one_by_one(row)


SOURCES: dict[str, Callable[[], tp.Pipeline]] = {
    "list": lambda: tp.from_dataset(rows()),
    "iterable": lambda: tp.from_iterable(rows()),
    "drawn twice": lambda: tp.from_dataset(
        rows(), sampler=tp.samplers.RandomSampler(replacement=True, num_samples=60)
    ),
    "columns": lambda: tp.from_arrow(pa.Table.from_pylist(rows())),
}
STAGES: dict[str, Callable[[tp.Pipeline], tp.Pipeline]] = {
    "map": lambda p: p.map(marked).batch(7),
    "map that draws": lambda p: p.map(drawn, rng=True).batch(7),
    "threads": lambda p: p.map(marked, num_workers=2).batch(7),
    "types are found": lambda p: p.map(marked).select("text").batch(7),
    "map of batches": lambda p: p.batch(7).map(all_marked),
    "collate": lambda p: p.batch(7).collate(texts),
    "flat_map": lambda p: p.flat_map(three).map(drawn, rng=True).batch(7),
    "a row again and again": lambda p: p.flat_map(one_by_one).map(marked).batch(7),
    "left out": lambda p: p.flat_map(one_by_one, on_error="skip").map(marked).batch(7),
    "a stage": lambda p: p.then(Marked()).batch(7),
    "a stage with a state": lambda p: p.then(Parts()).map(marked).batch(7),
}


@pytest.mark.sample(16)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", STAGES)
def test_a_function_may_change_its_row(name: str, source: str) -> None:
    pipe = STAGES[name](SOURCES[source]())
    expected = list(STAGES[name](SOURCES["columns"]())) if source == "list" else None
    given = repr(list(tp.Loader(pipe, epoch=0)))
    assert expected is None or given == repr(expected)
    assert "!!" not in given
    assert repr(list(tp.Loader(pipe, epoch=0))) == given
    fork = tp.Loader(pipe, epoch=0, num_workers=2, multiprocessing_context="fork")
    assert repr(list(fork)) == given
    goes_on_exactly(lambda: STAGES[name](SOURCES[source]()))


def test_rows_that_are_made_of_a_row_are_rows_of_their_own() -> None:
    pipe = SOURCES["list"]().take(2)
    expected = [(n, part) for n in range(2) for part in range(3)]
    assert [(row["n"], row["part"]) for row in pipe.flat_map(one_by_one)] == expected
    expected += [(-1, part) for part in range(3)]
    assert [(row["n"], row["part"]) for row in pipe.then(Parts())] == expected
    three_of_each = [row["n"] for row in pipe.flat_map(three).map(drawn, rng=True)]
    assert len(set(three_of_each)) == 6
    assert max(three_of_each) < 200
