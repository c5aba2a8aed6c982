"""Epochs of a mix: which rows they have, and that shares hold over many of them, on any number of shards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from laws import assert_ranks_agree, assert_resumes_elsewhere
from resuming import check_resume

Row = dict[str, Any]


def source(name: str, rows: int, length: int = 1) -> tp.Pipeline:
    """Rows that know their source, of 1 to ``length`` tokens."""
    return tp.from_dataset(
        [{"of": name, "row": n, "n": 1 + 7 * n % length} for n in range(rows)]
    ).shuffle(20, seed=len(name))


def mixed(sizes: dict[str, int], shards: int, length: int = 1, **options: Any) -> tp.Pipeline:
    sources = {name: source(name, rows, length) for name, rows in sizes.items()}
    return tp.mix(sources, column="n", **options).sharding_filter(shards)


def in_epochs(pipe: tp.Pipeline) -> Iterator[Row]:
    while True:
        yield from pipe


def in_batches(pipe: tp.Pipeline) -> Iterator[Row]:
    return (row for batch in pipe for row in batch)


#: Ways to go through many epochs.
PASSES: dict[str, Any] = {
    "epoch by epoch": in_epochs,
    "repeat, then batch": lambda pipe: in_batches(pipe.repeat().batch(8)),
    "batch, then repeat": lambda pipe: in_batches(pipe.batch(8).repeat()),
}
#: Weights of a and b, and their rows.
SIZES = [
    ((1, 3), (100, 100)),
    ((0.7, 0.3), (200, 100)),
    ((0.3, 0.7), (30, 500)),
    ((2, 1), (60, 60)),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", PASSES)
@pytest.mark.parametrize("shards", [1, 24])
@pytest.mark.parametrize(("weights", "rows"), SIZES)
def test_shares_hold_over_many_epochs(way: str, shards: int, weights: Any, rows: Any) -> None:
    options: Any = {"weights": dict(zip("ab", weights, strict=True))}
    pipe = mixed(dict(zip("ab", rows, strict=True)), shards, **options)
    count = 6000
    times = Counter(row["of"] for row in islice(PASSES[way](pipe), count))
    share = weights[0] / sum(weights)
    exact = way == "repeat, then batch"  # the account goes on
    assert abs(times["a"] - share * count) <= (shards if exact else 0.004 * count)


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted"])
def test_shares_of_tokens_hold_over_many_epochs(stop: Any) -> None:
    options: Any = {"weights": {"a": 1, "b": 3}, "weight_by": "tokens", "stop": stop}
    pipe = mixed({"a": 150, "b": 150}, 8, 20, **options)
    tokens = Counter[str]()
    for row in islice(in_epochs(pipe), 6_000):
        tokens[row["of"]] += row["n"]
    assert abs(tokens["a"] / sum(tokens.values()) - 0.25) < 0.005


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow), 7, 24])
def test_without_weights_an_epoch_has_each_row_once(shards: int) -> None:
    pipe = mixed({"a": 200, "b": 501, "c": 70}, shards)
    for _ in range(3):
        times = Counter((row["of"], row["row"]) for row in pipe)
        assert set(times.values()) == {1}
        assert len(times) == 771
    rows = [(row["of"], row["row"]) for row in islice(in_batches(pipe.repeat().batch(7)), 2 * 771)]
    few = Counter(Counter(rows).values())  # shards are at other places
    assert few[2] > 700


@pytest.mark.parametrize("shards", [1, 24])
def test_explain_says_how_often_sources_come(shards: int) -> None:
    pipe = mixed({"a": 100, "b": 100}, shards, weights={"a": 1, "b": 3})
    assert "75.0%, 100 rows, gone through 3.00 times" in str(pipe.explain())
    times = Counter(row["of"] for row in pipe)
    assert times == {"a": 100, "b": 300}


SOURCES = st.dictionaries(st.sampled_from("abc"), st.integers(24, 90), min_size=2)
WEIGHTS = st.lists(st.sampled_from([1, 2, 3, 7, 20]), min_size=3, max_size=3)


@examples(60, often=10)
@given(
    SOURCES, WEIGHTS, st.sampled_from([1, 2, 6, 24]), st.sampled_from(["rows", "tokens"]),
    st.sampled_from(["all_exhausted", "first_exhausted"]), st.sampled_from([None, 1, 2]),
    st.floats(0, 1), st.booleans(),
)  # fmt: skip
def test_an_epoch_has_what_its_end_promises_and_resumes_anywhere(
    sizes: dict[str, int], weights: list[int], shards: int, by: Any, stop: Any, limit: int | None,
    at: float, rolls: bool,
) -> None:  # fmt: skip
    options: Any = {"weights": dict(zip(sizes, weights, strict=False)), "max_epochs": limit}
    whole = mixed(sizes, shards, 9, weight_by=by, stop=stop, **options)
    epoch = [(row["of"], row["row"]) for row in whole]
    times = Counter(epoch)
    if stop == "first_exhausted":
        assert max(times.values()) <= (limit or 1)
        of_each = Counter(name for name, _ in times)
        assert any(of_each[name] >= sizes[name] - shards for name in sizes)
    else:
        assert len(times) == sum(sizes.values())
        assert max(times.values()) <= (limit or max(times.values()))

    def three() -> tp.Pipeline:
        pipe = mixed(sizes, shards, 9, weight_by=by, stop=stop, **options)
        return pipe.repeat(3).batch(5) if rolls else pipe.repeat(3)

    expected = list(three())
    begun, count = iter(three()), round(at * (len(expected) - 1))
    first = list(islice(begun, count))
    resumed = three()
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert first + list(resumed) == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted"])
@pytest.mark.parametrize("rolls", [True, False])
def test_ends_of_epochs_are_exact_on_any_ranks(stop: Any, rolls: bool) -> None:
    def make() -> tp.Pipeline:
        pipe = mixed({"a": 40, "b": 30}, 6, weights={"a": 0.3, "b": 0.7}, stop=stop)
        return pipe.repeat().batch(4) if rolls else pipe.batch(4)

    assert_ranks_agree(make())
    assert_resumes_elsewhere(make())
    check_resume(make, limit=60 if rolls else None, epochs=2, points=6, processes=0)
