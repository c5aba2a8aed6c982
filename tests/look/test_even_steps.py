"""``stats(world_size=)`` says, before one pays for it, how even the steps of some ranks are."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp

RANKS = 16


def dealt(shards: int = RANKS, rows: int = 6000, column: str = "input_ids") -> tp.Pipeline:
    lengths = np.random.default_rng(0).lognormal(4, 0.9, rows).clip(2, 300).astype(np.int32)
    edges = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = pa.ListArray.from_arrays(edges, pa.array(np.zeros(lengths.sum(), np.int16)))
    rows_ = tp.from_arrow(pa.table({column: ids}))
    return rows_.sharding_filter(shards).shuffle(500)


def figures(pipe: tp.Pipeline, **options: Any) -> Any:
    found = pipe.stats(**options).steps
    assert found is not None
    return found


def test_the_figures_are_those_of_the_batches_of_each_step() -> None:
    lengths = (9, 1, 2, 8)  # of the first shard, then of the second
    rows = tp.from_dataset([{"input_ids": [1] * n} for n in lengths]).sharding_filter(2)
    found = figures(rows.batch(1).pad_collate(), world_size=2)
    assert (found.world_size, found.steps) == (2, 2)
    assert found.tokens == pytest.approx(20 / (2 * (9 + 8)))  # steps of 9 and 2, 1 and 8
    assert found.cells == pytest.approx((9 / 5.5 + 8 / 4.5) / 2)
    assert found.attention == pytest.approx((81 / 42.5 + 64 / 32.5) / 2)
    assert found.balanced.tokens == pytest.approx(20 / (2 * (9 + 2)))  # 9 and 8, 1 and 2


def test_it_says_what_balance_makes_of_them() -> None:
    """Exactly what the pipeline with the stage gives, also of the last window, which is shorter."""
    for pipe, cost in (
        (dealt().batch(4), None),
        (dealt().batch(max_tokens=900), "attention"),  # cells are about the same anyway
        (dealt().pack(300).batch(2), None),
    ):
        pipes = pipe, pipe.balance(cost=cost)
        plain, real = (figures(p, batches=10_000, world_size=RANKS) for p in pipes)
        assert real.balanced is None
        assert plain.balanced == replace(real, cost=cost)
        assert plain.balanced.cells < plain.cells or plain.balanced.attention < plain.attention


def test_rows_and_batches_that_are_padded_have_the_same_figures() -> None:
    for pipe in (dealt().batch(4), dealt().pack(300).batch(2)):
        assert figures(pipe, world_size=RANKS) == figures(pipe.pad_collate(), world_size=RANKS)
    other = dealt(column="ids").batch(max_tokens=900, column="ids")
    assert figures(other, world_size=RANKS).tokens > 0.3


def test_padding_to_one_length_makes_cells_even() -> None:
    pipe = dealt().batch(4).pad_collate(pad_to_multiple_of=300)
    assert figures(pipe, world_size=RANKS).cells == 1


def test_buckets_are_even_by_themselves() -> None:
    found = figures(dealt().bucket_by_length(4, buffer_size=256).pad_collate(), world_size=RANKS)
    assert found.balanced is None
    assert found.tokens > 0.7


@pytest.mark.parametrize(
    ("shards", "ranks", "batches"), [(16, 4, 1024), (4, 16, 1024), (4, 3, 256)]
)
def test_a_window_of_each_shard_is_looked_at(shards: int, ranks: int, batches: int) -> None:
    found = dealt(shards).batch(4).stats(world_size=ranks)
    assert found.batches == batches
    assert f"the first {batches:,} of an epoch" in str(found)
    assert found.steps is not None
    assert found.steps.steps == batches // ranks


def test_they_are_printed_and_in_the_dict() -> None:
    found = dealt().batch(4).stats(world_size=RANKS)
    steps = found.to_dict()["steps"]
    assert json.loads(json.dumps(steps)) == steps
    assert {*steps} == {"world_size", "steps", "tokens", "cells", "attention", "balanced", "cost"}
    lines = [line for line in str(found).splitlines() if "largest / mean" in line]
    assert len(lines) == 2
    assert f"64 steps of 16 ranks: {steps['tokens']:.1%} of ranks x largest" in lines[0]
    assert f"with .balance(): {steps['balanced']['tokens']:.1%}" in lines[1]
    found = dealt().batch(max_tokens=900).stats(world_size=RANKS)
    assert 'with .balance(cost="attention"): ' in str(found)


def test_without_ranks_nothing_is_said_of_them() -> None:
    found = dealt().batch(4).pad_collate().stats()
    assert found.batches == 100
    assert found.steps is None
    assert "steps" not in str(found)


def test_only_whole_steps_count() -> None:
    """Shards end at different batches, and one goes on by itself."""
    rows = tp.from_dataset([{"input_ids": [1] * n} for n in (4, 4, 4, 4, 4)]).sharding_filter(2)
    found = figures(rows.batch(1), world_size=2)
    assert (found.steps, found.tokens, found.cells) == (2, 1, 1)


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (lambda p: p.batch(4), {"world_size": 0}, r"stats\(world_size\) must be an integer of 1"),
        (lambda p: p.batch(4), {"world_size": 9, "batches": 8}, "must be at most .* got 9 with 8"),
        (lambda p: p.batch(4).collate(len), {"world_size": 2}, "got int; ask .* before collate"),
        (lambda p: p.rename({"input_ids": "ids"}).batch(4), {"world_size": 2}, "with 'input_ids'"),
    ],
)  # fmt: skip
def test_what_tells_no_figures_is_refused(make: Any, options: Any, said: str) -> None:
    with pytest.raises(tp.ConfigError, match=said):
        make(dealt()).stats(**options)
