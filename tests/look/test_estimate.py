"""How many items an epoch has, where that is known at its end only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from bad_data import FORMATS, write_files

LENGTHS = np.random.default_rng(5).lognormal(3, 1, 6000).astype(int).clip(1, 500)
TABLE = pa.table({"input_ids": [[1] * n for n in LENGTHS], "row": range(6000)})
ODD = pc.bit_wise_and(pc.field("row"), pa.scalar(1, pa.int64())) == 1


def rows() -> tp.Pipeline:
    return tp.from_arrow(TABLE).sharding_filter(4)


def _is_short(row: dict[str, Any]) -> bool:
    return len(row["input_ids"]) < 15


def _parts(row: dict[str, Any]) -> list[dict[str, Any]]:
    ids = row["input_ids"]
    return [{"input_ids": ids[i : i + 10]} for i in range(0, len(ids), 10)]


def _has_few(batch: dict[str, Any]) -> bool:
    return int(batch["input_ids"].shape[1]) < 60


MADE: dict[str, Callable[[], tp.Pipeline]] = {
    "sample": lambda: rows().sample(0.3).batch(8),
    "sample before a shuffle": lambda: rows().sample(0.3).shuffle(500).batch(8),
    "split": lambda: rows().split({"a": 0.85, "b": 0.15})["b"].shuffle(500).batch(8),
    "the last part": lambda: rows().split({"a": 0.25, "b": 0.75})["b"].batch(8),
    "sample of a split": lambda: rows().split({"a": 0.5, "b": 0.5})["a"].sample(0.5).batch(8),
    "sample, by row": lambda: rows().sample(0.3, key="row"),
    "sample, drawn": lambda: rows().sample(0.3).shuffle(scope="global").batch(8),
    "filter": lambda: rows().filter(ODD).batch(8),
    "filter, in Python": lambda: rows().shuffle(500).filter(_is_short).batch(8),
    "filter of a sample": lambda: rows().sample(0.5).filter(ODD).shuffle(500).batch(8),
    "several rows of one": lambda: rows().shuffle(500).flat_map(_parts).batch(8),
    "filtered batches": lambda: rows().shuffle(500).batch(8).pad_collate().filter(_has_few),
    "several epochs of a filter": lambda: rows().filter(ODD).batch(8).repeat(3),
    "pack": lambda: rows().shuffle(500).pack(128).batch(4),
    "pack of a sample": lambda: rows().sample(0.5).shuffle(500).pack(128).batch(4),
    "pack of a part": lambda: rows().shuffle(500).split({"a": 0.4, "b": 0.6})["a"].pack(128),
    "pack of what a filter leaves": lambda: rows().filter(ODD).shuffle(500).pack(128).batch(4),
    "pack of some": lambda: rows().take(4000).shuffle(500).sample(0.5).pack(128),
    "filtered packs": lambda: rows().pack(128, buffer_size=64).filter(_starts_odd).batch(2),
    "budget": lambda: rows().shuffle(500).batch(max_tokens=2048),
    "budget of a sample": lambda: rows().sample(0.5).shuffle(500).batch(max_tokens=2048),
    "buckets": lambda: rows().shuffle(500).bucket_by_length(8, drop_last=True),
    "buckets of a sample": lambda: rows().shuffle(500).sample(0.5).bucket_by_length(max_tokens=2048),
    "budget of packs": lambda: rows().pack(128, buffer_size=64).batch(max_tokens=600),
    "several epochs": lambda: rows().sample(0.5).shuffle(500).pack(128).batch(4).repeat(2),
}  # fmt: skip


def _starts_odd(row: dict[str, Any]) -> bool:
    return len(set(row["segment_ids"])) % 2 == 1


def assert_close(pipe: tp.Pipeline) -> None:
    estimate, there = tp.Loader(pipe).estimate_len(), sum(1 for _ in pipe)
    assert abs(estimate / there - 1) < 0.1, (estimate, there)


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", MADE)
def test_it_is_close(name: str) -> None:
    assert_close(MADE[name]())


def test_rows_by_which_types_are_found_are_not_counted() -> None:
    late = pc.field("row") > 500
    expected = tp.Loader(tp.from_arrow(TABLE).filter(late)).estimate_len()
    assert tp.Loader(tp.from_arrow(TABLE).map(_same).filter(late)).estimate_len() == expected


def _same(row: dict[str, Any]) -> dict[str, Any]:
    return row


def test_it_is_exact_where_all_rows_are_read() -> None:
    few = tp.from_arrow(TABLE.slice(0, 900))
    for pipe in (
        few.filter(ODD).pack(128).batch(4),
        few.pack(128).take(40).batch(3),
        few.shuffle(99).filter(ODD).skip(7).take(300).pack(128).skip(3).batch(2).take(11),
        few.batch(max_tokens=900).skip(2),
        few.skip(100).take(500).bucket_by_length(8, num_buckets=4).take(1000),
        few.take(0).pack(128),
        few.filter(ODD).batch(8),
        few.filter(ODD).take(30).batch(8),
        few.take(0).filter(ODD).batch(8),
        few.flat_map(_parts).batch(8),
    ):
        assert tp.Loader(pipe).estimate_len() == len(list(pipe)), pipe


def _as_often(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row] * (row["row"] % 3)


def small(count: int = 1000) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"row": range(count)})).sharding_filter()


SHORT: dict[str, Callable[[], tp.Pipeline]] = {
    "sample": lambda: small().sample(0.334).batch(16),
    "sample, shuffled": lambda: small().sample(0.334).shuffle(100).batch(16),
    "several rows of one": lambda: small().flat_map(_as_often).batch(16),
    "without the last": lambda: small().flat_map(_as_often).batch(16, drop_last=True),
    "a filter that drops nothing": lambda: small().filter(_any).batch(16),
    "large batches": lambda: small().sample(0.334).batch(64),
    "more rows": lambda: small(9000).sample(0.334).batch(16, drop_last=True),
    "stride": lambda: tp.from_arrow(pa.table({"row": range(1000)}))
    .sharding_filter(split="stride").filter(_any).batch(16),
    "several epochs": lambda: small().filter(_any).batch(16).repeat(2),
    "joined epochs": lambda: small().repeat(2).batch(16),
    "joined epochs of a filter": lambda: small().filter(_is_odd).repeat(2).batch(16),
    "joined epochs of several rows": lambda: small().flat_map(_as_often).repeat(3).batch(16),
    "joined epochs, full": lambda: small(300).flat_map(_as_often).repeat(3).batch(16, drop_last=True),
}  # fmt: skip


def _is_odd(row: dict[str, Any]) -> bool:
    return row["row"] % 2 == 1


def _any(row: Any) -> bool:
    return True


@pytest.mark.parametrize("name", SHORT)
def test_short_batches_at_the_end_of_each_shard_count(name: str) -> None:
    assert_close(SHORT[name]())


def test_explain_says_how_many_short_batches_there_are() -> None:
    lost = small().flat_map(_as_often).batch(16, drop_last=True)
    assert sum(map(len, lost)) < 999 - 16
    said = "leaves out up to 24 short batches in an epoch, of up to 15 rows each"
    assert f"batch(16, drop_last=True) {said}" in str(lost.explain())
    kept = small().filter(_any).batch(16)
    assert sum(len(batch) < 16 for batch in kept) == 24
    assert "batch(16) makes up to 24 short batches" in str(kept.explain())
    assert len(list(kept)) <= 63 + 24
    assert "how many is known only at the end" in str(kept.explain())


def test_explain_says_nothing_of_short_batches_where_there_is_one_at_most() -> None:
    for pipe in (
        small().batch(16, drop_last=True),
        small().batch(16).filter(_any),
        tp.from_arrow(TABLE).filter(_any).batch(16),
        small().filter(_any).batch(max_tokens=64, column="row"),
        small().filter(_any).repeat().batch(16),
        small().filter(_any),
    ):
        assert "short batch" not in str(pipe.explain())


def test_counted_items_bound_it() -> None:
    assert tp.Loader(rows().sample(0.5).batch(8).take(10)).estimate_len() == 10
    assert tp.Loader(tp.from_arrow(TABLE).sample(0.5).take(100).batch(8)).estimate_len() == 13
    assert tp.Loader(rows().sample(0.5).batch(8).skip(1000)).estimate_len() == 0
    assert tp.Loader(tp.from_arrow(TABLE).shuffle(50).skip(10).sample(0.5)).estimate_len() == 2995


def test_nothing_is_put_below_a_cache(tmp_path: Path) -> None:
    pipe = tp.from_arrow(TABLE).sample(0.5).filter(ODD).cache(tmp_path).shuffle(500).pack(128)
    there = sum(1 for _ in pipe)
    kept = sorted(tmp_path.rglob("*.arrow"))
    assert kept
    assert 0.9 < tp.Loader(pipe).estimate_len() / there < 2.2
    assert sorted(tmp_path.rglob("*.arrow")) == kept


CUTS: dict[str, Callable[[tp.Pipeline], tp.Pipeline]] = {
    "buckets": lambda p: p.bucket_by_length(8),
    "full buckets": lambda p: p.bucket_by_length(8, drop_last=True),
    "tokens": lambda p: p.batch(max_tokens=400),
    "buckets of tokens": lambda p: p.bucket_by_length(max_tokens=400),
    "packed rows": lambda p: p.pack(256),
    "batches of packed rows": lambda p: p.pack(256).batch(4),
}


@pytest.mark.sample(8)
@pytest.mark.filterwarnings("ignore:an epoch of this pipeline gives nothing")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("shards", [1, 8, 24])
@pytest.mark.parametrize("rows", [96, 500, 3000])
def test_what_each_shard_ends_with_is_counted(rows: int, shards: int, cut: str) -> None:
    lengths = np.random.default_rng(rows).integers(5, 100, rows).tolist()
    documents = tp.from_dataset([{"input_ids": [1] * length} for length in lengths])
    pipe = CUTS[cut](documents.sharding_filter(shards).shuffle(50))
    given, estimate = len(list(pipe)), tp.Loader(pipe).estimate_len()
    assert abs(estimate - given) <= (0 if rows < 2000 else 0.022 * given)
    assert tp.Loader(pipe.repeat(2)).estimate_len() == pytest.approx(2 * estimate, abs=1)


def test_explain_says_where_no_batch_is_full() -> None:
    rows = tp.from_dataset(range(9000)).filter(bool)
    pipe = rows.sharding_filter(24, split="stride", tail="uneven").batch(4096)
    said = str(pipe.explain(world_size=2))
    assert "batch(4096) never fills a batch, since a shard has fewer rows" in said
    assert "one for each rank by sharding_filter(num_shards=2)" in said
    few = rows.sharding_filter(2, split="stride", tail="uneven").batch(4096)
    assert sorted(map(len, few))[-2:] == [4096, 4096]
    assert "never fills" not in str(few.explain())


# Readers with stages of their own


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("finish", [
    lambda rows: rows, lambda rows: rows.sharding_filter(2).shuffle(10).batch(4),
    lambda rows: rows.filter(_odd, version="1").batch(2),
])  # fmt: skip
def test_rows_that_a_reader_leaves_out_are_estimated(
    kind: str, finish: Callable[[Any], Any], tmp_path: Path
) -> None:
    files = write_files(tmp_path / "data", kind, 3, {3, 7, 21, 59})
    pipe = finish(FORMATS[kind][2](files, on_error="skip"))
    assert tp.Loader(pipe).estimate_len() == pytest.approx(len(list(pipe)), abs=1.5)


def _odd(row: Any) -> bool:
    return bool(int(row["id"]) % 2)


def test_a_reader_may_filter_by_a_column_that_it_does_not_give(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(400), "y": range(400)}), tmp_path / "a.parquet")
    options: dict[str, Any] = {"columns": ["y"], "filter": pc.field("x") >= 100}
    rows = tp.read_parquet(str(tmp_path), **options)
    assert tp.Loader(rows.batch(8)).estimate_len() == 38


@pytest.mark.parametrize("most", [None, 3, 1000])
@pytest.mark.parametrize("first", [0, 10, 1000])
def test_batches_that_are_taken_or_skipped_count(most: int | None, first: int) -> None:
    small = tp.from_arrow(TABLE.slice(0, 300)).sharding_filter(4).pack(512).batch(2).skip(first)
    pipe = small if most is None else small.take(most)
    loader = tp.Loader(pipe, threads=0)
    if first == 1000:
        assert loader.estimate_len() == 0
    else:
        assert loader.estimate_len() == len(list(loader)) > 0
