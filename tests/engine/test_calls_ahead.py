"""Functions are called for batches that are due, whatever stage has regrouped the rows.

Each shard has one, and 24 shards would hold what was made for many.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp

Make = Callable[[tp.Pipeline], tp.Pipeline]

LENGTHS = np.random.default_rng(0).integers(1, 60, 4800)
TABLE = pa.table({"input_ids": [[1] * int(n) for n in LENGTHS], "x": range(4800)})


class Counting:
    """A function of rows or batches that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: Any) -> Any:
        self.calls += 1
        return value


class OnRows(tp.RowStage):
    fn: Any

    def apply(self, row: Any) -> Any:
        return self.fn(row)


class OnBatches(tp.BatchStage):
    fn: Any

    def apply(self, batch: Any) -> Any:
        return self.fn(batch)


class Each(tp.StatefulStage):
    def process(self, row: Any) -> Any:
        yield row


def dealt() -> tp.Pipeline:
    return tp.from_arrow(TABLE).sharding_filter(24).shuffle(100)


def mixed() -> tp.Pipeline:
    return tp.mix({"a": tp.from_arrow(TABLE).shuffle(100), "b": tp.from_arrow(TABLE)})


#: What makes batches of rows.
BATCHES: dict[str, Callable[[], tp.Pipeline]] = {
    "batch": lambda: dealt().batch(8),
    "bucket_by_length": lambda: dealt().bucket_by_length(8),
    "bucket_by_length(max_tokens)": lambda: dealt().bucket_by_length(max_tokens=300),
    "batch(max_tokens)": lambda: dealt().batch(max_tokens=300),
    "pack": lambda: dealt().pack(128).batch(2),
    "flat_map": lambda: dealt().flat_map(lambda row: [row] * 3).batch(8),
    "a stage with a state": lambda: dealt().then(Each()).batch(8),
    "shuffle": lambda: dealt().batch(8).shuffle(40),
    "batches of batches": lambda: dealt().batch(2).batch(4),
    "filter": lambda: dealt().filter(lambda row: row["x"] % 3 > 0).batch(8),
    "take": lambda: dealt().batch(8).take(300),
    "repeat": lambda: dealt().repeat().batch(8),
    "mix": lambda: mixed().sharding_filter(24).batch(8),
}
#: What calls a function for each of them.
FUNCTIONS: dict[str, Callable[[tp.Pipeline, Counting], tp.Pipeline]] = {
    "map": lambda pipe, fn: pipe.map(fn, version="1"),
    "map in threads": lambda pipe, fn: pipe.map(fn, thread_safe=True, version="1"),
    "filter": lambda pipe, fn: pipe.filter(lambda batch: bool(fn(batch))),
    "collate": lambda pipe, fn: pipe.collate(fn, version="1"),
    "of rows": lambda pipe, fn: pipe.then(OnRows(fn)),
    "of batches": lambda pipe, fn: pipe.collate(len).then(OnBatches(fn)),
    "after pad_collate": lambda pipe, fn: pipe.pad_collate().map(fn, version="1"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", BATCHES)
def test_a_function_is_called_for_the_batches_that_are_due(name: str) -> None:
    for how, function in FUNCTIONS.items():
        nested = name == "batches of batches" and how in (
            "collate",
            "of batches",
            "after pad_collate",
        )
        counted = name == "take" and how == "filter"
        if nested or counted:  # refused
            continue
        fn = Counting()
        batches = iter(tp.Loader(function(BATCHES[name](), fn)))
        next(batches)
        first = fn.calls
        for _ in range(23):
            next(batches)
        threads = 16 if how == "map in threads" else 2  # may work ahead
        assert first <= 1 + threads, how
        assert fn.calls <= 24 + threads, how


#: What makes rows of rows, and a function for each of these.
ROWS: dict[str, Make] = {
    "flat_map": lambda pipe: pipe.flat_map(lambda row: [row] * 5),
    "pack": lambda pipe: pipe.pack(64),
    "shuffle": lambda pipe: pipe.map(dict).shuffle(100),
    "a stage with a state": lambda pipe: pipe.then(Each()),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_function_of_rows_is_called_for_those_of_a_few_batches_of_each_shard(name: str) -> None:
    fn = Counting()
    rows = ROWS[name](dealt())
    for made in (rows.map(fn, version="1"), rows.flat_map(lambda row: [fn(row)])):
        fn.calls = 0
        batches = iter(made.batch(8))
        for _ in range(24):
            next(batches)
        assert fn.calls <= 24 * 16


def test_large_batches_are_collated_when_they_are_due() -> None:
    """A run of 512 rows of 40 kB is not made into tensors at once for each shard."""
    rows = tp.from_arrow(pa.table({"input_ids": [[1] * 10_000] * 600})).sharding_filter(4)
    made: list[int] = []

    class Counts(tp.BatchStage):
        def apply(self, batch: Any) -> Any:
            made.append(len(batch["input_ids"]))
            return batch

    batches = iter(rows.bucket_by_length(16).pad_collate().then(Counts()))
    assert len([*islice(batches, 4)]) == len(made) == 4


def test_explain_says_what_functions_make_and_buckets_hold() -> None:
    """Memory of which it cannot know is said, the rest is counted."""
    plain, buckets = dealt().batch(8).explain(), dealt().bucket_by_length(8).explain()
    row_bytes = TABLE.nbytes / len(TABLE)
    more = (buckets.window_bytes or 0) - (plain.window_bytes or 0)
    assert more == pytest.approx(4800 * row_bytes, rel=0.01)  # 200 rows of each shard
    assert not [note for note in buckets.notes if "size is not known" in note]
    (note,) = [n for n in dealt().map(dict).bucket_by_length(8).explain().notes if "holds" in n]
    assert note.startswith(
        "bucket_by_length(8) holds up to 4,800 rows that map() makes, whose size"
    )
    assert note.endswith("map() after bucket_by_length() makes them when they are due")
    mixed = (
        dealt().flat_map(lambda row: [row, row]).shuffle(100)
    )  # whose rows the shuffle is to mix
    (note,) = [n for n in mixed.explain().notes if "holds" in n]
    assert "rows that flat_map() makes" in note
    assert note.endswith("; a smaller buffer_size holds fewer")
    (note,) = [n for n in tp.from_iterable([]).bucket_by_length(2).explain().notes if "holds" in n]
    assert note.startswith("bucket_by_length(2) holds up to 1,024 rows, whose size is not known")
