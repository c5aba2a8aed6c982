"""Rows that wait for others where an epoch ends and the next begins: each comes once an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from laws import assert_ranks_agree, assert_resumes_elsewhere
from resuming import check_resume

#: Documents begin with this number and their own.
FIRST = 1000


def documents(lengths: list[int], first: int = FIRST) -> tp.Pipeline:
    """Documents that repeat their own number."""
    ids = [[first + k] * n for k, n in enumerate(lengths)]
    table = {"input_ids": pa.array(ids, pa.list_(pa.int32())), "row": range(len(ids))}
    return tp.from_arrow(pa.table(table))


def lengths_of(count: int, mean: int = 60, seed: int = 0) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(mean), 0.6, count)
    return [int(n) for n in drawn.clip(4, 250)]


def in_packed(row: dict[str, Any]) -> list[int]:
    """The documents of a packed row, one for each of its segments."""
    ids, starts = np.asarray(row["input_ids"]), np.asarray(row["segment_ids"])
    return [int(n) - FIRST for n in ids[np.flatnonzero(np.diff(starts, prepend=0) > 0)]]


def in_batch(batch: list[dict[str, Any]]) -> list[int]:
    return [row["row"] for row in batch]


def check_each_comes_once_an_epoch(
    items: Iterable[list[int]], weights: list[int], most: int, twice_too: bool
) -> None:
    """At any time what is late, counted by ``weights``, is one item's at most; and ``twice_too``: no
    item holds a row twice, but the one of a joint.
    """
    times = np.zeros(len(weights), dtype=np.int64)
    twice = 0
    for item in items:
        np.add.at(times, item, 1)
        begun = int(times.max())
        late = np.maximum(begun - 1 - times, 0)
        assert int((late * weights).sum()) <= most
        twice += len(set(item)) < len(item)
        assert twice < begun or not twice_too


packable = st.lists(st.integers(1, 12), min_size=1, max_size=60)
windows = st.integers(1, 80)


@examples(150, often=5)
@given(
    packable, st.integers(12, 40), st.sampled_from(["best_fit", "first_fit"]), windows,
    st.one_of(st.none(), st.integers(1, 5)), st.booleans(),
)  # fmt: skip
def test_at_most_an_open_row_goes_on_into_the_next_epoch(
    lengths: list[int], length: int, method: Any, window: int, most: int | None, shuffled: bool
) -> None:
    rows = documents(lengths)
    rows = rows.shuffle(20) if shuffled else rows
    pipe = rows.repeat().pack(length, method=method, buffer_size=window, max_documents=most)
    larger = sum(lengths) >= length and len(lengths) >= (most or 1)  # than a row
    check_each_comes_once_an_epoch(map(in_packed, islice(pipe, 60)), lengths, length, larger)


@examples(150, often=5)
@given(
    packable, st.sampled_from([(4, None, None), (7, None, None), (None, 40, 8), (None, 30, 3)]),
    windows, st.booleans(),
)  # fmt: skip
def test_at_most_an_open_batch_goes_on_into_the_next_epoch(
    lengths: list[int], size: tuple[int | None, int | None, int | None], window: int, shuffled: bool
) -> None:
    rows = documents(lengths)
    rows = rows.shuffle(20) if shuffled else rows
    batch_size, tokens, most = size
    pipe = rows.repeat().bucket_by_length(
        batch_size, max_tokens=tokens, max_rows=most, num_buckets=4, buffer_size=window
    )
    batches = [in_batch(batch) for batch in islice(pipe, 60)]
    for batch in batches:
        if tokens is None:
            assert len(batch) == batch_size
        else:
            assert max(lengths[row] for row in batch) * len(batch) <= tokens
            assert len(batch) <= (most or tokens)
    rows_of_one = batch_size or most or 0
    larger = len(lengths) >= rows_of_one
    check_each_comes_once_an_epoch(batches, [1] * len(lengths), rows_of_one - 1, larger)


@examples(100, often=5)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 5), st.booleans(),
    st.sampled_from(["repeat", "all_exhausted"]),
)  # fmt: skip
def test_of_each_source_of_a_mix_at_most_an_open_row_goes_on(
    lengths: list[int], weight: int, packs: bool, stop: Any
) -> None:
    sources = {
        "few": documents(lengths).shuffle(20),
        "many": documents([5, 7] * 100, FIRST + len(lengths)),
    }
    pipe = tp.mix(sources, weights={"few": weight, "many": 3}, stop=stop)
    if packs:
        items = [in_packed(row) for row in islice(pipe.pack(24), 80)]
        weights, most = lengths, 24
    else:
        batches = pipe.bucket_by_length(5, num_buckets=4)
        numbers = [[row["input_ids"][0] - FIRST for row in b] for b in islice(batches, 60)]
        items, weights, most = numbers, [1] * len(lengths), 4
    few = [[row for row in item if row < len(lengths)] for item in items]
    check_each_comes_once_an_epoch(few, weights, most, False)


@pytest.mark.filterwarnings("ignore:shuffle.* hardly moves what it is given")
@examples(150, often=5)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 90),
    st.sampled_from(["rows", "batches in sources", "batches", "packed rows", "pieces", "twice"]),
    st.sampled_from(["repeat", "all_exhausted"]),
)  # fmt: skip
def test_rows_of_a_mix_that_are_shuffled_again_come_once_an_epoch_of_their_source(
    lengths: list[int], weight: int, buffer: int, kind: str, stop: Any
) -> None:
    sources = {
        "few": documents(lengths).shuffle(20),
        "many": documents([5, 7] * 100, FIRST + len(lengths)),
    }
    if kind == "batches in sources":
        sources = {name: rows.batch(3) for name, rows in sources.items()}
    mixed = tp.mix(sources, weights={"few": weight, "many": 3}, stop=stop)
    most = 0
    if kind == "batches":
        mixed, most = mixed.batch(5), 4
    elif kind == "packed rows":
        mixed, most = mixed.pack(24), 24
    elif kind == "pieces":
        mixed = mixed.flat_map(lambda row: [row])
    elif kind == "twice":
        mixed = mixed.shuffle(7)
    few: list[list[int]] = []
    for item in islice(mixed.shuffle(buffer, seed=3), 80):
        if kind == "packed rows":
            rows = in_packed(item)
        else:
            batch = item if isinstance(item, list) else [item]
            rows = [row["input_ids"][0] - FIRST for row in batch]
        few.append([row for row in rows if row < len(lengths)])
    weights = lengths if kind == "packed rows" else [1] * len(lengths)
    check_each_comes_once_an_epoch(few, weights, most, False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shards", [1, 24])
def test_a_small_source_comes_evenly_through_a_shuffle_after_the_mix(shards: int) -> None:
    small = tp.from_dataset([("small", n) for n in range(100)])
    large = tp.from_dataset([("large", n) for n in range(5000)])
    mixed = tp.mix(
        {"large": large, "small": small}, weights={"large": 1, "small": 1}, stop="repeat"
    )
    batches = list(islice(mixed.sharding_filter(shards).shuffle().batch(32), 600))
    times = Counter(row for batch in batches for row in batch)
    counts = [times["small", n] for n in range(100)]
    assert max(counts) - min(counts) <= (
        1 if shards == 1 else 8
    )  # shards draw from it at other times
    assert sum(len({*batch}) < len(batch) for batch in batches) <= 36
    places = [row[0] for batch in batches[:9] for row in batch]
    assert any(places[n : n + 4] == ["small"] * 4 for n in range(len(places)))  # mixed at random


def test_a_shuffle_of_batches_that_cannot_move_names_its_place() -> None:
    small = {"a": tp.from_dataset(range(5)), "b": tp.from_dataset(range(200))}
    pipe = tp.mix(small, weights={"a": 1, "b": 1}).batch(16).shuffle(10)
    with pytest.warns(
        UserWarning, match=r"shuffle\(10\) hardly moves .* put it before .* batch\(\)"
    ):
        list(pipe)


def times_of(items: Iterable[list[int]], lengths: list[int], epochs: int) -> Counter[int]:
    """How many rows came how often, after so many epochs of tokens."""
    times, left = np.zeros(len(lengths), dtype=np.int64), epochs * sum(lengths)
    for item in items:
        np.add.at(times, item, 1)
        left -= sum(lengths[row] for row in item)
        if left <= 0:
            break
    return Counter(times.tolist())


SHARDED: dict[str, Callable[[tp.Pipeline], Iterable[list[int]]]] = {
    "pack": lambda rows: map(in_packed, rows.pack(256)),
    "pack, first fit": lambda rows: map(in_packed, rows.pack(256, method="first_fit")),
    "pack, small buffer": lambda rows: map(in_packed, rows.pack(256, buffer_size=64)),
    "buckets": lambda rows: map(in_batch, rows.bucket_by_length(16)),
    "buckets of tokens": lambda rows: map(in_batch, rows.bucket_by_length(max_tokens=2048)),
    "tokens": lambda rows: map(in_batch, rows.batch(max_tokens=2048)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SHARDED)
def test_after_two_epochs_of_tokens_each_row_came_twice_plus_or_minus_once(name: str) -> None:
    """All but what the shards, which take turns, are apart: of 3,000 documents of 24 shards 12 %."""
    lengths = lengths_of(3000)
    rows = documents(lengths).sharding_filter(24).shuffle(2000).repeat()
    times = times_of(SHARDED[name](rows), lengths, 2)
    assert set(times) <= {1, 2, 3}
    assert 3000 - times[2] < 0.2 * 3000


def test_rows_of_small_epochs_are_hardly_emptier_than_those_of_large_ones() -> None:
    for count, length, most in ((300, 2048, 0.04), (1000, 512, 0.04), (5000, 256, 0.015)):
        lengths = lengths_of(count)
        rows = documents(lengths).sharding_filter(24).shuffle(2000).repeat().pack(length)
        cells = np.array([row["segment_ids"] for row in islice(rows, 150)])
        assert np.mean(cells == 0) < most


def few(count: int = 12, shards: int = 4) -> tp.Pipeline:
    return documents(lengths_of(count)).sharding_filter(shards).shuffle(20)


def mixed(stop: Any = "repeat") -> tp.Pipeline:
    sources = {"few": documents(lengths_of(12)).shuffle(20), "many": documents(lengths_of(200))}
    mix = tp.mix(sources, weights={"few": 1, "many": 1}, stop=stop)
    return mix.sharding_filter(4)


CHAINS: dict[str, Callable[[], tp.Pipeline]] = {
    "a row of several epochs": lambda: few(6).repeat().pack(256),
    "several rows": lambda: few(100).repeat().pack(256).batch(2),
    "before repeat": lambda: few(40).pack(256).repeat().batch(2),
    "first fit": lambda: few(100).repeat().pack(256, method="first_fit", buffer_size=30),
    "unshuffled": lambda: documents(lengths_of(4)).sharding_filter(4).repeat().pack(128).batch(2),
    "joined": lambda: few().repeat().pack(256, method="concat"),
    "few documents in a row": lambda: few().repeat().pack(256, max_documents=2),
    "filtered": lambda: few(40).filter([("row", ">", 9)]).repeat().pack(256),
    "some epochs": lambda: few(20).repeat(5).pack(256),
    "buckets": lambda: few(40).repeat().bucket_by_length(4),
    "a batch of several epochs": lambda: few().repeat().bucket_by_length(8),
    "buckets of tokens": lambda: few(40).repeat().bucket_by_length(max_tokens=600),
    "tokens": lambda: few(40).repeat().batch(max_tokens=600),
    "packed rows in buckets": lambda: few(40).repeat().pack(128).bucket_by_length(3),
    "joined rows in buckets": lambda: few(40).repeat().pack(64, method="concat").bucket_by_length(3),
    "mix, packed": lambda: mixed().pack(256),
    "mix, repeated": lambda: mixed("all_exhausted").repeat().pack(256),
    "mix, buckets": lambda: mixed().bucket_by_length(5),
    "mix of packed rows": lambda: tp.mix(
        {"a": documents(lengths_of(9)).pack(256), "b": documents(lengths_of(30)).pack(256)},
        weights={"a": 1, "b": 1}, stop="repeat",
    ).sharding_filter(3).bucket_by_length(2),
}  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize("points", [3, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHAINS)
def test_positions_over_joints_resume_on_other_ranks_too(name: str, points: int | None) -> None:
    pipe, turn = CHAINS[name](), list(CHAINS).index(name)
    report = check_resume(pipe, limit=16, epochs=1, points=points, processes=0)
    assert report.state_bytes < 8_000  # positions, no rows
    assert_ranks_agree(pipe, turn)
    assert assert_resumes_elsewhere(pipe, turn)


def test_explain_says_what_is_open_between_epochs() -> None:
    def joints(pipe: tp.Pipeline) -> str | None:
        return dict(pipe.explain().lines).get("joints")

    rule = "at most one open row of pack() and one open batch, which rows of the next one fill"
    assert joints(few().repeat().pack(64).batch(2)) == f"where an epoch ends, each shard has {rule}"
    of_a_source = "where an epoch of a source ends, each shard has at most one open batch"
    assert str(joints(mixed().bucket_by_length(4))).startswith(of_a_source)
    alone = documents([3, 4]).repeat().batch(max_tokens=8)
    assert str(joints(alone)).startswith("where an epoch ends, there is at most one open batch")
    for pipe in (few().repeat().batch(2), few().pack(64).repeat(), few().pack(64), few().batch(2)):
        assert joints(pipe) is None


def test_the_reading_of_many_small_epochs_is_not_done_again_for_each() -> None:
    """A row of 170 epochs, whose lengths are looked at for twice as many each time."""
    seen = []

    def look(row: dict[str, Any]) -> dict[str, Any]:
        seen.append(row["row"])
        return row

    row = next(iter(documents([3]).map(look).repeat().pack(512)))
    assert sum(n > 0 for n in row["position_ids"]) == 2 * 170
    assert len(seen) < 4 * 170
