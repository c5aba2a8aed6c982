"""Windows of ``pack`` and ``bucket_by_length`` over few rows and many epochs: they read few of these."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pyarrow as pa
import pytest

import trainpipes as tp
from trainpipes import Pipeline
from trainpipes.testing import check_resume, digest

#: Epochs that a window is of, at most; ``pack`` goes on until so many rows are full.
MOST = 8
FULL_ROWS = 8
SHARDS = 4


class Counting:
    """Rows of one column, which counts how many are read."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read += 1
        return {"input_ids": [index + 1] * (index % 3 + 1)}


def rows(count: int = SHARDS) -> Pipeline:
    ids = [[n + 1] * (n % 3 + 1) for n in range(count)]
    return tp.from_arrow(pa.table({"input_ids": ids}))


def endless_mix() -> Pipeline:
    sources = {"a": rows(SHARDS).shuffle(20), "b": rows(30)}
    return tp.mix(sources, weights={"a": 1, "b": 1}, stop="repeat").sharding_filter(SHARDS)


ENDLESS: dict[str, Callable[[], Pipeline]] = {
    "pack": lambda: rows().sharding_filter(SHARDS).shuffle(20).repeat().pack(16).batch(2),
    "pack, unshuffled": lambda: rows().sharding_filter(SHARDS).repeat().pack(16).batch(2),
    "pack, first fit": lambda: (
        rows(40).sharding_filter(SHARDS).shuffle(20).repeat().pack(16, method="first_fit").batch(2)
    ),
    "pack, filtered": lambda: (
        rows(40).sharding_filter(4).filter(lambda row: row["input_ids"][0] % 2).repeat().pack(9)
    ),
    "pack of packed rows, bucketed": lambda: (
        rows(40).sharding_filter(4).repeat().pack(5, method="concat").bucket_by_length(3)
    ),
    "bucket": lambda: rows().sharding_filter(SHARDS).shuffle(20).repeat().bucket_by_length(5),
    "bucket of tokens": lambda: (
        rows().sharding_filter(SHARDS).repeat().bucket_by_length(max_tokens=12, buffer_size=50)
    ),
    "mix": lambda: endless_mix().pack(16).batch(2),
    "mix, rolling": lambda: (
        tp.mix({"a": rows(9), "b": rows(30)}).sharding_filter(3).repeat().pack(16).batch(2)
    ),
}


@pytest.mark.parametrize("cut", ["pack", "bucket", "mix"])
def test_the_first_batch_of_few_rows_takes_few_epochs(cut: str) -> None:
    data = Counting(SHARDS)
    pipe = tp.from_dataset(data)
    if cut == "mix":
        pipe = tp.mix({"a": pipe, "b": rows()}, weights={"a": 1, "b": 1}, stop="repeat")
    pipe = pipe.sharding_filter(SHARDS)
    pipe = pipe if cut == "mix" else pipe.repeat()
    pipe = pipe.bucket_by_length(4) if cut == "bucket" else pipe.pack(16)
    next(iter(tp.Loader(pipe, threads=0)))
    assert data.read <= (4 * FULL_ROWS * 16 if cut != "bucket" else 2 * MOST * SHARDS)


@pytest.mark.parametrize("length", [4, 16, 64])
def test_rows_of_few_documents_are_full(length: int) -> None:
    pipe = rows().sharding_filter(SHARDS).shuffle(20).repeat().pack(length)
    packed = list(islice(pipe, 20 * SHARDS))
    full = sum(number > 0 for row in packed for number in row["segment_ids"])
    assert full > 0.85 * length * len(packed)


def test_a_window_over_long_documents_is_of_few_epochs() -> None:
    """Where 8 epochs fill 8 rows, it is of no more."""
    pipe = rows().sharding_filter(SHARDS).repeat().pack(2)
    for number in range(0, 4 * SHARDS, SHARDS // 2):
        found = [place.epoch for place in tp.locate(pipe, number).places]
        assert max(found) - min(found) < 2 * MOST


@pytest.mark.parametrize("name", ENDLESS)
def test_every_position_resumes_exactly(name: str) -> None:
    pipe = ENDLESS[name]()
    check_resume(pipe, limit=6, every=3, epochs=1, processes=0)


@pytest.mark.parametrize("name", ENDLESS)
def test_ranks_and_workers_give_the_same_batches(name: str) -> None:
    pipe = ENDLESS[name]()
    ranks = 3 if "rolling" in name else 2
    whole = [digest(item) for item in islice(pipe, 24)]
    parts = [
        [
            digest(item)
            for item in islice(
                tp.Loader(ENDLESS[name]().distributed(rank=r, world_size=ranks)), 24 // ranks
            )
        ]
        for r in range(ranks)
    ]
    assert [item for step in zip(*parts, strict=True) for item in step] == whole


def test_no_bucketed_batch_is_short_without_an_end() -> None:
    pipe = rows().sharding_filter(SHARDS).repeat().bucket_by_length(5)
    assert {len(batch) for batch in islice(pipe, 40)} == {5}


def test_a_window_of_a_larger_epoch_is_whole() -> None:
    """Where an epoch has a window's rows, nothing ends it early."""
    one, other = (
        rows(900).sharding_filter(2).shuffle(100).repeat(times).pack(64, buffer_size=100)
        for times in (None, 3)
    )
    few = [digest(item) for item in islice(one, 60)]
    assert few == [digest(item) for item in islice(other, 60)]
