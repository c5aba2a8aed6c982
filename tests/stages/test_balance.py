"""Even steps: the batches that ranks have in a step cost about the same, by ``balance`` and by buckets."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from laws import assert_ranks_agree, assert_resumes_elsewhere
from resuming import check_resume, goes_on_exactly
from trainpipes.columns.block import Block
from trainpipes.columns.run import unplaced
from trainpipes.stages.order import Balance

RANKS = 32


def lengths_of(rows: int, seed: int = 0) -> Any:
    drawn = np.random.default_rng(seed).normal(np.log(148), 0.9, rows)
    return np.clip(np.exp(drawn).round(), 16, 1024).astype(np.int64)


def table(lengths: Any) -> pa.Table:
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = pa.ListArray.from_arrays(pa.array(edges), pa.array(np.zeros(edges[-1], np.int16)))
    return pa.table({"input_ids": ids, "row": range(len(lengths)), "length": lengths})


def dealt(shards: int = RANKS, rows: int = 24_000) -> tp.Pipeline:
    return tp.from_arrow(table(lengths_of(rows) // 4)).sharding_filter(shards).shuffle(2000)


def largest_of_mean(pipe: tp.Pipeline, cost: Callable[[Any], float], ranks: int = RANKS) -> float:
    """The largest cost of a step's batches by the mean one, on average over the steps."""
    costs = np.array([cost(batch) for batch in pipe])
    steps = costs[: len(costs) // ranks * ranks].reshape(-1, ranks)
    return float((steps.max(1) / steps.mean(1)).mean())


def row_lengths(batch: Any) -> Any:
    return np.array([row["length"] for row in batch])


def in_cells(batch: Any) -> float:
    return float(len(batch) * row_lengths(batch).max())


def in_attention(batch: Any) -> float:
    return float((row_lengths(batch) ** 2).sum())


def packed_attention(batch: Any) -> float:
    """By the documents in packed rows."""
    segments = np.array([row["segment_ids"] for row in batch])
    return float(sum((np.bincount(row)[1:] ** 2).sum() for row in segments))


@pytest.mark.parametrize("ranks", [RANKS, 8])
def test_steps_of_buckets_are_even(ranks: int) -> None:
    """Real tokens, of the cells that all ranks have in a step if each takes as long as the largest."""
    batches = [row_lengths(batch) for batch in dealt().bucket_by_length(8)]
    assert sum(map(len, batches)) == 24_000
    whole = len(batches) // ranks * ranks
    cells = np.array([len(b) * b.max() for b in batches])[:whole].reshape(-1, ranks)
    tokens = np.array([b.sum() for b in batches])[:whole].reshape(-1, ranks)
    assert tokens.sum() / (cells.max(1).sum() * ranks) > 0.75
    correlation = np.corrcoef(cells.mean(1), np.arange(len(cells)))[0, 1]
    assert abs(correlation) < 0.2  # not from short to long


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("make", "options", "cost", "most"),
    [
        (lambda p: p.batch(8), {}, in_cells, 1.3),
        (lambda p: p.batch(max_tokens=1024), {"cost": "attention"}, in_attention, 1.35),
        (lambda p: p.pack(512).batch(2), {}, packed_attention, 1.45),
        (lambda p: p.batch(8), {"cost": "length"}, lambda b: float(row_lengths(b).sum()), 1.2),
        (lambda p: p.batch(8), {"cost": "tokens"}, lambda b: float(row_lengths(b).sum()), 1.2),
        (lambda p: p.batch(8), {"cost": len}, len, 1.01),
    ],
    ids=["cells", "attention", "packed", "a column", "tokens", "a function"],
)
def test_steps_of_balanced_batches_are_even(
    make: Callable[[tp.Pipeline], tp.Pipeline], options: Any, cost: Any, most: float
) -> None:
    batches = make(dealt(rows=12_000))
    balanced = largest_of_mean(batches.balance(**options), cost)
    assert balanced < most
    assert balanced <= largest_of_mean(batches, cost)


@examples(40)
@given(
    st.integers(1, 6), st.integers(2, 9), st.integers(1, 4), st.integers(20, 200), st.integers(0, 9)
)
def test_each_window_of_a_shard_has_the_batches_that_it_had(
    shards: int, window: int, size: int, rows: int, seed: int
) -> None:
    pipe = tp.from_arrow(table(lengths_of(rows, seed)).select(["row", "length"]))
    batches = pipe.sharding_filter(shards).shuffle(50, seed=seed).batch(size)
    plain = [[row["row"] for row in batch] for batch in batches]
    balanced = batches.balance(window, column="length", seed=seed)
    moved = [[row["row"] for row in batch] for batch in balanced]
    for shard in range(shards):
        one, other = plain[shard::shards], moved[shard::shards]
        for first in range(0, len(one), window):
            assert sorted(one[first : first + window]) == sorted(other[first : first + window])


def test_all_shards_give_the_batch_of_one_rank_at_a_turn() -> None:
    """Each epoch in another order; the last window is shorter."""
    rows = tp.from_arrow(pa.table({"n": range(4 * 100)})).sharding_filter(4)
    orders = []
    pipe = rows.shuffle(400).batch(1).balance(16, column="n")
    for _ in range(2):
        items = [batch[0]["n"] for batch in pipe]
        assert sorted(items) == [*range(400)]
        ranks = np.array(
            [
                np.argsort(np.argsort(items[shard::4][first : first + 16])).tolist()
                for first in range(0, 100, 16)
                for shard in range(4)
            ],
            dtype=object,
        )
        for window in range(7):
            assert len({str(order) for order in ranks[4 * window : 4 * window + 4]}) == 1
        orders.append(str(ranks[0]))
    assert orders[0] != orders[1]


def test_turns_agree_over_the_joints_of_epochs() -> None:
    """Shards have other numbers of batches in an epoch, and go on by themselves."""
    rows = tp.from_arrow(table(lengths_of(3000)).select(["row", "length"])).sharding_filter(8)
    some = rows.shuffle(500).filter([["row", ">", 100]])
    for pipe in (
        some.batch(4).balance(column="length").repeat(),
        some.repeat().batch(4).balance(column="length"),
        some.bucket_by_length(4, column="length").repeat(),
        some.repeat().bucket_by_length(max_tokens=2000, column="length"),
    ):
        batches = [*islice(pipe, 3000)]
        first, last = (
            largest_of_mean(part, in_cells, 8)  # type: ignore[arg-type]
            for part in (batches[:600], batches[2400:])
        )
        assert last < first * 1.15


#: Chains with stages that even out steps.
CHAINS: dict[str, Callable[[], tp.Pipeline]] = {
    "batch": lambda: small().batch(3).balance(5),
    "tokens": lambda: small().batch(max_tokens=900).balance(4, cost="attention"),
    "pack": lambda: small().pack(512).batch(2).balance(4).pad_collate(),
    "filter": lambda: small().filter([["row", ">", 30]]).batch(3).balance(5),
    "repeat": lambda: small().batch(3).balance(5).repeat(),
    "rolling": lambda: small().repeat().batch(3).balance(5),
    "buckets, repeat": lambda: small().bucket_by_length(3, buffer_size=24).repeat(),
    "buckets, rolling": lambda: small().repeat().bucket_by_length(3, buffer_size=24),
    "mix": lambda: tp.mix({"a": one(80), "b": one(50)}).sharding_filter(4).batch(3).balance(4),
    "shuffle": lambda: small().batch(3).shuffle(6).balance(4),
    "take": lambda: small().batch(3).balance(4).take(20),
}


def one(rows: int) -> tp.Pipeline:
    return tp.from_arrow(table(lengths_of(rows)))


def small() -> tp.Pipeline:
    return one(150).sharding_filter(4).shuffle(40, seed=2)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CHAINS)
def test_it_resumes_exactly_on_any_ranks(name: str) -> None:
    if CHAINS[name]()._iteration.plan.chain.endless:
        check_resume(CHAINS[name](), points=3, processes=0, limit=60, epochs=2, every=7)
    else:
        goes_on_exactly(CHAINS[name])
    assert_ranks_agree(CHAINS[name](), 1)
    assert_resumes_elsewhere(CHAINS[name](), 0, 2)


def test_what_is_held_is_counted_by_explain() -> None:
    plain, balanced = dealt().batch(8).explain(), dealt().batch(8).balance(64).explain()
    assert (balanced.window_bytes or 0) > (plain.window_bytes or 0) + 24_000 * 60


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda p: p.batch(2).balance(1),
            r"balance\(window\) must be an integer of 2 or more, got 1",
        ),
        (lambda p: p.batch(2).balance(cost=3), "balance.cost. must be one of 'cells', 'tokens'"),
        (lambda p: p.balance(), "must stand where batches are cut.*got rows: put it after batch"),
        (lambda p: p.batch(2).pad_collate().balance(), "got collated batches: put it after batch"),
    ],
)
def test_where_it_cannot_stand_is_said(make: Any, said: str) -> None:
    with pytest.raises(tp.ConfigError, match=said):
        list(make(small()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cost": lambda lengths: -1}, "the cost of a batch must be a number of 0 or more, got -1"),
        ({"cost": lambda lengths: float("nan")}, "must be a number of 0 or more, got nan"),
        ({"cost": lambda lengths: None}, "must be a number of 0 or more, got None"),
        ({"cost": lambda lengths: lengths}, r"must be a number of 0 or more, got .*array"),
        ({"cost": lambda lengths: 10**400}, "must be a number of 0 or more, got a number of"),
        ({"cost": "input_ids"}, "cost must be a column of numbers, one a row, got 'input_ids'"),
        (
            {"cost": "lenght"},
            r"cost must be one of 'cells', 'tokens', 'attention', or a column of numbers \(.*length.*\), got "
            r"'lenght' .did you mean 'length'",
        ),
        ({"cost": "cellz"}, "got 'cellz' .did you mean 'cells'"),
        ({"column": "ids"}, "no column 'ids'"),
    ],
)
def test_costs_that_are_none_are_refused(options: Any, said: str) -> None:
    with pytest.raises(tp.DataError, match=said):
        list(small().batch(2).balance(**options))


def test_rows_of_a_mix_of_batches_are_balanced() -> None:
    mix = tp.mix({"a": one(80).batch(2), "b": one(50).batch(4)}).sharding_filter(4)
    rows = chain.from_iterable(mix.balance(4))
    assert len([*rows]) > 100


def test_rows_of_python_are_balanced_in_a_mix_and_its_sources() -> None:
    """Types of columns are found from rows that no stage has cut."""

    def python(rows: int) -> tp.Pipeline:
        return tp.from_dataset([{"input_ids": [1] * (n % 9 + 1), "n": n} for n in range(rows)])

    def batches(rows: int) -> tp.Pipeline:
        return python(rows).batch(4)

    for source in (batches(80), batches(80).balance(4), one(80).batch(4).balance(4)):
        for other in (batches(40), one(40).batch(4)):
            names = ["input_ids"]
            mix = tp.mix(
                {"a": source.select(names), "b": other.select(names)}, weights={"a": 2, "b": 1}
            )
            mixed = mix.sharding_filter(2)
            assert len([*mixed]) == len([*mixed.balance(4).pad_collate()]) == 30


def test_columns_of_small_numbers_are_added_without_overflow() -> None:
    numbers = pa.array(np.array([60_000, 60_000, 1, 1] * 6, dtype=np.float16))
    rows = tp.from_arrow(pa.table({"n": numbers})).batch(2).balance(4, cost="n")
    assert (
        sorted(float(row["n"]) for batch in rows for row in batch) == [1.0] * 12 + [60_000.0] * 12
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.float64])
def test_costs_may_be_a_tensor_of_any_dtype(dtype: torch.dtype) -> None:
    rows = tp.from_tensors(n=torch.arange(8).to(dtype)).batch(1).balance(8, cost="n")
    assert sorted(row["n"].item() for batch in rows for row in batch) == [*range(8)]


@pytest.mark.parametrize("cost", ["cells", "tokens", "attention"])
def test_costs_are_found_without_copying_rows(cost: str) -> None:
    table = pa.table({"input_ids": [[1], [2, 2], [3, 3, 3], [], [5]], "text": ["a"] * 5})
    block = Block(table, np.arange(4), np.array([2, 0, 1, 3]))
    run = unplaced(block).grouped(np.array([0, 2, 4]))
    costs = Balance(2, cost=cost)._costs(run)
    assert costs.tolist() == {"cells": [6, 4], "tokens": [4, 2], "attention": [10, 4]}[cost]
    assert run.block.within is table
