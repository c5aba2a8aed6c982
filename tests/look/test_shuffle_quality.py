"""Measures of an order say what they say they do, and are taken of the order that is delivered."""

from __future__ import annotations

from math import comb

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainpipes as tp
from trainpipes.samplers import RandomSampler, SubsetRandomSampler
from trainpipes.testing import shuffle_quality

FILES = [700, 0, 1300, 1000]


@pytest.fixture(scope="module")
def rows(folder):
    start = 0
    for number, count in enumerate(FILES):
        table = pa.table({"x": range(start, start + count)}, schema=pa.schema([("x", pa.int64())]))
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=150)
        start += count
    return tp.list_files(folder).read_parquet()


def test_file_order_is_the_one_end(rows):
    found = shuffle_quality(rows.batch(50))
    assert (found.rows, found.batch_size, found.files) == (3000, 50, 3)
    assert found.neighbors_kept == 1
    assert found.neighbor_distance == 1 / 3000
    assert found.files_per_batch == 1
    assert shuffle_quality(np.arange(1000)[::-1]).neighbors_kept == 1


def test_a_random_order_is_the_other_end():
    order = np.random.default_rng(0).permutation(100_000)
    found = shuffle_quality(order, files=[1000] * 100)
    assert found.neighbor_distance == pytest.approx(1 / 3, abs=0.005)
    assert found.neighbors_kept < 0.0001
    assert found.files_per_batch == pytest.approx(found.random_files_per_batch, rel=0.005)


def test_a_global_shuffle_measures_as_random_and_a_small_buffer_does_not():
    rows = tp.from_tensors(x=np.arange(30_000)).sharding_filter(4)
    whole = shuffle_quality(rows.shuffle(scope="global").batch(32))
    assert whole.neighbor_distance == pytest.approx(1 / 3, abs=0.02)
    small = shuffle_quality(rows.shuffle(64).batch(32))
    assert small.neighbors_kept > 0.02
    assert small.files_per_batch < 2
    larger = shuffle_quality(rows.shuffle(6_000).batch(32))
    assert small.neighbor_distance < larger.neighbor_distance < whole.neighbor_distance


def test_a_part_of_the_rows_in_a_random_order_measures_as_random(rows):
    few = tp.from_tensors(x=np.arange(30_000)).skip(100).take(1000).shuffle(scope="global").batch(8)
    assert shuffle_quality(few).neighbor_distance == pytest.approx(1 / 3, abs=0.05)
    sample = rows.take(600).shuffle(300).batch(8).stats(5).shuffle
    assert (sample.files, sample.files_per_batch, sample.random_files_per_batch) == (1, 1, 1)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(1, 12))
def test_files_in_a_random_batch_are_those_of_drawing(sizes, size):
    n = sum(sizes)
    if not n:
        return
    batches = [min(size, n - start) for start in range(0, n, size)]
    expected = [1 - comb(n - f, drawn) / comb(n, drawn) for f in sizes for drawn in batches]
    found = shuffle_quality(range(n), files=sizes, batch_size=size)
    assert found.random_files_per_batch == pytest.approx(sum(expected) / len(batches))


PIPES = {
    "file order": lambda p: p.batch(32),
    "shards": lambda p: p.sharding_filter(4).shuffle(90, seed=1).batch(32),
    "stride": lambda p: p.sharding_filter(3, split="stride").batch(32),
    "part": lambda p: p.skip(70).take(2000).sharding_filter(4).shuffle(90).batch(8),
    "mapped": lambda p: p.sharding_filter(6).shuffle(200).map(lambda row: {**row, "y": 1}).batch(8),
    "files": lambda p: p.shuffle(90).batch(16),
    "draw": lambda p: p.shuffle(
        sampler=tp.samplers.RandomSampler(replacement=True, num_samples=700)
    ).batch(8),
    "global": lambda p: p.sharding_filter(4).shuffle(scope="global").batch(8),
}


@pytest.mark.parametrize("name", PIPES)
@pytest.mark.parametrize("epoch", [0, 2])
def test_it_is_the_delivered_order_that_is_measured(name, epoch, rows):
    if name in ("draw", "global"):
        rows = tp.from_arrow(pa.table({"x": range(3000)}))
    pipe = PIPES[name](rows)
    for _ in range(epoch + 1):
        batches = list(pipe)
    delivered = [row["x"] for batch in batches for row in batch]
    files = [3000] if name in ("draw", "global") else FILES
    if name == "part":
        delivered, files = [x - 70 for x in delivered], [630, 0, 1300, 70]
    expected = shuffle_quality(delivered, files=files, batch_size=len(batches[0]))
    found = shuffle_quality(pipe, epoch=epoch)
    assert found == expected


@pytest.mark.parametrize(("make", "size"), [
    (lambda p: p.shuffle(100), 32),
    (lambda p: p.sharding_filter(4).shuffle(90).batch(32).skip(5).take(33), 32),
    (lambda p: p.filter(lambda row: row["x"] % 3 > 0).shuffle(90).batch(16), 16),
    (lambda p: p.skip(70).take(2000).sharding_filter(4).shuffle(90).batch(8), 8),
], ids=["rows", "batches", "filtered", "part"])  # fmt: skip
def test_a_sample_has_the_first_rows_of_the_order_in_which_they_are_read(make, size, rows):
    """Whatever becomes of them."""
    pipe = make(rows)
    found = pipe.stats(12).shuffle
    epoch_rows = shuffle_quality(pipe).rows
    assert (found.rows, found.epoch_rows, found.batch_size) == (12 * size, epoch_rows, size)
    assert 0 < found.neighbors_kept < 0.5
    assert found.files_per_batch >= 1
    assert 1 < found.random_files_per_batch <= 3
    assert f"{12 * size:,} of {epoch_rows:,} of 3 files" in str(found)
    assert pipe.stats(10**6).shuffle == shuffle_quality(pipe)


def test_a_sample_reads_no_row(tmp_path):
    table = pa.table({"x": range(1000)}, schema=pa.schema([("x", pa.int64())]))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100, compression="none")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    footer = int.from_bytes(content[-8:-4], "little") + 8
    content[4:-footer] = bytes(len(content) - 4 - footer)
    (tmp_path / "a.parquet").write_bytes(bytes(content))
    for options in ({}, {"filter": pc.field("x") > 550}):
        rows = tp.read_parquet(tmp_path / "a.parquet", **options).shuffle(50)
        found = shuffle_quality(rows.filter(len).batch(8))
        assert found.batch_size == 8
        assert found.neighbors_kept < 0.5


def test_small_and_empty_orders_have_numbers_too():
    assert shuffle_quality([]).rows == 0
    assert shuffle_quality([0]).neighbors_kept == 0
    assert "of 1 file" in str(shuffle_quality([0, 1, 2]))


def test_what_is_no_order_is_refused():
    with pytest.raises(tp.ConfigError, match=r"from 0 to 9, got \[10\]"):
        shuffle_quality([3, 10], files=[10])
    with pytest.raises(tp.ConfigError, match=r"a list of numbers, got \(1, 2\)"):
        shuffle_quality(np.array([[1, 2]]))
    with pytest.raises(tp.ConfigError, match="give the numbers of its rows"):
        shuffle_quality(tp.from_iterable(lambda: iter(range(9))))


@pytest.mark.parametrize("step", [1, 97])
@pytest.mark.parametrize("skipped", [0, 1000])
def test_rows_that_a_sampler_leaves_out_are_not_there(step: int, skipped: int) -> None:
    rows = tp.from_dataset(list(range(100_000))).skip(skipped)
    sampler = SubsetRandomSampler(range(0, 1000 * step, step))
    quality = rows.shuffle(sampler=sampler).batch(10).stats(50).shuffle
    assert quality is not None
    assert (quality.rows, quality.epoch_rows) == (500, 1000)
    assert abs(quality.neighbor_distance - 1 / 3) < 0.05
    assert abs(quality.files_per_batch - quality.random_files_per_batch) < 0.5


def test_rows_that_a_sampler_draws_of_all_measure_as_random() -> None:
    drawn = tp.from_dataset(list(range(100_000))).shuffle(sampler=RandomSampler(num_samples=1000))
    quality = shuffle_quality(drawn, batch_size=10)
    assert abs(quality.neighbor_distance - 1 / 3) < 0.05
    assert quality.files > 10
