"""A loader that is asked to says which rows each batch is made of, and gives the very same batches."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from every_stage import ENDLESS, FINITE
from trainpipes.testing import check_resume, digest

#: Items of each pipeline that are looked at.
MOST = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two files of 60 rows: a number x over both, the tokens 1000 x, 1000 x + 1, …, and a text."""
    found = []
    for number in range(2):
        path = tmp_path_factory.getbasetemp() / f"numbered-{number}.parquet"
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


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("name", ROWS)
def test_each_row_of_a_batch_stands_where_it_is_said_to(
    name: str, threads: int, files: list[str], tmp_path: Path
) -> None:
    loader = tp.Loader(ROWS[name](files, tmp_path), with_provenance=True, threads=threads)
    for epoch in range(2):
        for item in loader:
            rows = item if isinstance(item, list) else [item]
            found = loader.provenance()
            assert [x_at(place) for place in found] == [row["x"] for row in rows]
            assert [place.index for place in found] == list(range(len(rows)))
            if name not in ("repeat", "mix"):
                assert {place.epoch for place in found} == {epoch}
            assert found.epoch == epoch


def test_rows_under_repeat_tell_their_own_epoch(files: list[str]) -> None:
    loader = tp.Loader(tp.read_parquet(files).repeat(2).batch(50), with_provenance=True)
    epochs = [place.epoch for _ in loader for place in loader.provenance()]
    assert epochs == [0] * 120 + [1] * 120


def test_a_row_of_a_mix_tells_its_source(files: list[str]) -> None:
    both = {"a": tp.read_parquet(files[:1]), "b": tp.read_parquet(files[1:])}
    inner = tp.mix(both, weights={"a": 1, "b": 1})
    other = tp.from_arrow(pa.table({"x": [500], "input_ids": [[1]], "text": [""]}))
    pipe = tp.mix({"files": inner, "other": other}, weights={"files": 3, "other": 1})
    loader = tp.Loader(pipe.batch(10), with_provenance=True)
    for batch in islice(loader, 5):
        for row, place in zip(batch, loader.provenance(), strict=True):
            expected = "other" if row["x"] == 500 else "files/a" if row["x"] < 60 else "files/b"
            assert place.source == expected


def test_a_row_of_zip_tells_all_rows_it_is_made_of(files: list[str]) -> None:
    left = tp.read_parquet(files[:1], columns=["x"])
    right = tp.read_parquet(files[1:], columns=["x"]).rename({"x": "y"})
    loader = tp.Loader(left.zip(right).shuffle(20).batch(4), with_provenance=True)
    for batch in loader:
        found = loader.provenance()
        assert [place.source for place in found] == ["0", "1"] * len(batch)
        assert [place.index for place in found] == [n for n in range(len(batch)) for _ in "01"]
        expected = [row[name] for row in batch for name in ("x", "y")]
        assert [x_at(place) for place in found] == expected


@pytest.mark.parametrize("method", ["best_fit", "first_fit", "concat"])
@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_a_packed_row_tells_all_its_documents(method: Any, overlong: Any, files: list[str]) -> None:
    packed = tp.read_parquet(files).sharding_filter(2).shuffle(20)
    packed = packed.pack(6, method=method, overflow=overlong, buffer_size=16)
    loader = tp.Loader(packed.batch(5).pad_collate(), with_provenance=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in loader:
            seen = torch.zeros_like(batch["segment_ids"])
            for place in loader.provenance():
                assert place.tokens is not None
                start, stop = place.tokens
                own = batch["segment_ids"][place.index] == place.segment
                tokens = batch["input_ids"][place.index][own].tolist()
                assert tokens == [1000 * x_at(place) + k for k in range(start, stop)]
                seen[place.index][own] = 1
            assert torch.equal(seen == 1, batch["segment_ids"] > 0)


def test_packed_and_plain_rows_of_one_mix_tell_what_they_are_made_of(files: list[str]) -> None:
    packed = tp.read_parquet(files).pack(6, buffer_size=16).select("input_ids")
    plain = tp.from_arrow(pa.table({"input_ids": [[7] * 6] * 9}))
    pipe = tp.mix({"packed": packed, "plain": plain}, weights={"packed": 1, "plain": 1})
    loader = tp.Loader(pipe.batch(4), with_provenance=True)
    for batch in islice(loader, 6):
        for place in loader.provenance():
            ids = list(batch[place.index]["input_ids"])
            if place.source == "plain":
                assert (place.segment, ids) == (None, [7] * 6)
            else:
                assert place.segment is not None
                assert place.tokens is not None
                first = 1000 * x_at(place) + place.tokens[0]
                assert first in ids


def test_rows_that_are_in_no_file_tell_their_number() -> None:
    letters = [f"{n:03}" for n in range(100)]
    for pipe in (
        tp.from_dataset(letters).shuffle(30).batch(6),
        tp.from_dataset(letters).shuffle(scope="global").batch(6),
        tp.from_iterable(lambda: iter(letters)).shuffle(9).batch(6),
    ):
        loader = tp.Loader(pipe, with_provenance=True)
        for batch in loader:
            assert [letters[place.row or 0] for place in loader.provenance()] == batch


#: Every stage, and those whose rows are others than they read in all their forms.
STAGES = [
    name
    for name in [*FINITE, *ENDLESS]
    if " / " not in name or name.startswith(("pack", "mix", "flat_map", "cache"))
]


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.filterwarnings("ignore:pin.. does nothing here:UserWarning")
def test_batches_and_states_are_the_same_with_it_and_without(name: str, folder: Path) -> None:
    make = (FINITE | ENDLESS)[name]
    plain, known = tp.Loader(make(folder)), tp.Loader(make(folder), with_provenance=True)
    counted = make(folder)._session.plan.counted
    for expected, found in zip(islice(plain, MOST), islice(known, MOST), strict=True):
        assert digest(found) == digest(expected)
        state = known.state_dict()
        if counted:  # a cursor may be said in several ways
            assert state == plain.state_dict()
        places = known.provenance()
        assert len({place.index for place in places}) == 1 + max(p.index for p in places)
    plain.load_state_dict(json.loads(json.dumps(known.state_dict())))
    known.load_state_dict(plain.state_dict())
    for expected, found in zip(islice(plain, 3), islice(known, 3), strict=True):
        assert digest(found) == digest(expected)


def test_workers_send_it_too(files: list[str]) -> None:
    rows = tp.read_parquet(files).sharding_filter(4).shuffle(20)
    for pipe in (rows.batch(7), rows.filter(pc.field("x") > 9).batch(7)):
        loaders = [tp.Loader(pipe, with_provenance=True, num_workers=workers) for workers in (0, 2)]
        for _ in range(2):
            found = [[(batch, loader.provenance()) for batch in loader] for loader in loaders]
            assert found[0] == found[1]
            assert len(found[0]) > 9


def test_a_loader_that_keeps_it_resumes_exactly(files: list[str]) -> None:
    rows = tp.read_parquet(files).sharding_filter(4).shuffle(20)
    packed = rows.pack(6, buffer_size=16)
    for pipe in (rows.batch(7).pad_collate(), packed.batch(5)):
        check_resume(
            lambda p=pipe: tp.Loader(p, with_provenance=True), epochs=2, every=3, processes=0
        )


def test_it_is_that_of_the_batch_given_last_where_others_are_taken_ahead(files: list[str]) -> None:
    pipe = tp.read_parquet(files).shuffle(20).filter(pc.field("x") > 9).batch(7)
    batches = iter(tp.Loader(pipe, with_provenance=True))
    for batch in batches:
        last = batches.is_last()
        assert [x_at(place) for place in batches.provenance()] == [row["x"] for row in batch]
    assert last


def test_it_is_that_of_the_batch_given_last_where_stages_place_some_ahead(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tp.read_parquet(files, columns=["x"]).shuffle(20).batch(7).collate().to("cpu")
    monkeypatch.setattr(type(pipe.stages[-1]), "ahead", 2)
    loader = tp.Loader(pipe, with_provenance=True)
    seen = 0
    for batch in loader:
        assert [x_at(place) for place in loader.provenance()] == batch["x"].tolist()
        seen += 1
    assert seen == 18


def test_who_did_not_ask_for_it_is_told_how() -> None:
    pipe = tp.from_dataset(range(9)).batch(2)
    plain = tp.Loader(pipe)
    next(iter(plain))
    with pytest.raises(tp.ConfigError, match="with_provenance=True"):
        plain.provenance()
    known = tp.Loader(pipe, with_provenance=True)
    for subject in (known, iter(known)):
        with pytest.raises(tp.ConfigError, match="there was no batch yet"):
            subject.provenance()
