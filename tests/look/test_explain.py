"""explain() says what will happen before it does."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp


@pytest.fixture(scope="module")
def files(folder):
    for number in range(3):
        table = pa.table({"text": [f"row {i} " * 9 for i in range(1000)], "x": np.arange(1000)})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=250)
    return str(folder)


def pipeline(files, buffer_size=100, **options):
    rows = tp.list_files(files).read_parquet().sharding_filter(12)
    return rows.shuffle(buffer_size, **options).batch(8)


def test_it_counts_files_rows_batches_and_shards(files):
    said = pipeline(files).explain()
    assert (said.rows, said.num_batches, said.num_shards) == (3000, 375, 12)
    assert said.world_sizes == (1, 2, 3, 4, 6, 12)
    text = str(said)
    for words in (
        "files       3", "12 of 250", "3,000", "375 batches", "read_parquet()\n", "shuffle(100)\n",
        "columns     text: string, x: int64", "shards      12, ",
    ):  # fmt: skip
        assert words in text


def test_ranks_that_end_apart_get_up_to_so_many_and_batches_of_batches_are_said_as_such():
    rows = tp.from_dataset(range(20)).sharding_filter(tail="uneven").batch(2)
    assert "an epoch  up to 4 batches for each of 3 ranks, of 2 rows each" in str(
        rows.explain(world_size=3)
    )
    assert "an epoch  5 batches for each of 2 ranks, of 2 rows each" in str(
        rows.explain(world_size=2)
    )
    nested = tp.from_dataset(range(20)).batch(2).batch(3)
    assert "an epoch  4 batches, of 3 batches of 2 rows each" in str(nested.explain())


def test_what_it_says_of_memory_bounds_the_windows_that_are_held(files):
    pipe = pipeline(files)
    said = pipe.explain()
    assert 100 <= said.window_rows < 200
    rows = tp.list_files(files).read_parquet().batch(1000)
    row_bytes = sum(pa.Table.from_pylist(batch).nbytes for batch in rows) / 3000
    held = 12 * said.window_rows * row_bytes  # a window for each span
    assert held <= said.window_bytes <= 4 * held
    in_order = rows.explain()
    assert in_order.window_rows is None
    assert "none: rows come in file order" in str(in_order)


def test_threads_work_in_the_process_of_the_rank(files):
    assert "held by each rank" in str(tp.Loader(pipeline(files)).explain())
    assert "held by each worker" in str(pipeline(files).explain(num_workers=1))


def test_bytes_are_said_in_the_same_units_everywhere(files):
    said = str(tp.list_files(files).read_parquet().shuffle(1000).explain())
    units = set(re.findall(r"[\d.,]+ (B|bytes|[kKMG]i?B)\b", said))
    assert units <= {"B", "kB", "MB", "GB"}
    assert "kB" in units
    assert re.search(r"memory +about [\d.]+ kB of rows", said)


def test_it_says_who_gets_what(files):
    said = pipeline(files).explain(world_size=2, num_workers=2)
    assert said.num_batches == 187
    assert said.window_bytes * 4 == pytest.approx(pipeline(files).explain().window_bytes, abs=4)
    assert "held by each worker" in str(said)


def test_a_world_size_that_does_not_divide_is_warned_of_and_holds_what_it_reads(
    files, nothing_warned_of
):
    with pytest.warns(UserWarning, match="5 ranks do not divide num_shards=12"):
        said = pipeline(files).explain(world_size=5)
    assert said.num_batches == 75
    assert said.window_bytes == pipeline(files).explain().window_bytes  # each rank reads all shards


def test_it_warns_of_buffers_that_are_small_or_become_smaller(files):
    for options, said in (
        ({"buffer_size": 20}, "row groups have up to 250 rows"),
        ({"max_bytes": 20_000}, "max_bytes = 20,000 makes the shuffle's buffer smaller"),
    ):
        assert any(said in note for note in pipeline(files, **options).explain().notes)
    assert not pipeline(files, buffer_size=250).explain().notes


def test_it_says_so_where_counts_are_not_known(files):
    said = pipeline(files).filter(len).explain()
    assert said.num_batches is None
    assert "how many is known only at the end" in str(said)
    assert "number of rows unknown" in str(tp.from_iterable(list).explain())
    assert "no end" in str(pipeline(files).repeat().explain())


def test_where_a_share_is_left_it_says_about_how_many(files):
    pipe = tp.list_files(files).read_parquet().sharding_filter(12).sample(0.5).batch(8)
    (about,) = re.findall(r"about ([\d,]+) batches, over", str(pipe.explain()))
    assert int(about) == tp.Loader(pipe).estimate_len() == pytest.approx(len(list(pipe)), abs=12)
    assert pipe.explain().num_batches is None


def test_ranks_that_may_end_apart_are_told_of_collectives():
    ten = tp.from_dataset(range(20)).sharding_filter(6, tail="uneven").batch(2)
    (note,) = ten.explain(world_size=3).notes
    assert "ranks may end a step or more apart" in note
    assert 'tail="even"' in note
    assert not ten.explain(world_size=2).notes
    assert not ten.explain(world_size=1).notes
    unknown = ten.filter(len)
    assert unknown.explain(world_size=2).notes == (note,)


def test_columns_have_types_whatever_rows_are(files):
    rows = pipeline(files)
    assert rows.explain().columns == {"text": "string", "x": "int64"}
    ids = tp.list_files(files).read_parquet().tokenize("bytes", "text").explain()
    assert ids.columns["input_ids"].startswith("list<")
    assert dict(ids.lines)["columns"].endswith("as they are read")
    bad = tp.read_parquet(files, on_error="skip").tokenize("bytes", "text").explain()
    assert dict(bad.lines)["columns"] == dict(ids.lines)["columns"]
    assert tp.from_tensors(x=range(3)).batch(2).explain().columns == {"x": "int64"}
    assert tp.from_dataset([{"a": 1, "b": "c"}]).explain().columns == {"a": "int", "b": "str"}
    assert tp.from_dataset([1, 2]).explain().columns == {}
    assert tp.from_dataset([]).explain().columns == {}
