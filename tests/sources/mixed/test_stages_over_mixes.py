"""Stages that choose rows by who they are, or draw for them, over rows of several sources, with Python
functions and stages on columns before and after them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from itertools import islice
from typing import Any

import pyarrow as pa
import pytest

import trainpipes as tp
from resuming import check_resume
from trainpipes.sources import mix_runs

IDS = pa.list_(pa.int64())


def table(start: int, rows: int = 30) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"id": range(start, start + rows)}))


def parts(as_objects: bool) -> list[tp.Pipeline]:
    found = [table(0), table(100), table(200)]
    return [pipe.map(dict) for pipe in found] if as_objects else found


SOURCES: dict[str, Callable[[list[tp.Pipeline]], tp.Pipeline]] = {
    "mix": lambda p: tp.mix({"a": p[0], "b": p[1]}),
    "a mix that names": lambda p: tp.mix({"a": p[0], "b": p[1]}, output_column="source"),
    "a mix of mixes": lambda p: tp.mix(
        {"m": tp.mix({"a": p[0], "b": p[1]}), "c": p[2]}, weights={"m": 2, "c": 1}
    ),
    "concat": lambda p: tp.concat(*p),
    "zip": lambda p: tp.zip(p[0], p[1].rename({"id": "other"})),
}


def tokens(pipe: tp.Pipeline) -> tp.Pipeline:
    def columns(rows: pa.Table) -> dict[str, Any]:
        ids = [[n % 50, n % 50 + 1, n % 50 + 2] for n in rows["id"].to_pylist()]
        return {"input_ids": pa.array(ids, IDS)}

    return pipe.with_columns(columns)


STAGES: dict[str, Callable[[tp.Pipeline], tp.Pipeline]] = {
    "sample": lambda p: p.sample(0.5),
    "split": lambda p: p.split({"train": 0.5, "valid": 0.5})["train"],
    "sample by key": lambda p: p.sample(0.5, key="id"),
    "mask_tokens": lambda p: tokens(p).mask_tokens(mask_token_id=3, vocab_size=200, special_ids=[]),
    "map with rng": lambda p: p.map(lambda row, rng: {**row, "n": rng.random()}, rng=True),
}


def values(items: Any) -> list[Any]:
    return [{name: str(value) for name, value in row.items()} for batch in items for row in batch]


@pytest.mark.sample(6)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("stage", STAGES)
def test_rows_of_several_sources_are_the_same_with_functions_around(source, stage):
    own = STAGES[stage](SOURCES[source](parts(False))).rename({"id": "i"}).batch(4)
    assert len(wanted := values(own)) > 0
    for before in (False, True):
        around = STAGES[stage](SOURCES[source](parts(before))).map(dict).rename({"id": "i"})
        assert values(around.batch(4)) == wanted
    if source in ("mix", "a mix of mixes"):
        check_resume(around.batch(4), processes=0, epochs=1, every=9)


def test_a_source_of_which_nothing_is_chosen_has_no_say_in_the_columns():
    for seed in range(4):
        pipe = tp.mix({"a": table(100, 1), "b": table(0)}).sample(0.5, seed=seed)
        wanted = sorted(row["id"] for row in pipe)
        assert sorted(row["i"] for row in pipe.map(dict).rename({"id": "i"})) == wanted


def test_a_row_that_makes_no_columns_is_named_with_its_source():
    def odd(row: dict[str, Any]) -> Any:
        return 7 if row["id"] == 103 else dict(row)

    pipe = tp.mix({"a": table(0), "b": table(100)}).map(odd).rename({"id": "i"})
    with pytest.raises(tp.SchemaError, match=r"a row is int.*row 3.*source 'b'|source 'b'.*row 3"):
        list(pipe)


def test_an_error_of_the_first_rows_is_named_with_its_source():
    def function(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 3:
            raise tp.DataError("no good")
        return {"id": row["id"], "s": "a"}

    one, two = (table(start).map(function) for start in (0, 100))
    mixed = tp.mix({"a": one, "b": two}, weights={"a": 1, "b": 1})
    outer = tp.mix({"m": mixed, "c": two}, weights={"m": 1, "c": 1})
    for pipe, named in ((mixed, "a"), (outer, "m/a")):
        with pytest.raises(tp.DataError, match=rf"^no good \(at source '{named}', row 3\)$"):
            list(pipe.encode_labels("s", classes=["a"]))


@pytest.mark.parametrize(("levels", "epochs"), [(2, 6), (5, 2)])
def test_mixes_of_mixes_have_any_number_of_epochs(levels, epochs):
    pipe = table(0, 3).shuffle(3)
    for number in range(levels):
        sources = {"inner": pipe, "beside": table(100 * number + 100, 7)}
        pipe = tp.mix(sources, weights={"inner": 1, "beside": 1}, stop="first_exhausted")
    found = [[row["id"] for row in pipe] for _ in range(epochs)]
    assert all(len(set(epoch)) == len(epoch) >= 9 for epoch in found)
    check_resume(pipe, epochs=epochs, processes=0, points=5)


def test_tiny_sources_of_an_endless_mix_by_tokens_under_pack_are_warned_of_by_name(monkeypatch):
    monkeypatch.setattr(mix_runs, "TINY_PASSES", 50)
    sources = {n: tp.from_arrow(pa.table({"input_ids": [[ord(n)] * 3]})) for n in "ab"}
    mix = tp.mix(sources, weights={"a": 1, "b": 1}, weight_by="tokens", stop="repeat")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in islice(mix.pack(8).batch(2), 400):
            if told:
                break
    said = (
        r"source '[ab]' was read [\d,]+ times for [\d,]+ rows of the mix, and to begin it again takes "
        r"longer than to read it: lower its weight or num_shards, limit max_epochs, or write its rows"
    )
    assert re.search(said, str(told[0].message))
