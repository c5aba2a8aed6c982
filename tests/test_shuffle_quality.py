"""Measures of an order say what they say they do, and are taken of the order that is delivered."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainpipes as tp
from trainpipes.look.shuffle_quality import _of_pipeline, _touches, sampled_quality
from trainpipes.testing import shuffle_quality

FILES = [700, 0, 1300, 1000]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    start = 0
    for number, count in enumerate(FILES):
        table = pa.table({"x": range(start, start + count)}, schema=pa.schema([("x", pa.int64())]))
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=150)
        start += count
    return tp.list_files(folder).read_parquet()


def test_file_order_is_the_one_end(rows):
    found = shuffle_quality(rows.batch(50))
    assert (found.rows, found.batch_size, found.files) == (3000, 50, 3)
    assert found.rank_correlation == pytest.approx(1)
    assert (found.displacement, found.neighbours_kept) == (0, 1)
    assert found.neighbour_distance == 1 / 3000
    assert found.files_per_batch == 1
    assert found.file_spread < 0.5


def test_the_order_turned_around_correlates_to_minus_one():
    found = shuffle_quality(np.arange(1000)[::-1])
    assert found.rank_correlation == pytest.approx(-1)
    assert found.neighbours_kept == 1
    assert found.displacement == pytest.approx(0.5)


def test_a_random_order_is_the_other_end():
    order = np.random.default_rng(0).permutation(100_000)
    found = shuffle_quality(order, files=[1000] * 100)
    assert abs(found.rank_correlation) < 5 / 100_000**0.5
    assert found.displacement == pytest.approx(1 / 3, abs=0.005)
    assert found.neighbour_distance == pytest.approx(1 / 3, abs=0.005)
    assert found.neighbours_kept < 0.0001
    assert found.files_per_batch == pytest.approx(found.random_files_per_batch, rel=0.005)
    assert found.file_spread == pytest.approx(1, abs=0.01)


def test_a_global_shuffle_measures_as_random_and_a_small_buffer_does_not():
    rows = tp.from_tensors(x=np.arange(100_000)).sharding_filter(4)
    whole = shuffle_quality(rows.shuffle(scope="global").batch(32))
    assert abs(whole.rank_correlation) < 0.02
    assert whole.file_spread == pytest.approx(1, abs=0.02)
    small = shuffle_quality(rows.shuffle(64).batch(32))
    assert small.neighbours_kept > 0.02
    assert small.file_spread < 0.3
    assert small.files_per_batch < 2
    larger = shuffle_quality(rows.shuffle(20_000).batch(32))
    assert small.file_spread < larger.file_spread < whole.file_spread


@settings(max_examples=30)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(1, 12))
def test_the_chance_that_a_batch_has_a_files_rows_is_that_of_drawing(sizes, size):
    from math import comb

    n = sum(sizes)
    size = min(size, n)
    if not n:
        return
    expected = [1 - comb(n - f, size) / comb(n, size) for f in sizes]
    assert _touches(np.array(sizes), n, size) == pytest.approx(expected)


PIPES = {
    "file order": lambda p: p.batch(32),
    "rows": lambda p: p.shuffle(100),
    "shards": lambda p: p.sharding_filter(4).shuffle(90, seed=1).batch(32),
    "stride": lambda p: p.sharding_filter(3, split="stride").batch(32),
    "part": lambda p: p.skip(70).take(2000).sharding_filter(4).shuffle(90).batch(7, drop_last=True),
    "batches": lambda p: p.sharding_filter(4).shuffle(90).batch(32).skip(5).take(33),
    "filtered": lambda p: p.filter(lambda row: row["x"] % 3 > 0).shuffle(90).batch(32),
    "mapped": lambda p: p.sharding_filter(6).shuffle(200).map(lambda row: {**row, "y": 1}).batch(8),
    "files": lambda p: p.shuffle(90).batch(16),
}


@pytest.mark.parametrize("name", PIPES)
@pytest.mark.parametrize("epoch", [0, 2])
def test_it_is_the_delivered_order_that_is_measured(name, epoch, rows):
    pipe = PIPES[name](rows)
    for _ in range(epoch + 1):
        items = list(pipe)
    delivered = [row["x"] for item in items for row in (item if isinstance(item, list) else [item])]
    assert _of_pipeline(pipe, epoch)[0].tolist() == delivered


@pytest.mark.parametrize("name", PIPES)
def test_a_sample_has_the_first_rows_of_the_epoch(name, rows):
    """Of the order in which rows are read, whatever becomes of them."""
    pipe = PIPES[name](rows)
    found = pipe.stats(12).shuffle
    whole = pipe.stats(10**6).shuffle
    if name == "batches":  # those that are left out are read by nobody
        assert (found.rows, found.epoch_rows) == (12 * 32, 3000)
        return
    read = pipe if name != "filtered" else rows.shuffle(90).batch(32)
    if name == "rows":
        read = read.batch(32)
    order, lengths, size = _of_pipeline(read, 0)
    near = np.abs(np.diff(order[: 12 * size]))
    epoch_rows = 2000 if name == "part" else 3000
    assert (found.rows, found.epoch_rows, found.batch_size) == (12 * size, epoch_rows, size)
    assert found.neighbours_kept == pytest.approx((near == 1).mean())
    assert found.neighbour_distance == pytest.approx(near.mean() / 3000)
    assert found.files_per_batch >= 1
    assert found.random_files_per_batch == pytest.approx(_touches(lengths, 3000, size).sum())
    assert f"{12 * size:,} of {epoch_rows:,} of 3 files" in str(found)
    assert found.displacement is None
    if name not in ("filtered", "part"):
        assert whole == shuffle_quality(read)


def test_a_sample_reads_no_row(tmp_path):
    table = pa.table({"x": range(1000)}, schema=pa.schema([("x", pa.int64())]))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100, compression="none")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    footer = int.from_bytes(content[-8:-4], "little") + 8
    content[4:-footer] = bytes(len(content) - 4 - footer)
    (tmp_path / "a.parquet").write_bytes(bytes(content))
    for options in ({}, {"filter": pc.field("x") > 550}):
        rows = tp.read_parquet(tmp_path / "a.parquet", **options).shuffle(50)
        found = sampled_quality(rows.filter(len).batch(8), 4)
        assert (found.rows, found.batch_size) == (32, 8)
        assert found.neighbours_kept < 0.5


def test_a_sample_tells_a_good_shuffle_from_a_poor_one():
    rows = tp.from_tensors(x=np.arange(100_000)).sharding_filter(4)
    good = rows.shuffle(scope="global").batch(32).stats().shuffle
    poor = rows.shuffle(64).batch(32).stats().shuffle
    assert good.neighbours_kept < 0.002 < 0.02 < poor.neighbours_kept
    assert good.neighbour_distance == pytest.approx(1 / 3, abs=0.02)
    assert poor.neighbour_distance < 0.05


@pytest.mark.parametrize("kind", ["draw", "global"])
def test_orders_by_row_number_are_measured_too(kind):
    rows = tp.from_dataset(list(range(500))).sharding_filter(4)
    if kind == "draw":
        rows = rows.shuffle(sampler=tp.samplers.RandomSampler(replacement=True, num_samples=700))
    else:
        rows = rows.shuffle(scope="global")
    pipe = rows.batch(8)
    assert _of_pipeline(pipe, 0)[0].tolist() == [row for batch in pipe for row in batch]


def test_nothing_is_read_where_all_rows_are_kept():
    class Unread:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> int:
            raise AssertionError("read")

    assert shuffle_quality(tp.from_dataset(Unread()).shuffle(50).batch(4)).rows == 100


def test_small_and_empty_orders_have_numbers_too():
    assert shuffle_quality([]).rows == 0
    assert shuffle_quality([0]).neighbours_kept == 0
    assert "of 1 file" in str(shuffle_quality([0, 1, 2]))


def test_what_is_no_order_is_refused():
    with pytest.raises(tp.ConfigError, match="from 0 to 9"):
        shuffle_quality([3, 10], files=[10])
    with pytest.raises(tp.ConfigError, match="leave out repeat"):
        shuffle_quality(tp.from_tensors([1]).repeat())
