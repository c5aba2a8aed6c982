"""Any batch of a run can be found again: the very batch, and where its rows come from."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import GroupSource, RowGroups, examples
from trainpipes.testing import digest


def table(rows: int = 203) -> pa.Table:
    tokens = [[x + k for k in range(1 + x % 5)] for x in range(rows)]
    return pa.table({"x": range(rows), "input_ids": tokens})


def sharded() -> tp.Pipeline:
    return tp.from_arrow(table()).sharding_filter(4).shuffle(15, seed=2)


def some(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 3)


PIPES: dict[str, Callable[[], tp.Pipeline]] = {
    "counted": lambda: sharded().batch(6).pad_collate(),
    "counted, repeated": lambda: sharded().batch(6).repeat(),
    "counted, rolling": lambda: sharded().repeat().batch(6),
    "filter": lambda: sharded().filter(some, version="1").batch(6),
    "pack": lambda: sharded().pack(8, buffer_size=16).batch(3).pad_collate(),
    "mix": lambda: tp.mix(
        {"a": tp.from_arrow(table(90)).shuffle(9), "b": tp.from_arrow(table(60))},
        weights={"a": 2, "b": 1},
    ).sharding_filter(4).repeat().batch(5),
}  # fmt: skip


@given(
    name=st.sampled_from(list(PIPES)),
    world=st.sampled_from([1, 2, 4]),
    epoch=st.integers(0, 2),
    data=st.data(),
)
@examples(60)
def test_a_batch_found_again_is_the_one_that_was_given(
    name: str, world: int, epoch: int, data: Any
) -> None:
    make = PIPES[name]
    pipe = make()
    if pipe._iteration.plan.chain.endless:
        epoch = 0
    if not pipe._iteration.plan.counts.known and not pipe._iteration.plan.chain.endless:
        world = 1  # ranks would have to agree where an epoch ends
    rank = data.draw(st.integers(0, world - 1))
    loader = tp.Loader(make().distributed(rank=rank, world_size=world), threads=0)
    loader.set_epoch(epoch)
    given = [(digest(batch), loader.state_dict()) for batch in islice(loader, 9)]
    k = data.draw(st.integers(0, len(given) - 1))
    found = tp.locate(pipe, k, epoch=epoch, rank=rank, world_size=world)
    assert digest(found.batch) == given[k][0]
    assert (found.epoch, found.m, found.rank) == (epoch, k * world + rank, rank)
    saved = data.draw(st.integers(0, k))
    if saved and given[saved - 1][1]["epoch"] == epoch:
        state = json.loads(json.dumps(given[saved - 1][1]))
        again = tp.locate(pipe, state, after=k - saved, rank=rank, world_size=world)
        assert digest(again.batch) == given[k][0]
        assert again.places == found.places
        if pipe._iteration.plan.counted:
            last = tp.locate(pipe, state, after=-1, rank=rank, world_size=world)
            assert digest(last.batch) == given[saved - 1][0]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_last_steps_of_an_epoch_are_found_on_every_rank_and_none_after_them(world: int) -> None:
    pipe = tp.from_dataset(range(101)).sharding_filter(12).shuffle(9).batch(4)  # 26 batches
    for rank in range(world):
        batches = list(tp.Loader(pipe.distributed(rank=rank, world_size=world)))
        for k in (-2, -1):
            found = tp.locate(pipe, len(batches) + k, rank=rank, world_size=world)
            assert found.batch == batches[k]
        with pytest.raises(tp.StateError, match=f"no batch number {len(batches)}"):
            tp.locate(pipe, len(batches), rank=rank, world_size=world)


def test_a_batch_after_a_resume_on_another_number_of_ranks_is_found_by_the_state() -> None:
    pipe = tp.from_dataset(range(200)).sharding_filter(12).shuffle(9).batch(4)
    two = tp.Loader(pipe.distributed(rank=0, world_size=2))
    list(islice(two, 3))
    state = two.state_dict()  # m = 6, no multiple of 4
    for rank in range(4):
        four = tp.Loader(pipe.distributed(rank=rank, world_size=4))
        four.load_state_dict(state)
        for after, batch in enumerate(four):
            found = tp.locate(pipe, state, after=after, rank=rank, world_size=4)
            assert found.batch == batch


def test_after_the_state_of_an_epochs_end_comes_the_next_epoch() -> None:
    rows = tp.from_dataset(range(40)).sharding_filter(4).shuffle(9, seed=1)
    for pipe in (rows.batch(4), rows.filter(lambda x: x % 3 > 0).batch(4)):
        loader = tp.Loader(pipe)
        list(loader)
        state = loader.state_dict()
        for after, batch in enumerate(loader):
            found = tp.locate(pipe, state, after=after)
            assert (found.batch, found.epoch, found.m) == (batch, 1, after)
        with pytest.raises(tp.StateError, match="epoch 1 has no batch number 50"):
            tp.locate(pipe, state, after=50)


def test_it_is_the_epoch_under_way_if_none_is_said() -> None:
    loader = tp.Loader(tp.from_dataset(range(40)).shuffle(40).batch(4))
    epochs = [list(loader), list(loader)]
    assert tp.locate(loader, 3).epoch == 2  # the one that comes next
    batches = iter(loader)
    third = [next(batches), next(batches)]
    assert [tp.locate(loader, k).batch for k in range(2)] == third
    assert [tp.locate(loader, k, epoch=1).batch for k in range(10)] == epochs[1]
    resumed = tp.Loader(loader.pipeline)
    resumed.load_state_dict(loader.state_dict())
    assert tp.locate(resumed, 1).batch == third[1]
    assert next(resumed_batches := iter(resumed)) == next(batches)
    assert tp.locate(resumed, 1).batch == third[1]
    assert next(resumed_batches) == next(batches)


def test_to_look_moves_nothing() -> None:
    for name, make in PIPES.items():
        loader, other = tp.Loader(make()), tp.Loader(make())
        mine, theirs = iter(loader), iter(other)
        state = loader.state_dict()
        for k in range(3):
            assert digest(next(mine)) == digest(next(theirs)), name
            tp.locate(loader, 2)
            tp.locate(loader, state)
            tp.locate(loader.pipeline, k)
            assert loader.state_dict() == other.state_dict()


class Counted(GroupSource):
    """Rows in memory that count how many of them are read."""

    read_rows = 0

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        Counted.read_rows += stop - start
        return super().read(block, start, stop)


class CountedGroups(RowGroups):
    def open(self) -> GroupSource:
        return Counted(self.groups)


def test_where_batches_are_counted_only_the_windows_of_its_rows_are_read() -> None:
    source = tp.Pipeline([CountedGroups([100] * 1000)])
    pipe = source.sharding_filter(4).shuffle(100).batch(4)
    found = tp.locate(pipe, 20_000, epoch=3)
    assert len(found.batch) == 4
    assert 0 < Counted.read_rows <= 2 * 2 * 100  # of windows of up to twice the buffer


def test_where_the_batch_size_was_changed_batches_keep_their_numbers() -> None:
    rows = tp.from_dataset(range(200)).sharding_filter(4).shuffle(30)
    small = tp.Loader(rows.batch(4))
    list(islice(small, 8))
    large = tp.Loader(rows.batch(10))
    large.load_state_dict(small.state_dict(), allow_changes=["batch_size"])
    for number, batch in enumerate(islice(large, 5), start=8):
        assert tp.locate(large, number).batch == batch
    before = list(islice(tp.Loader(rows.batch(4)), 8))
    assert [tp.locate(large, k).batch for k in range(8)] == before


def test_a_table_of_its_rows_shows_file_row_group_and_row(tmp_path: Path) -> None:
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": ["the first one", "another", ""]}), path, row_group_size=2)
    found = tp.locate(tp.read_parquet(str(path)).tokenize("bytes").batch(3).pad_collate(), 0)
    head, titles, *lines = str(found).splitlines()
    assert head == "batch m = 0 of epoch 0, one rank"
    assert titles.split("  ")[0] == "in batch"
    expected = [[str(n), path.name, str(n // 2), str(n), "0"] for n in range(3)]
    assert [line.split() for line in lines] == expected


def test_what_is_not_there_is_refused_with_the_way_out() -> None:
    pipe = tp.from_dataset(range(20)).filter(lambda x: x > 2).batch(4)
    loader = tp.Loader(pipe)
    next(iter(loader))
    with pytest.raises(tp.ConfigError, match="give an earlier state"):
        tp.locate(pipe, loader.state_dict(), after=-1)
    with pytest.raises(tp.StateError, match="no batch number 9"):
        tp.locate(pipe, 9)
    counted = tp.from_dataset(range(20)).batch(4)
    state = counted.state_at(1)
    with pytest.raises(tp.ConfigError, match="1 batches from the start of epoch 0"):
        tp.locate(counted, state, after=-2)
    with pytest.raises(tp.ConfigError):
        tp.locate([1, 2], 0)  # type: ignore[arg-type]
    for at, options in (
        (-1, {}), (1, {"after": 1}), (state, {"epoch": 1}), (1, {"rank": 1}), (1, {"world_size": 2}),
        (1, {"epoch": -1}),
    ):  # fmt: skip
        with pytest.raises(tp.ConfigError):
            tp.locate(counted, at, **options)


def test_a_rank_of_a_run_without_counts_is_found_by_its_own_state() -> None:
    pipe = sharded().filter(some, version="1").repeat().batch(6)
    for rank in range(2):
        loader = tp.Loader(pipe.distributed(rank=rank, world_size=2))
        batches = iter(loader)
        list(islice(batches, 3))
        state = loader.state_dict()
        rest = list(islice(batches, 3))
        for after in range(3):
            found = tp.locate(pipe, state, after=after, rank=rank, world_size=2)
            assert found.batch == rest[after]
        with pytest.raises(tp.StateError, match="has no position for shards"):
            tp.locate(pipe, state, rank=1 - rank, world_size=2)
