"""``locate`` says which rows each batch is made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from every_stage import ENDLESS, FINITE
from trainpipes.testing import digest

#: Items of each pipeline that are looked at.
MOST = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two files of 60 rows: a number x over both, the tokens 1000 x, 1000 x + 1, …, and a text."""
    folder, found = tmp_path_factory.mktemp("numbered"), []
    for number in range(2):
        path = folder / f"numbered-{number}.parquet"
        xs = range(60 * number, 60 * number + 60)
        tokens = [[1000 * x + k for k in range(1 + x % 7)] for x in xs]
        rows = {"x": xs, "input_ids": tokens, "text": [f"text of {x}" for x in xs]}
        pq.write_table(pa.table(rows), path, row_group_size=17)
        found.append(str(path))
    return found


def x_at(place: Any) -> int:
    """The number x of the row that a place tells, and that its row group holds it."""
    table = pq.ParquetFile(place.path)
    before = sum(table.metadata.row_group(g).num_rows for g in range(place.row_group))
    group = table.read_row_group(place.row_group, ["x"])
    assert 0 <= place.row - before < len(group)
    return int(group["x"][place.row - before].as_py())


def twice(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row] * (row["x"] % 3)


def plus(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "text": row["text"] + "!"}


ROWS: dict[str, Callable[[list[str], Path], tp.Pipeline]] = {
    "file order": lambda f, _: tp.read_parquet(f).batch(7),
    "shuffled": lambda f, _: tp.read_parquet(f).sharding_filter(4).shuffle(20, seed=1).batch(7),
    "rows": lambda f, _: tp.read_parquet(f).shuffle(20),
    "a function": lambda f, _: tp.read_parquet(f).shuffle(20).map(plus).batch(7),
    "filter": lambda f, _: tp.read_parquet(f).filter(pc.field("x") > 20)
    .sharding_filter(2).shuffle(20).batch(7),
    "filter after": lambda f, _: tp.read_parquet(f).shuffle(20).filter(pc.field("x") > 20).batch(7),
    "filtered files": lambda f, _: tp.read_parquet(f, filter=pc.field("x") > 20).shuffle(9).batch(7),
    "take and skip": lambda f, _: tp.read_parquet(f).skip(9).take(80).shuffle(20).batch(7).skip(2),
    "concat": lambda f, _: tp.concat(tp.read_parquet(f[:1]).skip(5), tp.read_parquet(f[1:]))
    .shuffle(20).batch(7),
    "mix": lambda f, _: tp.mix(
        {"a": tp.read_parquet(f[:1]).shuffle(9), "b": tp.read_parquet(f[1:])}, weights={"a": 2, "b": 1}
    ).batch(7),
    "cache": lambda f, d: tp.read_parquet(f).map(plus, version="1").cache(d / "cache").shuffle(20).batch(7),
    "flat_map": lambda f, _: tp.read_parquet(f).shuffle(20).flat_map(twice).batch(7),
    "buckets": lambda f, _: tp.read_parquet(f).shuffle(20).bucket_by_length(7),
    "tokens": lambda f, _: tp.read_parquet(f).shuffle(20).batch(max_tokens=20),
    "repeat": lambda f, _: tp.read_parquet(f).shuffle(20).repeat(3).batch(7),
}  # fmt: skip


def found_in(
    pipe: tp.Pipeline, epoch: int = 0, most: int | None = None, every: int = 1
) -> Iterator[Any]:
    """Each batch of an epoch, or one of so many, found again."""
    pipe.set_epoch(epoch)
    for number, item in islice(enumerate(islice(pipe, most)), 0, None, every):
        found = tp.locate(pipe, number, epoch=epoch)
        assert digest(found.batch) == digest(item)
        assert found.epoch == epoch
        yield found


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ROWS)
def test_each_row_of_a_batch_stands_where_it_is_said_to(
    name: str, files: list[str], tmp_path: Path
) -> None:
    pipe = ROWS[name](files, tmp_path)
    for epoch in range(2):
        for found in found_in(pipe, epoch, 9 if name == "rows" or epoch else None, 1 + epoch):
            rows = found.batch if isinstance(found.batch, list) else [found.batch]
            assert [x_at(place) for place in found.places] == [row["x"] for row in rows]
            assert [place.index for place in found.places] == list(range(len(rows)))
            if name not in ("repeat", "mix"):
                assert {place.epoch for place in found.places} == {epoch}


def test_rows_under_repeat_tell_their_own_epoch(files: list[str]) -> None:
    pipe = tp.read_parquet(files).repeat(2).batch(50)
    epochs = [place.epoch for found in found_in(pipe) for place in found.places]
    assert epochs == [0] * 120 + [1] * 120


def test_a_row_of_a_mix_tells_its_source(files: list[str]) -> None:
    both = {"a": tp.read_parquet(files[:1]), "b": tp.read_parquet(files[1:])}
    inner = tp.mix(both, weights={"a": 1, "b": 1})
    other = tp.from_arrow(pa.table({"x": [500], "input_ids": [[1]], "text": [""]}))
    pipe = tp.mix({"files": inner, "other": other}, weights={"files": 3, "other": 1})
    for found in found_in(pipe.batch(10), most=5):
        for row, place in zip(found.batch, found.places, strict=True):
            expected = "other" if row["x"] == 500 else "files/a" if row["x"] < 60 else "files/b"
            assert place.source == expected


def test_a_row_of_zip_tells_all_rows_it_is_made_of(files: list[str]) -> None:
    left = tp.read_parquet(files[:1], columns=["x"])
    right = tp.read_parquet(files[1:], columns=["x"]).rename({"x": "y"})
    for found in found_in(left.zip(right).shuffle(20).batch(4)):
        count = len(found.batch)
        assert [place.source for place in found.places] == ["0", "1"] * count
        assert [place.index for place in found.places] == [n for n in range(count) for _ in "01"]
        expected = [row[name] for row in found.batch for name in ("x", "y")]
        assert [x_at(place) for place in found.places] == expected


@pytest.mark.sample(5)
@pytest.mark.parametrize("method", ["best_fit", "first_fit", "concat"])
@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_a_packed_row_tells_all_its_documents(method: Any, overflow: Any, files: list[str]) -> None:
    packed = tp.read_parquet(files).sharding_filter(2).shuffle(20)
    packed = packed.pack(6, method=method, overflow=overflow, buffer_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in found_in(packed.batch(5).pad_collate(), every=3):
            batch = found.batch
            told = [(place.index, x_at(place)) for place in found.places]
            ids, segments = batch["input_ids"], batch["segment_ids"]
            there = [
                (row, int(ids[row][segments[row] == segment][0]) // 1000)
                for row in range(len(ids))
                for segment in range(1, int(segments[row].max()) + 1)
            ]
            assert told == there


def test_packed_and_plain_rows_of_one_mix_tell_what_they_are_made_of(files: list[str]) -> None:
    packed = tp.read_parquet(files).pack(6, buffer_size=16).select("input_ids")
    plain = tp.from_arrow(pa.table({"input_ids": [[7] * 6] * 9}))
    pipe = tp.mix({"packed": packed, "plain": plain}, weights={"packed": 1, "plain": 1})
    for found in found_in(pipe.batch(4), most=6):
        for place in found.places:
            ids = list(found.batch[place.index]["input_ids"])
            if place.source == "plain":
                assert ids == [7] * 6
            else:
                assert x_at(place) in {one // 1000 for one in ids}


def test_rows_that_are_in_no_file_tell_their_number() -> None:
    letters = [f"{n:03}" for n in range(100)]
    for pipe in (
        tp.from_dataset(letters).shuffle(30).batch(6),
        tp.from_dataset(letters).shuffle(scope="global").batch(6),
        tp.from_iterable(lambda: iter(letters)).shuffle(9).batch(6),
    ):
        for found in found_in(pipe):
            assert [letters[place.row or 0] for place in found.places] == found.batch


#: Every stage, and those whose rows are others than they read in all their forms.
STAGES = [
    name
    for name in [*FINITE, *ENDLESS]
    if " / " not in name or name.startswith(("pack", "mix", "flat_map", "cache"))
]


@pytest.mark.sample(25)
@pytest.mark.parametrize("name", STAGES)
@pytest.mark.filterwarnings("ignore:pin.. does nothing here:UserWarning")
def test_a_batch_of_every_stage_is_found_with_its_rows(name: str, folder: Path) -> None:
    for found in found_in((FINITE | ENDLESS)[name](folder), most=MOST):
        indices = {place.index for place in found.places}
        assert indices == set(range(1 + max(indices)))
