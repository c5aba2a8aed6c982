"""Samplers mean what torch's mean; their indices are pure functions of seed, epoch and position."""

from __future__ import annotations

import json
import math
import pickle
import re
import threading
from collections import Counter
from itertools import combinations, islice, permutations, product
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.utils.data as td
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp
from engine.test_randomness import global_generators_untouched
from trainpipes.order.permutation import SORTED_ROWS, Permutation, uniform
from trainpipes.samplers import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    RowSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from trainpipes.sources.from_dataset import PackedList


def chi_squared(counts: Any, expected: Any) -> float:
    """The statistic over its quantile of 1 in a million, by Wilson and Hilferty: random below 1."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    free = len(counts) - 1
    quantile = free * (1 - 2 / (9 * free) + 4.75 * math.sqrt(2 / (9 * free))) ** 3
    return float(((counts - expected) ** 2 / expected).sum() / quantile)


# Permutations


@settings(max_examples=60)
@example(n=257**2 + 1, seed=1)
@example(n=257 * 258 + 1, seed=1)
@given(n=st.integers(0, 200_000), seed=st.integers(-5, 2**70))
def test_a_permutation_has_each_number_once(n, seed):
    found = Permutation(n, seed, "x")(np.arange(n))
    assert np.array_equal(np.sort(found), np.arange(n))


@given(n=st.integers(1, 2**62), start=st.integers(0, 2**62), seed=st.integers(0, 9))
def test_numbers_of_huge_permutations_are_in_range_and_differ(n, start, seed):
    positions = np.unique(np.minimum(start + np.arange(300), n - 1))
    found = Permutation(n, seed)(positions)
    assert found.min() >= 0
    assert found.max() < n
    assert len(np.unique(found)) == len(positions)


def test_a_permutation_of_a_billion_rows_takes_no_memory_and_no_time():
    order = Permutation(10**9, 0)
    assert len(pickle.dumps(order)) < 1000
    found = order(np.arange(10**9 - 100_000, 10**9))
    assert len(np.unique(found)) == 100_000
    assert chi_squared(np.bincount(found // 10**7, minlength=100), [1000.0] * 100) < 1
    picks = np.random.default_rng(0).integers(0, 100_000, 50_000)  # in any order, and again
    assert np.array_equal(order(10**9 - 100_000 + picks), found[picks])


@pytest.mark.parametrize("n", [SORTED_ROWS, SORTED_ROWS + 1, 300_007])
def test_where_a_number_comes_says_nothing_about_it(n):
    found = Permutation(n, 11, "epoch", 5)(np.arange(n))
    cells = np.bincount(np.arange(n) * 40 // n * 40 + found * 40 // n, minlength=1600)
    assert chi_squared(cells, [n / 1600] * 1600) < 1
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 6 / math.sqrt(n)
    assert (np.abs(np.diff(found)) == 1).sum() < 14  # two are expected
    residues = np.bincount(np.arange(n) % 32 * 32 + found % 32, minlength=1024)
    assert chi_squared(residues, [n / 1024] * 1024) < 1
    side = math.isqrt(n - 1) + 1  # rows of one half of the network
    for steps in (np.diff(found), np.diff(found, 2), found[side:] - found[:-side]):
        counts = np.bincount(steps % n * 500 // n, minlength=500)
        assert chi_squared(counts, [len(steps) / 500] * 500) < 1


def test_epochs_and_seeds_are_independent():
    n = 100_000
    keys = product((0, 1), ("rows",), (0, 1))
    orders = [Permutation(n, *key)(np.arange(n)) for key in keys]
    for one, other in combinations(orders, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 6 / math.sqrt(n)
        assert (one == other).sum() < 12  # one is expected


def test_all_orders_of_a_few_rows_are_equally_frequent():
    counts = Counter(tuple(Permutation(4, seed)(np.arange(4)).tolist()) for seed in range(4800))
    assert set(counts) == set(permutations(range(4)))
    assert chi_squared(list(counts.values()), [200] * 24) < 1


def test_draws_are_uniform_and_can_be_entered_anywhere():
    draws = uniform(0, 100_000, 0, "x")
    assert chi_squared(np.bincount((draws * 100).astype(int)), [1000] * 100) < 1
    assert 0 <= draws.min() < draws.max() < 1
    for start in (0, 1, 3, 4, 99_990):
        assert np.array_equal(uniform(start, start + 10, 0, "x"), draws[start : start + 10])
    assert uniform(10**15, 10**15 + 1, 0, "x")[0] != draws[0]
    for size in (-1, 2**63):
        with pytest.raises(ValueError, match="0 to 2"):
            Permutation(size, 0)


def golden_orders() -> dict[str, Any]:
    weights = np.arange(50) % 4
    samplers: dict[str, tuple[RowSampler, int]] = {
        "RandomSampler(seed=42), 10 rows": (RandomSampler(seed=42), 10),
        "RandomSampler(seed=42), 65,537 rows": (RandomSampler(seed=42), 65_537),
        "RandomSampler(seed=42), 10^12 rows": (RandomSampler(seed=42), 10**12),
        "RandomSampler(num_samples=12, seed=1), 5 rows": (RandomSampler(num_samples=12, seed=1), 5),
        "RandomSampler(replacement=True, seed=42), 1000 rows": (RandomSampler(None, True, seed=42), 1000),
        "SubsetRandomSampler([9, 5, 7, 1]), 10 rows": (SubsetRandomSampler([9, 5, 7, 1], seed=42), 10),
        "WeightedRandomSampler, 50 rows": (WeightedRandomSampler(weights, 40, seed=42), 50),
        "WeightedRandomSampler without replacement, 50 rows": (
            WeightedRandomSampler(weights, 30, False, seed=42), 50
        ),
        "DistributedSampler(num_replicas=4), 10 rows": (DistributedSampler(None, 4, 0, seed=42), 10),
    }  # fmt: skip
    return {
        name: [s.index(epoch, 0, min(12, s.length(rows)), rows).tolist() for epoch in (0, 1)]
        for name, (s, rows) in samplers.items()
    }


def test_orders_are_those_that_earlier_versions_gave(golden):
    golden("samplers.json", golden_orders())


# What torch's samplers mean


@pytest.mark.parametrize(("rows", "samples"), [(7, None), (7, 1), (7, 3), (7, 30), (1, 5)])
def test_a_random_sampler_without_replacement_counts_as_torchs(rows, samples):
    kinds = RandomSampler, td.RandomSampler
    ours, theirs = (kind(range(rows), num_samples=samples) for kind in kinds)
    found = list(ours)
    assert len(ours) == len(theirs) == len(found)
    full = rows * (len(found) // rows)  # one permutation after the other
    assert Counter(found[:full]) == Counter(list(theirs)[:full])
    for start in range(0, len(found), rows):
        assert len(set(found[start : start + rows])) == len(found[start : start + rows])


def test_a_random_sampler_with_replacement_is_uniform_as_torchs_is():
    ours = RandomSampler(20, True, 40_000, seed=3)
    theirs = td.RandomSampler(range(20), True, 40_000, torch.Generator().manual_seed(0))
    for sampler in (ours, theirs):
        assert chi_squared(np.bincount(list(sampler), minlength=20), [2000] * 20) < 1
    pairs = np.array(list(ours)).reshape(-1, 2)
    assert chi_squared(np.bincount(pairs[:, 0] * 20 + pairs[:, 1], minlength=400), [50] * 400) < 1


def test_a_subset_sampler_has_torchs_rows():
    for indices in ([3, 9, 4], [], [5], [2, 2, 7]):
        assert Counter(SubsetRandomSampler(indices)) == Counter(td.SubsetRandomSampler(indices))
        assert len(SubsetRandomSampler(indices)) == len(indices)
    assert list(SubsetRandomSampler(torch.arange(4))) != list(SubsetRandomSampler(range(4), seed=1))


WEIGHTS = [0.0, 1.0, 2.0, 0.5, 0.0, 6.5, 0.0]


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e9)), min_size=1, max_size=70).filter(sum),
    st.integers(0, 9),
)
def test_weighted_draws_are_looked_up_in_the_cumulated_weights(weights, seed):
    sampler = WeightedRandomSampler(weights, 500, seed=seed)
    ends = np.cumsum(weights)
    wanted = uniform(0, 500, seed, "weighted", 3) * ends[-1]
    last = int(np.flatnonzero(weights)[-1])
    expected = np.minimum(np.searchsorted(ends, wanted, side="right"), last)
    assert np.array_equal(sampler.index(3, 0, 500, len(weights)), expected)


def test_a_weighted_sampler_without_replacement_draws_as_torchs_does():
    ours, theirs = WeightedRandomSampler(WEIGHTS, 3, False), td.WeightedRandomSampler(
        WEIGHTS, 3, False, torch.Generator().manual_seed(0)
    )  # fmt: skip
    found: list[Counter[tuple[int, ...]]] = [Counter(), Counter()]
    for counts, sampler in zip(found, (ours, theirs), strict=True):
        for _ in range(6000):
            drawn = tuple(sampler)
            assert len(set(drawn)) == 3
            counts[drawn] += 1
    mine, torchs = found
    orders = [order for order in permutations([1, 2, 3, 5], 3) if torchs[order] > 20]
    assert len(orders) > 15
    both = np.array([[c[o] for o in orders] for c in found])
    expected = both.sum(axis=0) / 2
    assert chi_squared(both[0], expected * both[0].sum() / expected.sum()) < 1
    assert mine.keys() <= set(permutations([1, 2, 3, 5], 3))


def test_a_row_without_weight_is_not_drawn_before_one_of_the_least_weight():
    sampler = WeightedRandomSampler([0.0, 1e-320, 1.0, 0.0, 5e-324], 3, False)
    assert [set(sampler) for _ in range(9)] == [{1, 2, 4}] * 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.bool])
def test_weights_may_be_tensors_of_any_numbers(dtype):
    weights = torch.tensor([0, 1, 1], dtype=dtype)
    weights = weights.requires_grad_() if dtype.is_floating_point else weights
    expected = list(WeightedRandomSampler([0.0, 1.0, 1.0], 20))
    assert list(WeightedRandomSampler(weights, 20)) == expected


def test_samplers_without_chance_are_torchs():
    for rows, drop_last in product((10, 9, 2, 0), (False, True)):
        ours = BatchSampler(SequentialSampler(rows), 3, drop_last)
        theirs = td.BatchSampler(td.SequentialSampler(range(rows)), 3, drop_last)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)
        assert list(SequentialSampler(rows)) == list(range(rows))
    assert list(RandomSampler(0)) == []


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("rows", "replicas"), [(10, 3), (12, 4), (5, 7), (2, 5), (1, 1)])
def test_a_distributed_sampler_deals_as_torchs_does(rows, replicas, drop_last):
    for rank in range(replicas):
        ours = DistributedSampler(range(rows), replicas, rank, False, drop_last=drop_last)
        theirs = td.DistributedSampler(range(rows), replicas, rank, False, drop_last=drop_last)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)
    options = {"drop_last": drop_last}
    parts = [list(DistributedSampler(range(rows), replicas, r, **options)) for r in range(replicas)]
    least = 0 if drop_last else 1
    counts = Counter(row for part in parts for row in part)
    assert {len(part) for part in parts} == {len(theirs)}
    assert all(least <= counts[row] <= -(-replicas // rows) + 1 for row in range(rows))


def test_epochs_follow_each_other_and_can_be_set():
    sampler = RandomSampler(1000)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(sampler) == second


def test_numbers_may_be_those_of_numpy():
    two, four = np.int64(2), np.int64(4)
    for sampler, same in (
        (RandomSampler(four, num_samples=two, seed=two), RandomSampler(4, num_samples=2, seed=2)),
        (SubsetRandomSampler([3, 1, 2], seed=two), SubsetRandomSampler([3, 1, 2], seed=2)),
        (DistributedSampler(four, two, np.int64(1), seed=two), DistributedSampler(4, 2, 1, seed=2)),
    ):
        sampler.set_epoch(four)
        same.set_epoch(4)
        json.dumps(iter(sampler).state_dict())
        assert list(sampler) == list(same)
        state = tp.from_dataset([0, 1, 2, 3], sampler).state_dict()
        assert state == tp.from_dataset([0, 1, 2, 3], same).state_dict()


BAD: dict[str, tuple[Any, str]] = {
    "negative weights": (lambda: WeightedRandomSampler([1, -1], 2), "got -1.0 for row 1"),
    "infinite weights": (lambda: WeightedRandomSampler([1, math.inf], 2), "finite"),
    "weights that sum to 0": (lambda: WeightedRandomSampler([0, 0], 2), "above 0 for some row"),
    "weights that sum to no number": (lambda: WeightedRandomSampler([1e308] * 3, 2), "a sum of inf"),
    "weights of weights": (lambda: WeightedRandomSampler([[1.0]], 2), r"for each row.*got \[\[1.0\]\]"),
    "words as weights": (lambda: WeightedRandomSampler(["a"], 2), "must be a number"),
    "more draws than rows": (lambda: WeightedRandomSampler([1, 0, 1], 3, False), "only 2 rows"),
    "no draws": (lambda: WeightedRandomSampler([1.0], 0), "1 or more"),
    "replacement that is no bool": (lambda: RandomSampler(3, 1), "True or False"),
    "a number of samples that is none": (lambda: RandomSampler(3, num_samples=2.5), "integer"),
    "rows that are no number": (lambda: RandomSampler(object()), "number of rows"),
    "indices that are no numbers": (lambda: SubsetRandomSampler(["a"]), "row numbers"),
    "negative indices": (lambda: SubsetRandomSampler([1, -2]), "got -2"),
    "another sampler in batches": (lambda: BatchSampler([1], 2), "torch's BatchSampler"),
    "batches of nothing": (lambda: BatchSampler(SequentialSampler(3), 0), "1 or more"),
    "a rank that is none": (lambda: DistributedSampler(9, 3, 3), "0 to 2, got 3"),
    "a rank that is no number": (lambda: DistributedSampler(9, 3, "1"), "rank.*integer.*got '1'"),
    "an epoch that is no number": (lambda: RandomSampler(3).set_epoch(1.5), r"set_epoch\(epoch\).*got 1.5"),
    "a rank beyond the world": (lambda: list(DistributedSampler(9, rank=3)), "0 to 0, got 3; give num_rep"),
    "a rank beyond the world, for a length": (lambda: len(DistributedSampler(9, rank=1)), "0 to 0, got 1"),
    "draws from no rows": (lambda: list(RandomSampler(0, True, 3)), "without rows"),
    "turns of no rows": (lambda: list(RandomSampler(0, num_samples=3)), "without rows"),
    "no rows to go through": (lambda: list(RandomSampler()), "does not know how many rows"),
    "draws from nothing": (lambda: list(tp.from_dataset([], RandomSampler(num_samples=3))), "without rows"),
    "keys of a dict": (lambda: tp.from_dataset({"cat": 3}), r"give sampler=list\(dataset\), or"),
    "another number of rows": (lambda: list(tp.from_dataset([1], RandomSampler(3))), "made for 3 rows"),
    "another number of weights": (
        lambda: list(tp.from_dataset([1], WeightedRandomSampler([1, 1], 2))), "made for 2 rows"
    ),
    "indices of rows that are not there": (
        lambda: list(tp.from_dataset([1, 2], SubsetRandomSampler([1, 2]))), "names row 2, and there are 2"
    ),
    "both samplers": (
        lambda: tp.from_dataset([1], SequentialSampler(), batch_sampler=[[0]]), "got both"
    ),
    "batches where rows should be": (
        lambda: tp.from_dataset([1]).shuffle(sampler=td.BatchSampler([0], 1, False)), "sampler of rows"
    ),
    "rows where batches should be": (
        lambda: tp.from_dataset([1], batch_sampler=td.RandomSampler([1])), "a BatchSampler for batch_sampler="
    ),
    "batches of batches": (
        lambda: tp.from_dataset([1], batch_sampler=[[0]]).batch(2), r"leave out batch\(2\)"
    ),
    "a sample of batches": (
        lambda: tp.from_dataset([1], batch_sampler=[[0]]).sample(0.5), "gives batches"
    ),
    "batches in a loader that batches": (
        lambda: list(td.DataLoader(tp.from_dataset([1], batch_sampler=[[0]]), batch_size=2)),
        "batch_size=None",
    ),
    "nothing to draw by": (lambda: tp.from_dataset([1]).shuffle(sampler=3), "one of trainpipes.samplers"),
    "another sampler beside it": (
        lambda: tp.from_dataset([1, 2], RandomSampler()).shuffle(scope="global"), "leave one out"
    ),
    "a filter before it": (
        lambda: tp.from_dataset([1, 2]).filter(bool).shuffle(sampler=RandomSampler()), "put filter.*after it"
    ),
    "a stream": (lambda: tp.from_iterable(list).shuffle(sampler=RandomSampler()), "reads rows by number"),
    "files": (lambda: tp.list_files("x").read_parquet().shuffle(scope="global"), "write_memmap"),
    "paths": (lambda: tp.list_files("x").shuffle(scope="global").read_parquet(), "reads rows by number"),
    "a buffer of all rows": (lambda: tp.from_dataset([1]).shuffle(10, scope="global"), "where buffer_size"),
    "an unknown scope": (lambda: tp.from_dataset([1]).shuffle(scope="all"), '"buffer" or "global"'),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_samplers_are_refused_with_the_value_and_the_way_out(kind):
    make, said = BAD[kind]
    with pytest.raises(tp.ConfigError, match=said):
        make()


# Their states


def every_sampler() -> dict[str, Any]:
    return {
        "random": RandomSampler(10_000, seed=1),
        "replacement": RandomSampler(10_000, True, 9000),
        "subset": SubsetRandomSampler(range(100, 9000)),
        "weighted": WeightedRandomSampler(np.arange(5000), 9001),
        "weighted, without replacement": WeightedRandomSampler(np.arange(1, 5001), 4999, False),
        "batches": BatchSampler(RandomSampler(10_000), 7),
        "distributed": DistributedSampler(10_001, 3, 1),
    }


@pytest.mark.parametrize("name", every_sampler())
def test_a_sampler_goes_on_where_a_state_was_taken(name):
    whole = every_sampler()[name]
    list(whole)
    second = list(whole)
    for stop in (0, 1, 500, 1000, len(second)):
        sampler = every_sampler()[name]
        list(sampler)
        iterator = iter(sampler)
        taken = list(islice(iterator, stop))
        state = json.loads(json.dumps(iterator.state_dict()))
        assert len(json.dumps(state)) < 300
        fresh = every_sampler()[name]
        again = iter(fresh)
        again.load_state_dict(state)
        assert taken + list(again) == second
        if stop == 500:
            assert list(fresh) == list(whole)  # and so do the epochs after it


def test_a_distributed_state_goes_on_with_another_number_of_replicas():
    def part(replicas: int, rank: int) -> Any:
        return iter(DistributedSampler(1000, replicas, rank, seed=5))

    whole = list(part(1, 0))
    first = [part(4, rank) for rank in range(4)]
    taken = [next(iterator) for _ in range(30) for iterator in first]
    rest = []
    for rank in range(2):
        iterator = part(2, rank)
        iterator.load_state_dict(first[rank].state_dict())
        rest.append(list(iterator))
    assert taken + [row for turn in zip(*rest, strict=True) for row in turn] == whole


def test_a_state_of_another_sampler_is_refused():
    state = iter(RandomSampler(10, seed=1)).state_dict()
    with pytest.raises(tp.StateError, match="seed"):
        iter(RandomSampler(10, seed=2)).load_state_dict(state)
    with pytest.raises(tp.StateError, match=r"of the sampler \[\], and this is"):
        iter(RandomSampler(10)).load_state_dict([])  # type: ignore[arg-type]
    state = iter(RandomSampler(10)).state_dict()
    with pytest.raises(
        tp.StateError, match="over 10 rows, and this one is over 20: make the sampler"
    ):
        iter(RandomSampler(20)).load_state_dict(state)
    del state["rows"]  # older states have none
    iter(RandomSampler(20)).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_saves_them(workers):
    rows = list(range(100))

    def loader() -> Any:
        sampler = RandomSampler(rows, seed=3)
        return StatefulDataLoader(rows, batch_size=8, sampler=sampler, num_workers=workers)

    def lists(batches: Any) -> list[list[int]]:
        return [batch.tolist() for batch in batches]

    whole = loader()
    first, second = lists(whole), lists(whole)
    assert first != second
    stopped = loader()
    list(stopped)
    iterator = iter(stopped)
    taken = lists(next(iterator) for _ in range(5))
    fresh = loader()
    fresh.load_state_dict(stopped.state_dict())
    assert taken + lists(fresh) == second


# Which replica it is, where that is not said


@pytest.mark.parametrize(
    ("replicas", "rank", "expected"),
    [(None, None, (3, 1)), (4, None, (4, 1)), (None, 0, (3, 0)), (None, 2, (3, 2)), (5, 3, (5, 3))],
)  # fmt: skip
def test_what_is_left_out_is_the_processs_own(replicas, rank, expected, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    ours = DistributedSampler(range(22), replicas, rank, shuffle=False)
    theirs = td.DistributedSampler(range(22), *expected, shuffle=False)  # type: ignore[arg-type, var-annotated]
    assert (list(ours), len(ours)) == (list(theirs), len(theirs))


def test_the_environment_is_asked_for_what_is_left_out_alone(monkeypatch):
    monkeypatch.setenv("RANK", "one")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert list(DistributedSampler(range(6), 3, 1, shuffle=False)) == [1, 4]
    for replicas, rank in ((3, None), (None, 1), (None, None)):
        with pytest.raises(tp.ConfigError, match="RANK"):
            list(DistributedSampler(range(6), replicas, rank, shuffle=False))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_of_the_environment_reads_its_part(rank, monkeypatch):
    pipe = tp.from_dataset(range(18)).sharding_filter(3).batch(2)
    expected = list(pipe.distributed(rank=rank, world_size=3))
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert list(pipe) == expected == [[n, n + 1] for n in range(6 * rank, 6 * rank + 6, 2)]


# In a pipeline


class Squares:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return int(index) ** 2


def test_the_order_is_the_samplers_whatever_the_number_of_shards():
    sampler = RandomSampler(seed=9)
    orders = []
    for shards in (1, 4, 24):
        pipe = tp.from_dataset(Squares(), sampler).sharding_filter(shards).batch(7)
        orders.append([list(pipe) for _ in range(2)])
    assert orders[0] == orders[1] == orders[2]
    sampler.rows = 100
    sampler.set_epoch(0)
    assert [row for batch in orders[0][0] for row in batch] == [n**2 for n in sampler]


@pytest.mark.parametrize("kind", ["dataset", "arrow", "chunked", "tensors", "memmap"])
def test_every_source_with_row_numbers_can_be_drawn_from(kind, tmp_path):
    rows = 500
    x = np.arange(rows)
    parts = [pa.table({"x": x[a:b]}) for a, b in [(0, 0), (0, 100), (100, 101), (101, 500)]]
    tp.write_memmap(tmp_path / "x", {"x": x})
    source = {
        "dataset": lambda: tp.from_dataset([{"x": n} for n in range(rows)]),
        "arrow": lambda: tp.from_arrow(pa.table({"x": x})),
        "chunked": lambda: tp.from_arrow(pa.concat_tables(parts)),
        "tensors": lambda: tp.from_tensors(x=x),
        "memmap": lambda: tp.from_memmap(tmp_path / "x"),
    }[kind]()
    weighted = WeightedRandomSampler(x, 300, seed=2)
    found = [int(row["x"]) for row in source.shuffle(sampler=weighted)]
    assert found == weighted.index(0, 0, 300, rows).tolist()
    globally = source.shuffle(scope="global", seed=2)
    expected = RandomSampler(seed=2).index(0, 0, rows, rows).tolist()
    assert [int(row["x"]) for row in globally] == expected
    assert sorted(expected) == list(range(rows))
    part = source.skip(10).take(20).shuffle(scope="global")
    assert sorted(int(row["x"]) for row in part) == list(range(10, 30))


def test_a_batch_sampler_of_torch_says_which_rows_make_a_batch():
    batches = [[3, 1], [4], [1, 5, 9]]
    rows = ["abcdefghij"[n] for n in range(10)]
    pipe = tp.from_dataset(rows, batch_sampler=batches).sharding_filter(2)
    assert list(pipe) == [["d", "b"], ["e"], ["b", "f", "j"]]
    assert list(pipe.collate("".join)) == ["db", "e", "bfj"]
    assert len(pipe) == 3
    torchs = td.BatchSampler(td.RandomSampler(rows), 4, False)
    first, second = list(pipe := tp.from_dataset(rows, batch_sampler=torchs)), list(pipe)
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(row for batch in first for row in batch) == rows
    assert first != second


class ByName(dict[Any, Any]):
    pass


def test_keys_need_not_be_numbers():
    dataset = ByName({("en", 1): "a", ("en", 2): "b", "x": "c"})
    keys = [("en", 2), "x", ("en", 1), "x"]
    assert list(tp.from_dataset(dataset, keys).batch(3)) == [["b", "c", "a"], ["c"]]
    assert list(tp.from_dataset({1: "b", 0: "a"})) == ["a", "b"]
    batched = tp.from_dataset(dataset, batch_sampler=[keys[:2], keys[2:]])
    assert list(batched) == [["b", "c"], ["a", "c"]]
    for numbers in (["a", "b"], [[0], [0, 1]]):
        with pytest.raises(tp.DataError, match="no row number"):
            list(tp.from_dataset([1, 2]).shuffle(sampler=numbers))


def test_torchs_samplers_draw_from_their_own_seeds_and_leave_global_ones_alone():
    rows = Squares()
    weighted = td.WeightedRandomSampler([1.0] * 100, 30, generator=torch.Generator().manual_seed(3))
    for sampler in (
        td.RandomSampler(rows), td.SubsetRandomSampler(range(40)), weighted,
        td.BatchSampler(td.RandomSampler(rows), 7, True),
    ):  # fmt: skip
        found = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            with global_generators_untouched():
                name = "batch_sampler" if isinstance(sampler, td.BatchSampler) else "sampler"
                pipe = tp.from_dataset(rows, **{name: sampler})
                found.append([list(pipe), list(pipe)])
        assert found[0] == found[1]
        assert found[0][0] != found[0][1]


class Noisy(td.Sampler[int]):
    """A sampler of one's own, that draws from the global generator."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        return iter(torch.randperm(20).tolist())


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_sampler_of_ones_own_is_called_by_the_thread_that_iterates(shuffled, batched):
    class Asked(Noisy):
        def __iter__(self) -> Any:
            threads.append(threading.current_thread())
            return super().__iter__()

    threads: list[threading.Thread] = []
    rows = list(range(20))
    plain = tp.from_dataset(rows)
    pipe = plain.shuffle(sampler=Asked()) if shuffled else tp.from_dataset(rows, Asked())
    pipe = pipe.batch(4).collate().repeat(3) if batched else pipe.repeat(3)
    assert len(list(tp.Loader(pipe))) == (15 if batched else 60)
    assert {*threads} == {threading.main_thread()}


def test_a_sampler_of_ones_own_may_draw_from_the_global_generator():
    for make in (
        lambda: tp.from_dataset(Squares(), Noisy()),
        lambda: tp.from_dataset(Squares()).shuffle(sampler=Noisy()),
    ):
        with global_generators_untouched():
            pipe = make()
            first, second = list(pipe), list(pipe)
        torch.manual_seed(77)
        again = make()
        assert [list(again), list(again)] == [first, second]
        assert first != second


def test_torchs_distributed_sampler_stands_for_all_its_replicas():
    theirs = [td.DistributedSampler(range(10), 3, rank, seed=6) for rank in range(3)]
    turns = [row for turn in zip(*theirs, strict=True) for row in turn]
    for make in (
        lambda: tp.from_dataset(list(range(10)), theirs[1]),
        lambda: tp.from_dataset(list(range(10))).shuffle(sampler=theirs[1]),
    ):
        pipe = make().sharding_filter(3)
        assert list(pipe) == turns
        assert len(pipe) == 12
        parts = [list(pipe.distributed(rank=rank, world_size=3)) for rank in range(3)]
        assert parts == [list(sampler) for sampler in theirs]


class Short(td.Sampler[int]):
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter([0, 1, 2])


class Endless(td.Sampler[int]):
    """Without a length, and without an end."""

    def __iter__(self) -> Any:
        while True:
            yield int(torch.randint(100, ()))


def test_a_sampler_without_an_end_is_asked_for_a_few_keys_at_a_time():
    with global_generators_untouched():
        pipe = tp.from_dataset(Squares(), Endless()).batch(4)
        first = list(islice(pipe, 200))
        second = list(islice(pipe, 200))
    assert first != second
    torch.manual_seed(5)
    assert list(islice(tp.from_dataset(Squares(), Endless()).batch(4), 200)) == first


class SizedEndless(Endless):
    def __len__(self) -> int:
        return 7


def test_a_sampler_that_gives_another_number_than_its_length_is_an_error():
    for make in (
        lambda sampler: tp.from_dataset(Squares()).shuffle(sampler=sampler),
        lambda sampler: tp.from_dataset(Squares(), sampler),
        lambda sampler: tp.from_dataset(Squares(), batch_sampler=sampler).sharding_filter(4),
    ):
        with pytest.raises(tp.DataError, match="its length is 5, and it gave 3"):
            list(make(Short()))
        with pytest.raises(tp.DataError, match="its length is 7, and it gave more"):
            list(make(SizedEndless()))
    with pytest.raises(tp.DataError, match="gives row 100, and there are 100"):
        list(tp.from_dataset(Squares()).shuffle(sampler=[5, 100]))


def test_it_prints_as_it_was_made() -> None:
    drawn = RandomSampler(replacement=True, num_samples=5)
    assert repr(drawn) == "RandomSampler(replacement=True, num_samples=5, seed=0)"
    batches = BatchSampler(RandomSampler(seed=3), 4, drop_last=True)
    assert repr(batches) == "BatchSampler(RandomSampler(seed=3), 4, drop_last=True)"


class Odd(RowSampler):
    """Every odd row, the last one first."""

    def length(self, rows: int) -> int:
        return rows // 2

    def index(self, epoch: int, start: int, stop: int, rows: int) -> Any:
        return 2 * (rows // 2 - np.arange(start, stop)) - 1


def test_a_sampler_of_ones_own_is_a_length_and_a_function():
    pipe = tp.from_dataset(list(range(9)), Odd()).sharding_filter(2).batch(3)
    assert list(pipe) == [[7, 5, 3], [1]]
    assert list(Odd(9)) == [7, 5, 3, 1]


def test_a_state_names_the_sampler_that_differs():
    def pipe(sampler: Any) -> tp.Pipeline:
        return tp.from_dataset(Squares()).shuffle(sampler=sampler).batch(4)

    state = pipe(WeightedRandomSampler([1.0] * 100, 50)).state_at(3)
    with pytest.raises(tp.StateError, match="stages/shuffle/sampler/digest"):
        pipe(WeightedRandomSampler([1.0] * 99 + [2.0], 50)).load_state_dict(state)
    with pytest.raises(tp.StateError, match="stages/shuffle/sampler/seed"):
        pipe(WeightedRandomSampler([1.0] * 100, 50, seed=1)).load_state_dict(state)


def test_a_position_in_a_huge_epoch_is_reached_at_once():
    pipe = tp.from_dataset(range(10**9)).shuffle(scope="global").sharding_filter(4).batch(8)
    state = pipe.state_at(10**8)
    assert len(json.dumps(state)) < 2000
    pipe.load_state_dict(state)
    rows = RandomSampler().index(0, 8 * 10**8, 8 * 10**8 + 16, 10**9).tolist()
    assert list(islice(pipe, 2)) == [rows[:8], rows[8:]]


class Own(RowSampler):
    def __init__(self, length: Any, index: Any) -> None:
        super().__init__()
        self._own = length, index

    def length(self, rows: int) -> int:
        return self._own[0](rows)  # type: ignore[no-any-return]

    def index(self, epoch: int, start: int, stop: int, rows: int) -> Any:
        return self._own[1](start, stop)


def rows_of_own(length: Any, index: Any) -> list[int]:
    return list(tp.from_dataset(list(range(6))).shuffle(sampler=Own(length, index)))


def test_a_sampler_of_ones_own_may_give_lists_and_numbers_of_numpy():
    def index(start: int, stop: int) -> list[int]:
        return list(range(start, stop))

    assert rows_of_own(np.int64, index) == list(range(6))
    sampler = Own(np.int64, index)
    sampler.rows = 6
    assert list(sampler) == list(range(6))


@pytest.mark.parametrize("length", [lambda _: None, lambda _: 2.5, lambda _: -1])
def test_a_sampler_without_a_length_is_refused(length):
    with pytest.raises(tp.ConfigError, match=r"length\(6\) must be an integer of 0 or more"):
        rows_of_own(length, np.arange)


@pytest.mark.parametrize(
    "index",
    [
        lambda *_: None,
        lambda start, stop: np.arange(start, stop) - 1,
        lambda start, stop: np.arange(start, stop) + 1,
        lambda start, stop: np.arange(start, stop - 1),
        lambda start, stop: np.arange(start, stop) * 0.5,
    ],
)
def test_rows_that_are_not_there_are_never_drawn(index):
    with pytest.raises(tp.DataError, match=r"order must give 6 row numbers, .* 0 to 5"):
        rows_of_own(lambda rows: rows, index)


def test_a_sampler_and_a_batch_sampler_are_not_given_at_once() -> None:
    with pytest.raises(tp.ConfigError, match="must have a sampler or a batch_sampler, got both"):
        tp.from_dataset([1], sampler=[0], batch_sampler=[[0]])


class Lossy(Squares):
    def __getitems__(self, keys: list[int]) -> list[int]:
        return [self[key] for key in keys if key != 3]


class Stops(Squares):
    def __getitem__(self, key: int) -> int:
        if key == 3:
            raise StopIteration
        return super().__getitem__(key)


@pytest.mark.parametrize("order", [{}, {"sampler": [1, 3]}, {"batch_sampler": [[1], [2, 3]]}])
def test_a_dataset_that_gives_fewer_rows_than_it_is_asked_for_is_an_error(order):
    with pytest.raises(tp.DataError, match=r"a row for each index, got \d+ rows for \d+"):
        list(tp.from_dataset(Lossy(), **order))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(tp.from_dataset(Stops(), **order))


class InColumns(Squares):
    def __getitems__(self, keys: list[int]) -> dict[str, list[int]]:
        return {"square": [self[key] for key in keys]}


def test_a_dataset_that_gives_columns_for_rows_is_an_error():
    with pytest.raises(tp.DataError, match="a row for each index, got a dict for 1"):
        list(tp.from_dataset(InColumns(), [3]))


class WithoutRows(Squares):
    def __getitems__(self, keys: list[int]) -> Any:
        return None


class BadRow(Squares):
    def __getitem__(self, key: int) -> int:
        if key == 77:
            raise KeyError(key)
        return super().__getitem__(key)


class BadRows(BadRow):
    def __getitems__(self, keys: list[int]) -> list[int]:
        return [self[key] for key in keys]


def test_an_error_of_a_dataset_names_its_row_where_that_is_known():
    with pytest.raises(tp.DataError, match="a row for each index, got a NoneType for"):
        list(tp.from_dataset(WithoutRows()))
    part: Any = td.Subset(td.Subset(BadRow(), range(100)), range(70, 90))
    several: Any = td.Subset(BadRows(), range(70, 90))
    for data, note in (
        (part, r"raised in Subset\[…\] at row 7"),
        (several, r"raised in Subset\[…\]"),
    ):
        with pytest.raises(KeyError) as caught:
            list(tp.from_dataset(data))
        assert re.fullmatch(note, caught.value.__notes__[0])


def test_rows_that_are_parts_of_a_tensor_are_sent_to_workers_alone():
    numbers = torch.arange(100_000).reshape(1000, 100)
    rows: list[Any] = [(row, {"first": row[:1], "none": row[:0]}) for row in numbers]
    packed = PackedList(rows)
    assert len(packed._content) < 3 * numbers.nbytes
    whole, more = packed[999]
    assert torch.equal(whole, numbers[999])
    assert (more["first"].tolist(), len(more["none"])) == ([99_900], 0)
    whole[:] = 0
    assert torch.equal(packed[999][0], numbers[999])
    pipe = tp.from_dataset(list(numbers)).sharding_filter(2).batch(100)
    batches = list(tp.Loader(pipe.collate(), num_workers=1))
    assert sorted(torch.cat(batches)[:, 1].tolist()) == numbers[:, 1].tolist()


@pytest.mark.parametrize("keys", [map(int, "012"), (n for n in [1]), iter([0])])
@pytest.mark.parametrize("option", ["sampler", "batch_sampler"])
def test_what_has_no_second_epoch_is_no_sampler(option, keys):
    with pytest.raises(tp.ConfigError, match="empty after one epoch: give list"):
        tp.from_dataset(Squares(), **{option: keys})


class BeginsAnew(td.Sampler[int]):
    """A sampler that is its own iterator."""

    def __iter__(self) -> Any:
        self.left = [2, 0]
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


def test_a_sampler_may_be_its_own_iterator_and_a_set_is_none():
    pipe = tp.from_dataset(["a", "b", "c"], BeginsAnew())
    assert pipe.peek() == "c"
    assert [list(pipe), list(pipe)] == [["c", "a"]] * 2
    with pytest.raises(tp.ConfigError, match=r"another order in another process: give sorted\("):
        tp.from_dataset({"a": 1, "b": 2}, {"b", "a"})
    by_name = {"b": 2, "a": 1}
    assert list(tp.from_dataset(by_name, by_name.keys())) == [2, 1]
