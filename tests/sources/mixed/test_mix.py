"""``mix``: shares, ends, columns, numbers of rows, and what is refused."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from resuming import check_resume


def rows(name: str, count: int, length: int = 1, seed: int | None = None) -> tp.Pipeline:
    """Rows named after their source, with so many tokens each."""
    ids = pa.array([[n % 7] * length for n in range(count)], pa.list_(pa.int32()))
    pipe = tp.from_arrow(pa.table({"who": [f"{name}{n}" for n in range(count)], "input_ids": ids}))
    return pipe if seed is None else pipe.shuffle(10, seed=seed)


def names(pipe: Any, count: int | None = None) -> list[str]:
    return [row["who"] for row in islice(iter(pipe), count)]


def first_letters(found: list[str]) -> Counter[str]:
    return Counter(name[0] for name in found)


# Shares


@pytest.mark.parametrize("draws", [10**2, 10**5])
def test_shares_are_met_after_many_rows(draws):
    weights = {"a": 0.7, "b": 0.2, "c": 0.1}
    sources = {n: tp.from_tensors(source=torch.full((9_000,), i)) for i, n in enumerate(weights)}
    pipe = tp.mix(sources, weights=weights, stop="repeat").batch(100)
    found = np.zeros(3, dtype=np.int64)
    for batch in islice(iter(pipe.collate()), draws // 100):
        found += np.bincount(batch["source"].numpy(), minlength=3)
    assert found.sum() == draws
    assert np.abs(found - draws * np.array([0.7, 0.2, 0.1])).max() < 1


@pytest.mark.parametrize("draws", [10**2, 2 * 10**4])
def test_shares_of_tokens_are_met_with_rows_100_times_as_long(draws):
    sources = {
        "long": tp.from_tensors(length=torch.randint(50, 150, (5000,))),
        "short": tp.from_tensors(length=torch.randint(0, 2, (20_000,))),
    }
    pipe = tp.mix(
        sources, weights={"long": 0.8, "short": 0.2}, weight_by="tokens", column="length", stop="repeat",
    )  # fmt: skip
    lengths = [
        batch["length"].numpy() for batch in islice(iter(pipe.batch(100).collate()), draws // 100)
    ]
    found = np.maximum(1, np.concatenate(lengths))
    long = found[found >= 50].sum()
    assert abs(long - 0.8 * found.sum()) <= found.max()


def test_weights_are_the_sources_sizes_if_left_out():
    pipe = tp.mix({"a": rows("a", 60), "b": rows("b", 20)})
    assert first_letters(names(pipe)) == {"a": 60, "b": 20}
    flat = tp.mix({"a": rows("a", 6400), "b": rows("b", 100)}, temperature=2.0)
    found = first_letters(names(flat, 900))
    assert found["b"] == 100


def test_fractions_and_numpy_numbers_are_weights_too():
    for weights in (
        {"a": Fraction(1, 3), "b": Fraction(2, 3)},
        {"a": np.float32(1), "b": np.int64(2)},
    ):
        found = names(tp.mix({"a": rows("a", 9), "b": rows("b", 18)}, weights=weights))
        assert first_letters(found) == {"a": 9, "b": 18}


def test_each_shard_and_the_whole_keep_to_the_shares():
    pipe = tp.mix(
        {"a": rows("a", 4000, seed=1), "b": rows("b", 4000, seed=2)}, weights={"a": 0.9, "b": 0.1},
        stop="repeat",
    ).sharding_filter(12)  # fmt: skip
    found = [name[0] == "b" for name in names(pipe.select("who"), 1200)]
    for shard in range(12):
        own = np.cumsum(found[shard::12])
        assert np.abs(own - 0.1 * np.arange(1, 101)).max() < 1
    assert np.abs(np.cumsum(found)[11::12] - 1.2 * np.arange(1, 101)).max() < 4


def test_the_weights_follow_a_schedule():
    sources = {"a": rows("a", 500), "b": rows("b", 500)}
    steps = [(0, {"a": 1, "b": 0}), (40, {"a": 1, "b": 3}), (80, {"a": 0, "b": 1})]
    found = names(tp.mix(sources, schedule=steps, stop="repeat").sharding_filter(4), 120)
    assert first_letters(found[:40]) == {"a": 40}
    assert first_letters(found[40:80]) == {"a": 10, "b": 30}
    assert first_letters(found[80:]) == {"b": 40}
    ramp = tp.mix(
        sources, schedule=[steps[0], (400, {"a": 0, "b": 1})], interpolation="linear", stop="repeat"
    )
    found = names(ramp, 400)
    for stop in (100, 200, 400):
        assert abs(first_letters(found[:stop])["b"] - stop * stop / 800) < 2


# Ends of an epoch


def test_an_epoch_has_each_row_once_at_least():
    pipe = tp.mix(
        {"a": rows("a", 30, seed=1), "b": rows("b", 10, seed=2)}, weights={"a": 1, "b": 1}
    )
    for _ in range(2):
        found = Counter(names(pipe))
        assert len(found) == 40
        assert {n: c for n, c in found.items() if n[0] == "a"} == {f"a{n}": 1 for n in range(30)}
        assert {c for n, c in found.items() if n[0] == "b"} == {3}


def test_an_epoch_may_end_with_the_first_source():
    sources = {"a": rows("a", 30), "b": rows("b", 10)}
    weights = {"a": 1, "b": 1}
    found = Counter(names(tp.mix(sources, weights=weights, stop="first_exhausted")))
    assert set(found.values()) == {1}
    assert 19 <= len(found) <= 21
    assert max(first_letters(list(found)).values()) <= 11
    assert first_letters(list(found))["b"] == 10
    twice = tp.mix(sources, weights=weights, stop="first_exhausted", max_epochs={"b": 2})
    found = Counter(names(twice))
    assert {n: c for n, c in found.items() if n[0] == "b"} == {f"b{n}": 2 for n in range(10)}


def test_a_source_leaves_after_its_repetitions_and_the_others_share():
    sources = {"a": rows("a", 70), "b": rows("b", 5), "c": rows("c", 40)}
    weights = {"a": 2, "b": 1, "c": 1}
    found = names(tp.mix(sources, weights=weights, max_epochs={"b": 2}))
    assert first_letters(found)["b"] == 10
    after = found[max(n for n, name in enumerate(found) if name[0] == "b") + 1 :]
    share = first_letters(after)
    assert abs(share["a"] - 2 / 3 * len(after)) <= 2
    in_proportion = {"a": 3 * 70, "b": 5, "c": 2 * 40}
    times = {"a": 3, "b": 1, "c": 2}
    exact = Counter(names(tp.mix(sources, weights=in_proportion, max_epochs=times)))
    assert all(count == times[name[0]] for name, count in exact.items())
    all_twice = names(tp.mix(sources, weights=weights, max_epochs=2))
    assert first_letters(all_twice)["b"] == 10
    assert max(Counter(all_twice).values()) == 2


@pytest.mark.parametrize("shards", [1, 8])
def test_the_schedule_goes_on_where_all_that_have_a_weight_have_left(shards):
    sources = {"a": rows("a", 100), "b": rows("b", 50)}
    schedule = [(0, {"a": 1, "b": 0}), (120, {"a": 0, "b": 1})]
    mixed = tp.mix(sources, schedule=schedule, max_epochs=1)
    found = names(mixed.sharding_filter(shards))
    assert set(Counter(found).values()) == {1}
    assert first_letters(found) == {"a": 100, "b": 50}
    check_resume(lambda: mixed.sharding_filter(shards).batch(4), processes=0, every=5)


def test_every_epoch_of_a_source_and_of_the_mix_has_another_order():
    pipe = tp.mix(
        {"a": rows("a", 40, seed=1), "b": rows("b", 10, seed=2)}, weights={"a": 4, "b": 4}
    )
    epochs = [names(pipe) for _ in range(2)]
    b = [name for found in epochs for name in found if name[0] == "b"]
    orders = {tuple(b[n : n + 10]) for n in range(0, len(b), 10)}
    assert len(orders) == len(b) // 10 == 8


def test_sources_smaller_than_the_shards_are_gone_through_too():
    pipe = tp.mix(
        {"a": rows("a", 100), "b": rows("b", 3)}, weights={"a": 3, "b": 1}
    ).sharding_filter(12)
    assert len(set(names(pipe))) == 103


# Columns and rows


def test_a_column_names_the_source_of_each_row():
    pipe = tp.mix({"a": rows("a", 9), "b": rows("b", 9)}, output_column="from")
    both = {("a", "a"), ("b", "b")}
    assert {(row["from"], row["who"][0]) for row in pipe} == both
    plain = {n: tp.from_dataset([{"who": f"{n}{i}"} for i in range(5)]) for n in "ab"}
    mixed = tp.mix(plain, output_column="from")
    assert {(row["from"], row["who"][0]) for row in mixed} == both


def test_an_error_names_the_source_and_the_row(tmp_path):
    table = pa.table({"text": ["x"] * 7 + [None] + ["x"] * 2})
    pq.write_table(table, tmp_path / "bad.parquet", row_group_size=5)
    bad = tp.list_files(str(tmp_path / "bad.parquet")).read_parquet().tokenize("bytes")
    good = tp.from_arrow(pa.table({"text": ["y"] * 30})).tokenize("bytes")
    nested = tp.mix({"bad": bad, "good": good}, weights={"bad": 1, "good": 1})
    for pipe, source in (
        (nested, "bad"),
        (tp.mix({"in": nested, "out": good}, weights={"in": 1, "out": 1}), "in/bad"),
    ):
        with pytest.raises(
            tp.DataError, match=f"source '{source}', .*bad.parquet, row group 1, row 7"
        ) as caught:
            list(pipe.batch(2))
        assert caught.value.row == 7
        assert str(caught.value.path).endswith("bad.parquet")


def fails(row: dict[str, Any]) -> dict[str, Any]:
    if row["who"] == "b5":
        raise KeyError("this one")
    return row


def test_an_error_of_a_function_names_the_source_and_the_row():
    pipe = tp.mix({"a": rows("a", 9).map(dict), "b": rows("b", 9).map(fails)})
    with pytest.raises(KeyError) as caught:
        list(pipe)
    assert "source 'b', row 5" in caught.value.__notes__[0]


def test_rows_keep_their_numbers_when_sources_come_and_go():
    def seen(sources: dict[str, tp.Pipeline]) -> dict[str, str]:
        pipe = tp.mix(sources, weights=dict.fromkeys(sources, 1)).split({"p": 0.5, "q": 0.5})
        return {name: part for part in "pq" for name in names(pipe[part])}

    small = seen({"a": rows("a", 40), "b": rows("b", 40)})
    large = seen({"a": rows("a", 40), "b": rows("b", 40), "0": rows("z", 40)})
    assert small.items() <= large.items()
    assert len(large) == 120
    alone = names(rows("a", 40).split({"p": 0.5, "q": 0.5})["p"])
    assert alone == [name for name, part in small.items() if part == "p" and name[0] == "a"]


# Where it runs


def test_it_is_shown_with_its_sources_and_what_was_said_of_them():
    sources = {"a": rows("a", 60, seed=1).filter(pc.field("who") != "a3"), "b": rows("b", 20, 3)}
    weights = {"a": 0.6, "b": 0.4}
    text = repr(tp.mix(sources, weights=weights, weight_by="tokens", stop="repeat"))
    assert text.startswith("mix({'a': from_arrow(60 rows of who, input_ids).shuffle(10, seed=1 ...")
    assert "weights={'a': 0.6, 'b': 0.4}, weight_by='tokens', stop='repeat'" in text
    assert "column='input_ids'" not in text


def test_explain_says_how_often_each_source_is_gone_through():
    said = str(tp.mix({"a": rows("a", 90), "b": rows("b", 10)}, weights={"a": 3, "b": 1}).explain())
    assert "75.0%, 90 rows, gone through 1.00 times" in said
    assert "25.0%, 10 rows, gone through 3.00 times" in said
    long = [rows(name, 5000, seed=1) for name in "ab"]
    one, four = (
        tp.mix(dict(zip("ab", long, strict=True))).sharding_filter(4).explain(num_workers=workers)
        for workers in (0, 4)
    )
    assert one.window_bytes
    assert four.window_bytes
    assert one.window_bytes > 3 * four.window_bytes
    assert "of all sources' rows, held by each rank" in str(one)


def test_a_function_in_a_source_must_pickle_for_spawned_workers():
    sources = {"a": rows("a", 20).map(lambda row: row), "b": rows("b", 20).map(dict)}
    loader = tp.Loader(tp.mix(sources), num_workers=1, multiprocessing_context="forkserver")
    with pytest.raises(tp.ConfigError, match="fn must pickle to reach a spawned worker"):
        next(iter(loader))


# What is refused

A, B = rows("a", 5), rows("b", 5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sources": [A, B]}, r"mix\(sources\) must be a dict of pipelines by name, one or more, got \["),
        ({"sources": {}}, "must be a dict of pipelines by name, one or more"),
        ({"sources": {"a": A, 3: B}}, "a dict whose keys are strings, got 3"),
        ({"sources": {"a": A, "b": [1]}}, r"'b' must be a pipeline, such as .*, got \[1\]"),
        ({"sources": {"a": A.sharding_filter(2)}}, r"'a' has sharding_filter\(2\): put it after mix"),
        ({"sources": {"a": A.repeat()}}, r"'a' has repeat\(\): leave it out"),
        ({"sources": {"a": A.pin()}}, r"'a' has pin\(\): put it at the end"),
        ({"sources": {"a": A.distributed(rank=0, world_size=2)}}, r"'a' is distributed\(\)"),
        ({"weights": [0.5, 0.5]}, r"mix\(weights\) must be a dict with .* \(a, b\), got \[0.5"),
        ({"weights": {"a": 1}}, r"for each source \(a, b\), got \{'a': 1\}"),
        ({"weights": {"a": 1, "b": 1, "c": 1}}, "got .*'c': 1}; 0 leaves a source out"),
        ({"weights": {"a": 1, "b": -1}}, "'b' must be a number of 0 or more, got -1"),
        ({"weights": {"a": 1, "b": math.nan}}, "'b' must be .*got nan"),
        ({"weights": {"a": math.inf, "b": 1}}, "'a' must be .*got inf"),
        ({"weights": {"a": True, "b": 1}}, "'a' must be .*got True"),
        ({"weights": {"a": [1], "b": 1}}, r"'a' must be .*got \[1\]"),
        ({"weights": {"a": 0, "b": 0}}, "must be more than 0 for one source at least"),
        ({"weight_by": "bytes"}, 'must be "rows" or "tokens", got .bytes.'),
        ({"stop": "never"}, 'must be "all_exhausted", "first_exhausted" or "repeat"'),
        ({"temperature": 0}, "must be a number above 0, got 0"),
        ({"temperature": 2, "weights": {"a": 1, "b": 1}}, "left out beside weights"),
        ({"max_epochs": 0}, r"must be an integer of 1 or more \(.* or None.*\), got 0"),
        ({"max_epochs": {"c": 1}}, r"must be names of sources \(a, b\), got 'c'"),
        ({"max_epochs": {"a": 2, "b": 1}}, "1 or None without weights.*rows times the epochs"),
        ({"max_epochs": 2, "stop": "repeat"}, "None with stop=.repeat., for a source"),
        ({"schedule": []}, r"must be a list of \(draws, weights\)"),
        ({"schedule": [(0, {"a": 1, "b": 1}), (0, {"a": 1, "b": 1})]}, r"from 0 or more, got \[0, 0\]"),
        ({"schedule": [(0, {"a": 1})]}, r"mix\(schedule\) at 0 must be a dict .*got \{'a': 1\}"),
        ({"schedule": [(5, {"a": 1, "b": 1})]}, "starts at 0, or later where weights"),
        ({"interpolation": "linear"}, "without a schedule, got"),
        ({"column": ""}, "must be the name of a column, got ''"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(options, said):
    with pytest.raises(tp.ConfigError, match=said):
        tp.mix(**{"sources": {"a": A, "b": B}, **options})


@pytest.mark.parametrize(
    ("above", "said"),
    [
        (lambda p: p.shuffle(scope="global"), "has ordered or made them already"),
        (lambda p: p.cache(), "put it into each source"),
        (lambda p: p.sharding_filter(4).take(9), "take"),
    ],
)
def test_what_cannot_stand_above_is_refused(above, said):
    with pytest.raises(tp.ConfigError, match=said):
        above(tp.mix({"a": A, "b": B}))
    with pytest.raises(tp.ConfigError, match="counts epochs, and mix"):
        tp.mix({"a": A, "b": B}, stop="repeat").repeat(2)


@pytest.mark.parametrize("of_batches", [True, False])
def test_a_mix_that_take_ends_is_told_to_end(of_batches):
    mixed = tp.mix({"a": rows("a", 20, seed=1), "b": rows("b", 9, seed=1)}, stop="repeat")
    pipe = mixed.batch(4).skip(1).take(7) if of_batches else mixed.take(27).batch(4)
    batches = list(tp.Loader(pipe, epoch=1))
    assert len(batches) == tp.Loader(pipe).estimate_len() == 7
    assert "about 7 batches" in dict(pipe.explain().lines)["an epoch"]
    loader = tp.Loader(pipe, epoch=1)
    assert [batch for batch, _ in zip(loader, range(3), strict=False)] == batches[:3]
    assert list(loader) == list(loader) == batches
    lasts = iter(loader)
    assert [lasts.is_last() for _ in lasts] == [False] * 6 + [True]
    found = tp.find(pipe, [tp.Place(row=3, source="b")], epoch=1)
    assert [batches[one.step][one.index]["who"] for one in found] == ["b3"] * len(found)
    assert len(found) == sum(row["who"] == "b3" for batch in batches for row in batch)
    with pytest.raises(TypeError, match=r"known only at the end; use .*estimate_len"):
        len(pipe)
    for endless in (mixed.batch(4), mixed.batch(4).skip(2)):
        with pytest.raises(TypeError, match=r'mix\(stop="repeat"\) has no end; count steps'):
            len(endless)
        assert dict(endless.explain().lines)["an epoch"] == 'no end: mix(stop="repeat")'


@pytest.mark.parametrize(("tail", "expected"), [("even", [3, 3]), ("uneven", [4, 3])])
def test_ranks_end_a_mix_that_take_ends_at_the_same_step(tail, expected):
    mixed = tp.mix({"a": A, "b": B}, stop="repeat").sharding_filter(4, tail=tail)
    pipe = mixed.batch(4).take(7)
    ranks = [pipe.distributed(rank=rank, world_size=2) for rank in range(2)]
    for _ in range(2):
        assert [len(list(rank)) for rank in ranks] == expected


def test_labels_of_a_mix_that_take_ends_are_those_of_its_rows():
    mixed = tp.mix({"a": rows("a", 20), "b": rows("b", 9)}, stop="repeat").take(12)
    labels = mixed.stats(labels="who").labels["who"]
    assert labels == Counter(names(mixed))


def test_a_mix_without_an_end_cannot_be_waited_for():
    endless = tp.mix({"a": A, "b": B}, stop="repeat")
    with pytest.raises(tp.ConfigError, match="'x' is a mix without an end"):
        tp.mix({"x": endless, "b": B})
    assert (
        len(names(tp.mix({"x": endless, "b": B}, weights={"x": 1, "b": 1}, stop="repeat"), 99))
        == 99
    )


def test_sources_without_rows_are_refused_and_never_waited_for():
    empty = tp.from_arrow(pa.table({"who": pa.array([], pa.string())}))
    with pytest.raises(tp.DataError, match=r"mix\(sources\): 'b': .* gives no rows"):
        list(tp.mix({"a": A.select("who"), "b": empty}, weights={"a": 1, "b": 1}))
    nothing = rows("b", 50).filter(pc.field("who") == "c")
    with pytest.raises(tp.DataError, match="source 'b' of a mix"):
        list(tp.mix({"a": A, "b": nothing}, weights={"a": 1, "b": 1}))
    with pytest.raises(
        tp.DataError, match="source 'a' has 5 rows, so that some of 12 shards have none"
    ):
        list(tp.mix({"a": A, "b": B}, stop="first_exhausted").sharding_filter(12))
    above = tp.mix({"a": A, "b": B}, stop="repeat").filter(pc.field("who") == "c")
    with pytest.raises(tp.DataError, match="kept no row of a shard in 16 epochs"):
        next(iter(above))
    taken = rows("b", 50, seed=1).filter(pc.field("who") != "c").skip(60)
    said = r"shard 0 of 1 got no rows .*, such as filter\(\), take\(\) and skip\(\) \(in source 'b'"
    with pytest.raises(tp.DataError, match=said):
        list(tp.mix({"a": A, "b": taken}, weights={"a": 1, "b": 1}))


def test_sizes_that_are_not_known_are_asked_for():
    with pytest.raises(
        tp.ConfigError, match=r"how many rows 'b' has is not known .* weights=\{'a': ..., 'b'"
    ):
        list(tp.mix({"a": A, "b": rows("b", 9).filter(pc.field("who") != "b2")}))
    with pytest.raises(tp.ConfigError, match="how many tokens the sources have is not known"):
        list(tp.mix({"a": A, "b": B}, weight_by="tokens"))


def test_tokens_are_counted_in_a_column_that_is_there():
    with pytest.raises(tp.SchemaError, match="ids"):
        list(tp.mix({"a": A, "b": B}, weight_by="tokens", column="ids", weights={"a": 1, "b": 1}))


def test_types_are_found_also_where_all_rows_of_a_source_may_be_skipped() -> None:
    parts = {
        name: tp.from_dataset([{"id": first + n} for n in range(1000)])
        for name, first in (("a", 0), ("b", 10**6))
    }
    pipe = tp.mix(parts, weights={"a": 1, "b": 1}).skip(1500).map(dict)
    assert list(pipe.select("id")) == list(pipe)
    with pytest.raises(tp.DataError, match=r"'b': from_dataset\(.*\) > take\(0\) gives no rows"):
        len(tp.mix({"a": parts["a"], "b": parts["b"].take(0)}))
