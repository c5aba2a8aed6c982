"""Counted pipelines give from any batch on, and in any number of lanes, what they give from their start."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from golden_pipelines import COUNTED
from trainpipes.engine.shards.shard_items import ShardItems
from trainpipes.engine.shards.shard_rows import open_windows
from trainpipes.engine.topology import Topology
from trainpipes.state.format import Position

#: Batches of each that are compared, where there is no end.
MOST = 24
#: Ranks and workers, and at which epochs and batches they start: all of one consumer, one of several.
STARTS = (
    ((1, 1), ((0, 0), (0, 7), (1, 1))),
    ((2, 1), ((0, 7),)),
    ((2, 2), ((1, 1),)),
    ((4, 1), ((0, 7),)),
)


def both_ways(pipe: tp.Pipeline, topology: Topology, m: int, number: int = 0) -> tuple[Any, Any]:
    """The items of a consumer by arithmetic, in several lanes, and read on from the pass's start."""
    plan = pipe._iteration.plan
    assert plan.counted
    num_shards = plan.chain.num_shards
    shards = topology.shards(m, num_shards)
    stride = topology.world_size * topology.num_workers
    end = plan.counts.end(topology.world_size, m)
    first = topology.next_slot(m, m)
    ms = list(range(first, int(min(end, first + MOST * stride)), stride))
    lanes = plan.in_lanes(3)
    short = ShardItems(
        lanes, Position(number, m, num_shards), len(shards), open_windows(lanes, None, number), None
    )
    every = ShardItems(
        plan, Position(number, 0, num_shards), num_shards, open_windows(plan, None, number), None
    )
    from_start = [every.take(k) for k in range(ms[-1] + 1)] if ms else []
    return [short.take(m) for m in ms], [from_start[m] for m in ms]


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return pickle.dumps(found) == pickle.dumps(expected)


@pytest.mark.parametrize("name", COUNTED)
def test_each_kind_of_counted_pipeline_gives_the_same_from_any_batch_on(
    name: str, tmp_path: Path
) -> None:
    pipe = COUNTED[name](tmp_path)
    shards = pipe._iteration.plan.chain.num_shards
    for (world, workers), starts in STARTS:
        if shards % (world * workers):
            continue
        for number, m in starts:
            for rank in range(world):
                for worker in range(workers):
                    topology = Topology(rank, world, worker, workers)
                    short, long = both_ways(pipe, topology, m, number)
                    assert same(short, long), (topology, m, number)


def table(rows: int) -> pa.Table:
    tokens = [[n] * (n % 5) for n in range(rows)]
    return pa.table({"x": np.arange(rows), "input_ids": pa.array(tokens, pa.list_(pa.int32()))})


def blocks(rows: int, size: int) -> tp.Pipeline:
    """Rows in blocks of a size."""
    whole = table(rows)
    return tp.concat(*(tp.from_arrow(whole.slice(k, size)) for k in range(0, rows, size)))


@examples(80, shrink=False)
@given(
    rows=st.integers(1, 300),
    size=st.integers(1, 80),
    shards=st.sampled_from([1, 2, 4, 6]),
    buffer=st.one_of(st.none(), st.integers(1, 120)),
    batch=st.sampled_from([None, 1, 3, 8, 50]),
    drop_last=st.booleans(),
    repeat=st.sampled_from([None, "before", "after", "twice"]),
    ranks=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    m=st.integers(0, 40),
    pads=st.booleans(),
)
def test_any_counted_pipeline_gives_the_same_from_any_batch_on(
    rows: int, size: int, shards: int, buffer: int | None, batch: int | None, drop_last: bool,
    repeat: str | None, ranks: tuple[int, int], m: int, pads: bool,
) -> None:  # fmt: skip
    """Batches larger than a window, and windows smaller than a batch, are among them."""
    pipe: Any = blocks(rows, size).sharding_filter(shards)
    if buffer is not None:
        pipe = pipe.shuffle(buffer, seed=1)
    if repeat == "before":
        pipe = pipe.repeat()
    if batch is not None:
        pipe = pipe.batch(batch, drop_last=drop_last)
        pipe = pipe.pad_collate() if pads else pipe
    if repeat == "after":
        pipe = pipe.repeat()
    elif repeat == "twice":
        pipe = pipe.repeat(2)
    world, workers = ranks
    plan = pipe._iteration.plan
    if (
        shards % (world * workers)
        or not plan.counted
        or m > plan.counts.batches_in_pass
        or not plan.counts.batches_in_pass
    ):
        return
    for rank in range(world):
        short, long = both_ways(pipe, Topology(rank, world, workers - 1, workers), m)
        assert same(short, long)
