"""``metrics()`` says where a run stands, and says the same after a resume."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import build, examples, rows_of, specs
from trainpipes.loader.in_mid_run import Meter


@given(spec=specs(), world=st.integers(1, 3), data=st.data())
@examples(100)
def test_rows_are_those_of_all_batches_so_far_also_after_a_resume(
    spec: Any, world: int, data: Any
) -> None:
    pipe = build(spec)
    plan = pipe._iteration.plan
    known = plan.counted and (spec.take_batches is None) and sum(spec.groups) > 0
    if not known or plan.chain.num_shards % world or plan.chain.uneven:
        return
    loaders = [
        tp.Loader(pipe.distributed(rank=r, world_size=world), threads=0) for r in range(world)
    ]
    given_rows = 0
    passes = 1 if plan.chain.endless else 2
    for _ in range(passes):
        step = -1
        for step, batches in enumerate(zip(*(islice(x, 12) for x in loaders), strict=True)):
            given_rows += sum(len(rows_of(batch)) for batch in batches)
            metrics = loaders[0].metrics()
            state = loaders[0].state_dict()
            if state["epoch"] == metrics["data/epoch"] and state["batches"]:
                assert metrics["data/batch"] == state["batches"]
            assert metrics["data/rows"] == given_rows
            if step == 3:
                resumed = tp.Loader(pipe.distributed(rank=0, world_size=world))
                resumed.load_state_dict(json.loads(json.dumps(state)))
                assert resumed.metrics()["data/rows"] == given_rows
        if step >= 11:  # the epoch was not finished
            break


def test_rows_leave_out_batches_of_no_whole_step() -> None:
    loader = tp.Loader(tp.from_dataset(range(19)).batch(2))
    given_rows = 0
    for _ in range(2):
        for step in tp.steps(loader, batches=4):
            given_rows += sum(map(len, step))
            assert loader.metrics()["data/rows"] == given_rows
    assert given_rows == 2 * 16


@pytest.mark.parametrize("times", [None, 5])
@pytest.mark.parametrize("shards", [1, 2])
def test_rows_go_on_after_another_batch_size(shards: int, times: int | None) -> None:
    def loader(batch_size: int) -> tp.Loader:
        rows = tp.from_dataset(range(100)).sharding_filter(shards).shuffle(20, seed=1)
        return tp.Loader(rows.batch(batch_size).repeat(times), threads=0)

    before, after = loader(4), loader(8)
    given_rows = sum(map(len, islice(before, 60)))
    after.load_state_dict(before.state_dict(), allow_changes=["batch_size"])
    assert after.metrics()["data/rows"] == given_rows
    for number, batch in enumerate(islice(after, 30), start=1):
        given_rows += len(batch)
        if number % 5 == 0:
            assert after.metrics()["data/rows"] == given_rows


def test_tokens_are_those_of_packed_rows_and_shares_those_that_hold() -> None:
    rows = tp.from_arrow(pa.table({"input_ids": [[1] * (n % 9 + 1) for n in range(500)]}))
    packed = tp.Loader(rows.repeat().pack(16).batch(4).pad_collate())
    batches = iter(packed)
    seen = sum(next(batches)["input_ids"].numel() for _ in range(5))
    assert packed.metrics()["data/tokens"] == seen
    mixed = tp.mix({"a": rows, "b": rows}, weights={"a": 3, "b": 1}, stop="repeat").batch(4)
    loader = tp.Loader(mixed)
    batches = iter(loader)
    next(batches)
    assert loader.metrics()["data/mix/a"] == 0.75
    loader.set_weights({"a": 1}, at_step=3)
    for share in (0.25, 0.5, 0.5):
        next(batches)
        assert loader.metrics()["data/mix/b"] == share
    assert loader.metrics()["data/rows"] == 4 * 4


def test_what_is_not_known_is_left_out_and_all_are_numbers() -> None:
    rows = tp.from_dataset(range(50)).filter(lambda x: x % 3 > 0)
    loader = tp.Loader(rows.batch(4))
    assert "data/rows" not in loader.metrics()
    full = tp.Loader(rows.batch(4, drop_last=True))
    list(islice(full, 3))
    assert full.metrics()["data/rows"] == 12
    for value in full.metrics().values():
        assert isinstance(value, int | float)
        assert not isinstance(value, bool)


def test_waiting_is_the_share_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = tp.Loader(tp.from_dataset(range(50)).batch(4))
    clock = iter([100.0, 110.0, 130.0])
    monkeypatch.setattr("trainpipes.loader.in_mid_run.perf_counter", lambda: next(clock))
    meter = Meter(loader._iteration)
    loader._iteration.wait_seconds += 5
    assert meter.read()["data/waiting"] == 0.5
    assert meter.read()["data/waiting"] == 0.0


@pytest.mark.sample(3)
@pytest.mark.parametrize("shards", [1, 4, 24])
@pytest.mark.parametrize("skipped", [0, 3])
def test_rows_leave_out_turns_of_shards_that_have_ended_and_batches_that_are_skipped(
    shards: int, skipped: int
) -> None:
    rows = tp.from_dataset(range(600)).sharding_filter(shards).shuffle(60, seed=1)
    full = rows.filter(lambda x: x % 3 > 0).batch(5, drop_last=True).skip(skipped)
    for pipe in (full, full.repeat(2)):
        loader, given_rows = tp.Loader(pipe), 0
        for batch in loader:
            given_rows += len(batch)
            assert loader.metrics()["data/rows"] == given_rows
        assert given_rows > 200


def test_rows_are_not_known_where_each_pass_is_the_same_epoch() -> None:
    loader = tp.Loader(tp.from_dataset(range(10)).batch(5), epoch=3)
    assert "data/rows" not in loader.metrics(), "30, before the first row"
    list(loader)
    assert "data/rows" not in loader.metrics()


def test_rows_are_not_known_where_ranks_end_apart() -> None:
    rows = tp.from_dataset(range(200)).sharding_filter(6, tail="uneven")
    full = rows.filter(lambda x: x % 3 > 0).batch(5, drop_last=True)
    loader = tp.Loader(full.distributed(rank=1, world_size=2))
    list(loader)
    assert "data/rows" not in loader.metrics()


def test_rows_are_not_known_in_later_epochs_of_a_folder_that_grows(tmp_path: Path) -> None:
    def write(name: str) -> None:
        pq.write_table(pa.table({"x": range(40)}), tmp_path / name)

    write("0.parquet")
    files = tp.list_files(tmp_path / "*.parquet", refresh="epoch")
    loader = tp.Loader(files.read_parquet().shuffle(9).batch(4))
    list(islice(loader, 3))
    assert loader.metrics()["data/rows"] == 12
    write("1.parquet")
    list(islice(loader, 3))
    assert loader.metrics()["data/epoch"] == 1
    assert "data/rows" not in loader.metrics(), "it took the first epoch to have as many files"
