"""bucket_by_length: what batches hold, where they resume, and what is refused."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from trainpipes import Pipeline
from trainpipes.testing import digest


def source(lengths: list[int]) -> tp.Pipeline:
    ids = pa.array([[7] * n for n in lengths], pa.list_(pa.int32()))
    rows = pa.array(range(len(lengths)), pa.int64())
    return tp.from_arrow(pa.table({"input_ids": ids, "row": rows}))


def rows_of(pipe: tp.Pipeline) -> list[list[int]]:
    return [[row["row"] for row in batch] for batch in pipe]


def expected_batches(
    lengths: list[int], size: int, window: int, boundaries: list[int]
) -> list[list[list[int]]]:
    """For each window its batches, by plain loops."""
    window = -(-window // size) * size
    found = []
    for first in range(0, len(lengths), window):
        buckets: list[list[int]] = [[] for _ in range(len(boundaries) + 1)]
        for row in range(first, min(first + window, len(lengths))):
            buckets[sum(lengths[row] >= edge for edge in boundaries)].append(row)
        batches, rest = [], []
        for bucket in buckets:
            full = len(bucket) // size * size
            batches += [bucket[k : k + size] for k in range(0, full, size)]
            rest += bucket[full:]
        batches += [rest[k : k + size] for k in range(0, len(rest), size)]
        found.append(batches)
    return found


lengths = st.lists(st.integers(0, 12), max_size=80)


@examples(150)
@given(lengths, st.integers(1, 5), st.integers(1, 30), st.sets(st.integers(1, 12), min_size=1))
def test_windows_are_cut_as_a_plain_loop_does_and_mixed(
    lengths: list[int], size: int, window: int, edges: set[int]
) -> None:
    boundaries = sorted(edges)
    pipe = source(lengths).bucket_by_length(size, boundaries=boundaries, buffer_size=window)
    found = rows_of(pipe)
    for batches in expected_batches(lengths, size, window, boundaries):
        assert sorted(found[: len(batches)]) == sorted(batches)
        found = found[len(batches) :]
    assert not found


@examples(100)
@given(lengths, st.integers(1, 9), st.integers(12, 40), st.integers(1, 30))
def test_every_row_is_in_one_micro_batch_and_few_are_short(
    lengths: list[int], buckets: int, tokens: int, window: int
) -> None:
    rows = source(lengths)
    by_rows = rows_of(rows.bucket_by_length(4, num_buckets=buckets, buffer_size=window))
    assert sorted(row for batch in by_rows for row in batch) == list(range(len(lengths)))
    assert sum(len(batch) < 4 for batch in by_rows) <= 1
    options: dict[str, Any] = {"num_buckets": buckets, "buffer_size": window}
    full = rows_of(rows.bucket_by_length(4, drop_last=True, **options))
    assert sorted(full) == sorted(batch for batch in by_rows if len(batch) == 4)
    by_tokens = rows_of(rows.bucket_by_length(max_tokens=tokens, max_rows=6, **options))
    assert sorted(row for batch in by_tokens for row in batch) == list(range(len(lengths)))
    for batch in by_tokens:
        assert len(batch) <= 6
        assert len(batch) * max(lengths[row] for row in batch) <= tokens


def test_a_window_is_kept_in_runs_of_some_micro_batches() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 3000).tolist()
    pipe = source(lengths).bucket_by_length(8, buffer_size=2000, seed=3)
    found = rows_of(pipe)
    assert sorted(row for batch in found for row in batch) == list(range(3000))
    again = tp.Pipeline(pipe.stages)
    iterator = iter(again)
    for _ in range(187):
        next(iterator)
    then = tp.Pipeline(pipe.stages)
    then.load_state_dict(iterator.state_dict())
    assert rows_of(then) == found[187:]


def test_micro_batches_are_mixed_anew_in_each_epoch_and_by_each_seed() -> None:
    def order(seed: int, epochs: int) -> list[list[list[int]]]:
        pipe = source([1, 2, 3, 4] * 20).shuffle(80).bucket_by_length(4, num_buckets=4, seed=seed)
        return [rows_of(pipe) for _ in range(epochs)]

    first, second = order(0, 2)
    assert first != second
    assert sorted(chain.from_iterable(first)) == sorted(chain.from_iterable(second))
    assert order(1, 1) != [first]
    assert order(0, 2) == [first, second]


def test_less_is_padded_than_without_buckets() -> None:
    lengths = np.random.default_rng(1).lognormal(3, 1, 4000).astype(int).clip(1).tolist()
    rows = source(lengths).select("input_ids").shuffle(500)
    plain = rows.batch(16).pad_collate().stats(1000).padding
    bucketed = rows.bucket_by_length(16).pad_collate().stats(1000).padding
    assert plain.cells - plain.padding == bucketed.cells - bucketed.padding == sum(lengths)
    assert bucketed.share < plain.share / 2


def test_buckets_of_no_rows_are_passed_over() -> None:
    assert rows_of(source([]).bucket_by_length(4)) == []
    assert rows_of(source([0, 0]).bucket_by_length(4)) == [[0, 1]]
    with pytest.warns(UserWarning, match="left none of 1 rows"):
        assert rows_of(source([5]).bucket_by_length(4, drop_last=True)) == []
    with pytest.raises(tp.DataError, match="repeat"):
        next(iter(source([5]).bucket_by_length(4, drop_last=True).repeat()))


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
    assert data.read <= (4 * 16 if cut != "bucket" else 4 * SHARDS)


@pytest.mark.parametrize("length", [4, 32])
def test_rows_of_few_documents_are_full(length: int) -> None:
    pipe = rows().sharding_filter(SHARDS).shuffle(20).repeat().pack(length)
    packed = list(islice(pipe, 10 * SHARDS))
    full = sum(number > 0 for row in packed for number in row["segment_ids"])
    assert full > 0.8 * length * len(packed)


def test_a_row_of_long_documents_is_of_few_epochs() -> None:
    pipe = rows().sharding_filter(SHARDS).repeat().pack(2)
    for number in range(0, 4 * SHARDS, SHARDS // 2):
        found = [place.epoch for place in tp.locate(pipe, number).places]
        assert max(found) - min(found) <= 1


def test_a_window_of_a_larger_epoch_is_whole() -> None:
    """Where an epoch has a window's rows, nothing ends it early."""
    one, other = (
        rows(900).sharding_filter(2).shuffle(100).repeat(times).pack(64, buffer_size=100)
        for times in (None, 3)
    )
    few = [digest(item) for item in islice(one, 60)]
    assert few == [digest(item) for item in islice(other, 60)]
