"""``profile``: what it counts of a run, wherever its batches are made, and that it changes none of them."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp
from interpreters import pid_of, python
from interrupts import is_interrupted, places_of
from trainpipes._internal import activity

#: Ways to run a loader.
WAYS: dict[str, dict[str, Any]] = {
    "no threads": {"threads": 0},
    "two threads": {"threads": 2},
    "forked": {"num_workers": 2, "multiprocessing_context": "fork"},
    "from a server": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "spawned": {"num_workers": 2, "multiprocessing_context": "spawn"},
}
#: To spawn takes seconds, and a fork server is sent the same.
SPAWNED = pytest.param("spawned", marks=pytest.mark.slow)


def slow(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.002)
    return row


def computes(row: dict[str, Any]) -> dict[str, Any]:
    return {"n": row["n"] + 0 * sum(range(20_000))}


def rows(count: int = 240) -> tp.Pipeline:
    return tp.from_dataset([{"n": n} for n in range(count)]).sharding_filter(4)


def profiled(loader: Any, step: float = 0.0) -> Any:
    """The profile of an epoch, with a trainer that takes so many seconds a step."""
    with tp.profile(loader) as run:
        for _ in loader:
            time.sleep(step)
    return run


def slow_pipe(count: int = 240) -> tp.Pipeline:
    return rows(count).map(slow).batch(8).collate()


def stage_seconds(found: dict[str, Any], stage: str) -> float:
    """Of a stage, in all threads and workers."""
    groups = [*found["threads"]["times"].values(), *found["workers"]["times"].values()]
    return sum(v[0] for times in groups for what, v in times.items() if what.startswith(stage))


def assert_counted_once(found: dict[str, Any], stage: str, at_once: int) -> None:
    """The time of a stage is no more than what so many threads or processes have had."""
    assert 0 < stage_seconds(found, stage) < 1.3 * at_once * found["seconds"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["no threads", "two threads", "forked", "from a server", SPAWNED])
def test_what_takes_the_time_is_found_and_batches_stay_the_same(how: str) -> None:
    dealt = rows().shuffle(50, seed=3)
    loader = tp.Loader(dealt.map(slow).batch(8).collate(), **WAYS[how])
    with tp.profile(loader) as run:
        batches = [batch["n"].tolist() for batch in loader]
    assert batches == [batch["n"].tolist() for batch in dealt.batch(8).collate()]
    found = run.to_dict()
    assert found["waited"] / found["seconds"] > 0.7
    assert found["waited"] == pytest.approx(loader.wait_seconds, rel=0.3)
    assert stage_seconds(found, "map(") > 0.3  # 240 sleeps of 2 ms
    assert_counted_once(found, "map(", max(1, WAYS[how].get("num_workers", 0)))
    assert f"{run}".startswith("waiting ")
    assert "map(slow" in str(run)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_were_there_before(context: str) -> None:
    how = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": context}
    loader = tp.Loader(slow_pipe(120), **how)
    assert len(list(loader)) == 15
    for _ in range(2):  # nothing of the first one is in the second
        found = profiled(loader).to_dict()
        assert stage_seconds(found, "map(") > 0.1
        assert_counted_once(found, "map(", 2)


TORCHS = {
    **{how: WAYS[how] for how in ("forked", "from a server", "spawned")},
    "no workers": {},
    "kept": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "how", ["no workers", "forked", "from a server", SPAWNED, "kept", "with states"]
)
def test_torch_loaders(how: str) -> None:
    kind, how = (StatefulDataLoader, "forked") if how == "with states" else (DataLoader, how)
    loader: Any = kind(slow_pipe(), batch_size=None, **TORCHS[how])
    for _ in loader if how == "kept" else ():  # workers are there before the profile
        pass
    run = profiled(loader)
    folder = run._folder
    assert folder is None or not folder.exists()
    assert run.measured.waiting > 0.5  # the rest is this thread, on a busy machine
    assert stage_seconds(run.to_dict(), "map(") > 0.3
    assert "map(slow" in str(run)
    for _ in loader:
        pass
    assert_counted_once(run.to_dict(), "map(", max(1, loader.num_workers))


def test_a_copy_of_a_pipeline_reports_to_no_profile() -> None:
    pipe = slow_pipe()
    with tp.profile(DataLoader(pipe, batch_size=None, num_workers=2)) as run:
        copy = pickle.loads(
            pickle.dumps(pipe)
        )  # for a trainer, whose folder would be another one's
        for _ in DataLoader(copy, batch_size=None, num_workers=2):
            pass
        assert run._folder is None or not list(run._folder.iterdir())
    assert stage_seconds(run.to_dict(), "map(") == 0


def test_a_loader_within_one_of_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    from trainpipes.integrations.accelerate import loader as prepared

    loader = prepared(slow_pipe(), accelerate.Accelerator(cpu=True), threads=0)
    assert profiled(loader).measured.waited > 0.3


def test_a_loop_that_somebody_else_owns() -> None:
    def train(batches: Iterable[Any]) -> None:
        for _ in batches:
            time.sleep(0.002)

    pipe = slow_pipe()
    with tp.profile(pipe) as run:  # as it was given to a trainer, which makes its own loader
        train(tp.Loader(pipe, threads=0))
    assert 0.2 < run.measured.waiting < 0.97


def test_a_trainer_is_what_is_slow() -> None:
    for _ in range(10):  # on a busy machine the cores may be what is slow
        run = profiled(tp.Loader(rows().batch(8).collate()), 0.02)
        if run.verdict.bound == "trainer":
            break
    assert run.verdict.bound == "trainer", run
    assert not run.verdict.changes
    assert "change" not in str(run)


def test_short_work_that_holds_the_gil_counts_in_full() -> None:
    """A thread that samples wakes after it, when the loop sleeps, and would not see it."""
    loader = tp.Loader(rows(1200).map(computes).batch(8).collate(), threads=0)
    began = time.thread_time()
    run = profiled(loader, 0.001)
    took = time.thread_time() - began
    seconds, cpu = run.measured.of("iterates", str(loader.pipeline.stages[2]))
    assert seconds > 0.5 * took  # of the processor, which other programs do not change
    assert 0.02 * seconds < cpu < 1.5 * seconds  # other programs may run


def test_a_series_over_time() -> None:
    loader = tp.Loader(slow_pipe(600), threads=0)
    with tp.profile(loader) as run:
        for step, _ in enumerate(loader):
            if step > 37:
                time.sleep(0.05)
    series = run.series
    assert len(series) > 5
    assert [point["seconds"] for point in series] == sorted(point["seconds"] for point in series)
    assert series[1]["waited"] > series[-2]["waited"] + 0.15
    assert "iterates" in series[1]["busy"]
    assert all(0 <= point["waited"] <= 1 for point in series)
    waited = [
        p["waited"] * (p["seconds"] - q["seconds"])
        for p, q in zip(series[1:], series, strict=False)
    ]
    assert sum(waited) == pytest.approx(run.measured.waited, abs=0.5)
    json.dumps([run.to_dict(), series])


@pytest.mark.parametrize("is_torchs", [False, True])
def test_a_wait_is_in_the_series_while_it_goes_on(is_torchs: bool) -> None:
    pipe = rows(20).map(lambda row: time.sleep(0.05) or row).batch(20)
    loader: Any = DataLoader(pipe, batch_size=None) if is_torchs else tp.Loader(pipe, threads=0)
    with tp.profile(loader) as run:
        list(loader)
    within = [point["waited"] for point in run.series[1:-1]]
    assert len(within) > 2
    assert sum(within) > 0.6 * len(within)


def test_padding() -> None:
    ids = [{"input_ids": [1] * (1 + 9 * (n % 2))} for n in range(400)]
    pipe = tp.from_dataset(ids).sharding_filter(2).batch(8).pad_collate()
    for how in ({"threads": 2}, {"num_workers": 2}):
        run = profiled(tp.Loader(pipe, **how))
        assert run.measured.padded == pytest.approx(0.45, abs=0.02)


def test_one_rank_says_how_long_ranks_wait_for_the_longest_batch() -> None:
    lengths = np.random.default_rng(3).lognormal(4, 1, 8000).astype(int) + 1
    table = pa.table({"input_ids": [[1] * n for n in lengths.tolist()]})
    pipe = tp.from_arrow(table).sharding_filter(4).shuffle(1000).batch(4).pad_collate()
    cells = np.array([batch["input_ids"].numel() for batch in pipe]).reshape(-1, 4)
    waiting = 1 - cells.mean() / cells.max(1).mean()
    assert waiting > 0.3
    run = profiled(tp.Loader(pipe.distributed(rank=1, world_size=4)))
    assert run.measured.waiting_for_longest(4) == pytest.approx(waiting, abs=0.12)
    assert "of a step of 4 ranks is waiting for its longest batch" in dict(run.lines())["ranks"]
    even = tp.from_arrow(table).sharding_filter(4).shuffle(1000).batch(4).balance().pad_collate()
    run = profiled(tp.Loader(even.distributed(rank=1, world_size=4)))
    assert run.measured.cells
    assert "ranks" not in dict(run.lines())  # one rank cannot know


def test_bytes_of_caches(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"n": range(1000)}), path, row_group_size=100)
    pipe = tp.read_parquet(str(path)).map(computes).cache(tmp_path / "kept")
    loader = tp.Loader(pipe.sharding_filter(2).shuffle(200).batch(8).collate())
    for epoch in range(2):
        run = profiled(loader)
        totals = run.to_dict()["threads"]["totals"]
        assert totals["cached"] >= 10
        assert (totals["cache hits"] == totals["cached"]) == bool(epoch)
        assert f"of {totals['cached']} blocks were kept" in str(run)


def test_one_at_a_time_and_once() -> None:
    loader = tp.Loader(rows().batch(8))
    second = tp.profile(loader)
    with tp.profile(loader) as run, pytest.raises(tp.ConfigError, match="one at a time"), second:
        pass
    with pytest.raises(tp.ConfigError, match="used once"), run:
        pass
    with pytest.raises(tp.ConfigError, match="got list"):
        tp.profile([1, 2])
    assert not activity.is_on
    assert activity.observer is None
    end = (
        time.monotonic() + 30
    )  # a profile may end before its thread, which another one starts, begins
    while any(t.name == "profile" for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not [t for t in threading.enumerate() if t.name == "profile"]
    assert "nothing was run" in str(tp.profile(loader))


def test_an_error_within_ends_it() -> None:
    pipe = rows().batch(8)
    for loader in (tp.Loader(pipe), DataLoader(pipe, batch_size=None)):
        kind = type(iter(loader)).__mro__[-2]
        before = kind.__next__, DataLoader.__iter__
        with pytest.raises(ZeroDivisionError), tp.profile(loader):
            assert 1 / (before == (kind.__next__, DataLoader.__iter__))
        assert before == (kind.__next__, DataLoader.__iter__)
        assert not activity.is_on


SCRIPT = """
import time, trainpipes as tp
def stuck(row):
    if row["n"] == 20:
        print("stuck", flush=True)
        time.sleep(60)
    return row
pipe = tp.from_dataset([{"n": n} for n in range(100)]).map(stuck).batch(4)
with tp.profile(tp.Loader(pipe)) as run:
    for batch in tp.Loader(pipe):
        pass
"""


def test_ctrl_c_prints_what_is_known() -> None:
    run = subprocess.Popen(
        [*python(), "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "stuck\n"
    time.sleep(0.5)
    os.kill(pid_of(run), signal.SIGINT)
    _, said = run.communicate(timeout=20)
    assert "waiting  " in said
    assert "map(stuck" in said
    assert "KeyboardInterrupt" in said


def test_it_is_off_outside() -> None:
    loader = tp.Loader(slow_pipe(80), threads=2)
    run = profiled(loader)
    before = run.to_dict()
    list(loader)
    assert run.to_dict() == before


def test_tensors_as_they_come(tmp_path: Path) -> None:
    """Batches that are made when they are taken are timed, one of eight."""
    table = pa.table({"input_ids": [[n] * 50 for n in range(4000)]})
    pq.write_table(table, tmp_path / "ids.parquet", row_group_size=1000)
    pipe = tp.read_parquet(str(tmp_path)).sharding_filter(2).shuffle(1000).batch(8).pad_collate()
    for _ in range(30):  # on a busy machine, one of eight may say little of the others
        loader = tp.Loader(pipe.repeat(3), threads=0)
        with tp.profile(loader) as run:
            assert all(isinstance(batch["input_ids"], torch.Tensor) for batch in loader)
        of_waiting = stage_seconds(run.to_dict(), "pad_collate") / loader.wait_seconds
        of_all = stage_seconds(run.to_dict(), "") / run.measured.seconds
        if of_waiting > 0.1 and of_all < 1.3:
            break
    assert of_waiting > 0.1
    assert of_all < 1.3


def test_a_run_without_batches_is_printed_too() -> None:
    pipe = tp.from_dataset(range(10)).filter(lambda _: False, version="1").batch(2)
    with tp.profile(tp.Loader(pipe)) as run:
        assert "verdict" in str(run)
        list(tp.Loader(pipe))
    assert "verdict" in str(run)


@pytest.mark.parametrize("epoch", [None, 0])
def test_of_a_pipeline_it_knows_the_loader_that_a_trainer_made_of_it(epoch: int | None) -> None:
    pipe = tp.from_dataset(range(200)).sharding_filter(4).map(slow).batch(2)
    with tp.profile(pipe) as run:
        list(tp.Loader(pipe, num_workers=2, epoch=epoch))
    assert run.to_dict()["facts"]["workers"] == 2
    assert run.to_dict()["waited"] > 0.5 * run.to_dict()["seconds"]


def test_a_profile_that_cannot_begin_does_not_keep_others_from_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = DataLoader(tp.from_dataset(range(20)).batch(2), batch_size=None, num_workers=1)
    with monkeypatch.context() as patch:
        patch.setattr("trainpipes._internal.activity.folder_of", lambda _: tmp_path / "no" / "such")
        with pytest.raises(FileNotFoundError):
            tp.profile(plain).__enter__()
    loader = tp.Loader(tp.from_dataset(range(20)).batch(2), threads=0)

    def enter() -> None:
        with tp.profile(loader):
            pass

    rooms = ("look/profiling", "_internal")
    places = [place for place in places_of(enter, rooms) if "/profile.py" in place[0]]
    for place in [*places[:8], *places[8::4]]:
        is_interrupted(enter, place, rooms)
        with tp.profile(loader) as run:
            assert len(list(loader)) == 10
        assert run.to_dict()["seconds"] > 0
