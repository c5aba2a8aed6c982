"""``mix(weight_by="tokens")``: shares are of the tokens that are trained, whatever later stages cut off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from resuming import check_resume

#: Numbers that the rows of each source consist of.
NUMBERS = {"long": 1, "short": 2, "other": 3}


def source(name: str, rows: int, shortest: int, longest: int) -> tp.Pipeline:
    lengths = np.random.default_rng(rows).integers(shortest, longest + 1, rows).tolist()
    ids = pa.array([[NUMBERS[name]] * n for n in lengths], pa.list_(pa.int32()))
    return tp.from_arrow(pa.table({"input_ids": ids, "tokens": lengths})).shuffle(50)


def even(sources: dict[str, tp.Pipeline], column: str = "input_ids") -> tp.Pipeline:
    weights = dict.fromkeys(sources, 1)
    return tp.mix(sources, weights=weights, weight_by="tokens", column=column, stop="repeat")


def sources(longest: int = 200) -> dict[str, tp.Pipeline]:
    return {"long": source("long", 300, 40, longest), "short": source("short", 3000, 1, 30)}


def trained(pipe: tp.Pipeline, batches: int) -> Counter[int]:
    """Tokens of each source in the first batches, padding left out."""
    times: Counter[int] = Counter()
    for batch in islice(pipe, batches):
        ids = batch["input_ids"].flatten()
        times.update(ids[ids > 0].tolist())
    return times


CUTS: dict[str, Callable[[tp.Pipeline], tp.Pipeline]] = {
    "split": lambda p: p.pack(64).batch(4).pad_collate(),
    "truncated": lambda p: p.pack(64, overflow="truncate").batch(4).pad_collate(),
    "dropped": lambda p: p.pack(64, overflow="drop").batch(4).pad_collate(),
    "cut": lambda p: p.truncate(64).batch(8).pad_collate(),
    "cut twice": lambda p: p.truncate(90).pack(64, overflow="truncate").batch(4).pad_collate(),
    "collated": lambda p: p.batch(8).pad_collate(max_length=64),
    "one column collated": lambda p: p.batch(8).pad_collate(
        columns={"input_ids": {"max_length": 50}}
    ),
    "in batches": lambda p: p.shuffle(500).bucket_by_length(8).pad_collate(max_length=64),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", CUTS)
@pytest.mark.parametrize("shards", [1, 4])
def test_shares_are_of_tokens_that_are_trained(way: str, shards: int) -> None:
    longest = 90 if way == "dropped" else 200
    mixed = even(sources(longest)).select("input_ids").sharding_filter(shards)
    times = trained(CUTS[way](mixed), 600)
    assert abs(times[1] / times.total() - 0.5) < 0.012


@pytest.mark.parametrize("way", ["truncated", "dropped"])
def test_a_mix_in_a_mix_looks_at_what_comes_after_both(way: str) -> None:
    parts = {"in": even(sources(90)), "other": source("other", 90, 5, 20)}
    mixed = tp.mix(parts, weights={"in": 3, "other": 1}, stop="repeat").select("input_ids")
    times = trained(CUTS[way](mixed.sharding_filter(2)), 400)
    assert abs(times[1] / (times[1] + times[2]) - 0.5) < 0.012


def test_sources_may_cut_in_batches_of_their_own() -> None:
    parts = {
        name: rows.select("input_ids").batch(4).pad_collate(max_length=50)
        for name, rows in sources().items()
    }
    times = trained(even(parts), 900)
    assert abs(times[1] / times.total() - 0.5) < 0.012


def test_lengths_may_stand_in_a_column_of_their_own() -> None:
    pipe = even(sources(), column="tokens").select("input_ids").pack(64, overflow="truncate")
    times = trained(pipe.batch(4).pad_collate(), 400)
    assert abs(times[1] / times.total() - 0.5) < 0.012


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["truncated", "dropped"])
def test_a_resume_counts_the_same(way: str) -> None:
    def make() -> tp.Pipeline:
        return CUTS[way](even(sources(90)).select("input_ids").sharding_filter(2))

    check_resume(make, limit=40, epochs=1, points=6, processes=0)
    loader = tp.Loader(make(), num_workers=2)
    given = [batch["input_ids"].tolist() for batch in islice(loader, 40)]
    assert given == [batch["input_ids"].tolist() for batch in islice(make(), 40)]


def test_a_source_of_which_nothing_is_kept_is_named() -> None:
    parts: dict[str, Any] = {
        "long": source("long", 20, 70, 90),
        "short": source("short", 300, 1, 30),
    }
    pipe = even(parts).select("input_ids").pack(64, overflow="drop")
    with pytest.raises(
        tp.DataError, match=r"source 'long' never gets its share, .*leave the source out"
    ):
        list(islice(pipe, 500))


def test_many_rows_in_a_row_may_be_left_out() -> None:
    """A resume begins among them, in a later pass over their source."""
    few = pa.table({"input_ids": pa.array([[1] * 70] * 200 + [[1] * 30], pa.list_(pa.int32()))})
    many = pa.table({"input_ids": pa.array([[2] * 10] * 500, pa.list_(pa.int32()))})
    parts = {"few": tp.from_arrow(few), "many": tp.from_arrow(many)}
    weights = {"few": 1, "many": 99}

    def make() -> tp.Pipeline:
        mixed = tp.mix(parts, weights=weights, weight_by="tokens", stop="repeat")
        return mixed.pack(64, overflow="drop", buffer_size=32).batch(2)

    check_resume(make, limit=130, epochs=1, points=9, processes=0)


@pytest.mark.parametrize("way", ["split", "truncated", "dropped", "collated", "in batches"])
def test_stats_count_what_the_batches_hold(way: str) -> None:
    pipe = CUTS[way](even(sources(90)).select("input_ids").sharding_filter(2))
    times, mixture = trained(pipe, 150), pipe.stats(150).mixture
    assert mixture is not None
    assert mixture.amounts == {"long": times[1], "short": times[2]}


def test_stats_count_documents_of_packed_rows() -> None:
    parts = {"long": source("long", 300, 20, 30), "short": source("short", 900, 3, 9)}
    mixed = tp.mix(parts, weights={"long": 1, "short": 3}, stop="repeat")
    pipe = mixed.select("input_ids").sharding_filter(2).pack(64).batch(4).pad_collate()
    batches, mixture = list(islice(pipe, 100)), pipe.stats(100).mixture
    assert mixture is not None
    documents = Counter[int]()
    for batch in batches:
        for ids, segments in zip(batch["input_ids"], batch["segment_ids"], strict=True):
            documents.update(int(ids[segments == k][0]) for k in range(1, int(segments.max()) + 1))
    assert mixture.rows == {"long": documents[1], "short": documents[2]}
