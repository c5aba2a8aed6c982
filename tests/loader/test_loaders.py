"""Pipelines in the loaders that torch and torchdata bring, and in ours: workers, states, faults."""

from __future__ import annotations

import copy
import gc
import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.nodes import BaseNode
from torchdata.nodes import Loader as NodeLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp
from drawn import rows_of, write_parquet
from hundred_rows import (
    TABLE,
    epochs_of,
    given_by,
    kept,
    loaded,
    of_unknown_length,
    ours,
    pipeline,
    plain,
    shuffled_rows,
    stateful,
)
from map_functions import slow_to_send
from trainpipes.nodes import Batch, FromArrow, ListFiles, ReadParquet, ShardingFilter, Shuffle

pytestmark = pytest.mark.usefixtures("no_processes_left")


LOADERS = pytest.mark.parametrize("loader", [plain, stateful, ours])
WITH_STATE = pytest.mark.parametrize("loader", [stateful, ours])
WORKERS = pytest.mark.parametrize("workers", [0, 2])
EPOCHS = epochs_of(4)


# The sequence


@pytest.mark.parametrize(
    ("shards", "workers"), [(4, 3), (1, 3), pytest.param(4, 7, marks=pytest.mark.slow)]
)
def test_our_loader_takes_any_number_of_workers(shards: int, workers: int) -> None:
    run = ours(shuffled_rows(shards).batch(8), workers)
    assert [given_by(run) for _ in range(2)] == epochs_of(2, lambda: shuffled_rows(shards).batch(8))


SIDE = tp.from_dataset(range(12)).sharding_filter(4).shuffle(12, seed=3)
FILTERED = tp.from_dataset(range(9)).filter(bool).batch(2)


def reads_pipelines(n: int) -> list[Any]:
    """What a function reads of pipelines: whole ones, and one in mid-pass."""
    loader = tp.Loader(FILTERED)
    steps = [list(step) for step in tp.steps(loader, batches=2)]
    first = next(iter(FILTERED))
    return [n, sorted(SIDE), steps, loader.state_dict()["batches"], first, next(iter(loader))]


@pytest.mark.parametrize(
    "start", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_a_pipeline_that_a_function_of_workers_iterates_is_read_whole(start: str) -> None:
    pipe = tp.from_dataset(range(4)).map(reads_pipelines, version="1").batch(2)
    loader = tp.Loader(pipe, num_workers=2, multiprocessing_context=start)
    expected = [
        [n, [*range(12)], [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], 0, [1, 2], [1, 2]] for n in range(4)
    ]
    assert [row for batch in loader for row in batch] == expected


@LOADERS
def test_a_worker_init_fn_of_the_user_is_called(loader: Any, tmp_path: Path) -> None:
    def note(worker: int) -> None:
        (tmp_path / str(worker)).touch()

    given_by(loader(pipeline().map(list), 2, worker_init_fn=note))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


# States


@WITH_STATE
@WORKERS
def test_a_state_before_the_first_item_is_the_start(loader: Any, workers: int) -> None:
    first = loader(pipeline(), workers)
    states = [kept(first.state_dict())]
    started = iter(first)
    states.append(kept(first.state_dict()))
    for state in states:
        run = loaded(loader(pipeline(), workers), state)
        assert [given_by(run) for _ in range(2)] == EPOCHS[:2]
    assert given_by(started) == EPOCHS[0]  # it was not disturbed


def test_snapshots_every_few_steps_resume_exactly() -> None:
    first = stateful(pipeline(), 2, snapshot_every_n_steps=3)
    states = [copy.deepcopy(first.state_dict()) for _ in first]
    for taken in (1, 3, 8):
        run = loaded(stateful(pipeline(), 2, snapshot_every_n_steps=3), states[taken - 1])
        assert given_by(run) == EPOCHS[0][taken:]
        if taken == 8:
            assert given_by(run) == EPOCHS[1]


@WORKERS
def test_taking_states_of_a_stateful_data_loader_changes_nothing(workers: int) -> None:
    run = stateful(pipeline(), workers)
    found = []
    for item in run:
        run.state_dict()
        found.append(rows_of(item))
    run.state_dict()
    assert [found, given_by(run)] == EPOCHS[:2]


@pytest.mark.parametrize(("workers", "after"), [(0, 0), (0, 3), (2, 0), (2, 1)])
def test_a_state_loaded_in_mid_pass_takes_effect_at_the_next_iteration(
    workers: int, after: int
) -> None:
    state = pipeline().state_at(6)
    run = ours(pipeline(), workers)
    running = iter(run)
    given_by(running, after)
    run.load_state_dict(state)
    assert [given_by(run) for _ in range(2)] == [EPOCHS[0][6:], EPOCHS[1]]


def test_a_stateful_data_loader_saved_at_the_last_batch_resumes_to_one_empty_epoch() -> None:
    """No worker can know that the others have ended too: documented behaviour of torchdata."""
    first = stateful(pipeline(), 2)
    states = [copy.deepcopy(first.state_dict()) for _ in first]
    run = loaded(stateful(pipeline(), 2), states[12])
    assert [given_by(run) for _ in range(3)] == [[], *EPOCHS[1:3]]


@pytest.mark.parametrize(
    "loader", [ours, *(pytest.param(k, marks=pytest.mark.slow) for k in (plain, stateful))]
)
def test_a_spawned_worker_that_is_left_while_it_sends_ends_by_itself(
    loader: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = tp.from_arrow(TABLE).sharding_filter(2).map(slow_to_send)
    given = iter(loader(rows, 1, multiprocessing_context="spawn"))
    next(given)
    del given  # which ends the worker, and would warn if it was killed by a signal
    gc.collect()
    assert "terminate" not in capfd.readouterr().err


@pytest.mark.parametrize(("loader", "workers", "make"), [
    (stateful, 0, pipeline),
    (stateful, 2, of_unknown_length),
    (ours, 0, of_unknown_length),
    (ours, 2, pipeline),
])  # fmt: skip
def test_a_state_of_the_last_batch_goes_on_with_the_next_epoch(
    loader: Any, workers: int, make: Callable[[], tp.Pipeline]
) -> None:
    first = loader(make(), workers)
    for _ in first:
        state = copy.deepcopy(first.state_dict())
    # No worker of torchdata's loader can know at its last batch that the others have ended, too.
    states = [first.state_dict()] if loader is stateful and workers else [state, first.state_dict()]
    for state in states:
        run = loaded(loader(make(), workers), state)
        found = [sorted(given_by(run)) for _ in range(2)]  # torchdata's workers get out of step
        assert found == [sorted(epoch) for epoch in epochs_of(3, make)[1:]]
        if loader is ours:
            assert given_by(run) == epochs_of(4, make)[3]


# Refusals


@pytest.mark.usefixtures("failed_workers_let_go")
def test_workers_without_a_sharding_filter_are_refused() -> None:
    said = r"(?s)2 DataLoader workers would all read the same.*\.sharding_filter\(\)"
    with pytest.raises(tp.TopologyError, match=said):
        given_by(plain(tp.from_arrow(TABLE).batch(8), 2))


@pytest.mark.filterwarnings("ignore:3 DataLoader workers do not divide num_shards=4")
@pytest.mark.parametrize("loader", [plain, stateful])
def test_workers_that_do_not_divide_the_shards_share_them(loader: Any) -> None:
    assert given_by(loader(pipeline(), 3)) == given_by(pipeline())


@pytest.mark.filterwarnings("ignore:3 ranks do not divide num_shards=4")
def test_ranks_that_do_not_divide_the_shards_share_them_in_every_way_to_run() -> None:
    def one_of_three() -> tp.Pipeline:
        return pipeline().distributed(rank=0, world_size=3)

    own = given_by(one_of_three())
    for run in (ours(one_of_three(), 0), ours(one_of_three(), 2), stateful(one_of_three(), 0)):
        assert given_by(run) == own


@pytest.mark.usefixtures("failed_workers_let_go")
@pytest.mark.parametrize(("kind", "workers"), [(DataLoader, 0), (StatefulDataLoader, 2)])
def test_a_loader_that_would_batch_batches_again_is_refused(kind: Any, workers: int) -> None:
    with pytest.raises(tp.ConfigError, match="pass batch_size=None to the DataLoader"):
        next(iter(kind(pipeline(), num_workers=workers)))


@pytest.mark.parametrize("options", [{"batch_size": None}, {"batch_size": 2, "shuffle": True}])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_our_loader_within_another_is_refused(kind: Any, options: dict[str, Any]) -> None:
    for pipe in (pipeline(), pipeline().filter(bool, version="1")):
        with pytest.raises(tp.ConfigError, match=r"got a trainpipes.Loader.*DataLoader\(pipe, bat"):
            next(iter(kind(tp.Loader(pipe), **options)))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_pipeline_of_rows_may_be_batched_by_the_data_loader(workers: int) -> None:
    pipe = tp.from_arrow(TABLE.select(["row"])).sharding_filter(4).shuffle(15)
    batches = [item["row"].tolist() for item in DataLoader(pipe, 32, num_workers=workers)]
    assert sorted(row for batch in batches for row in batch) == list(range(100))
    if workers < 2:
        assert [len(batch) for batch in batches] == [32, 32, 32, 4]
    if workers == 0:
        rows = [item["row"] for item in tp.from_arrow(TABLE).sharding_filter(4).shuffle(15)]
        assert [row for batch in batches for row in batch] == rows


@pytest.mark.parametrize("options", [{"num_workers": -1}, {"num_workers": True}])
def test_our_loader_refuses_what_is_no_number_of_workers(options: dict[str, Any]) -> None:
    with pytest.raises(tp.ConfigError, match=r"0 or more .*, got"):
        tp.Loader(pipeline(), **options)


@pytest.mark.parametrize(("option", "value"), [
    ("timeout", -1), ("timeout", "3"), ("timeout", float("nan")), ("worker_init_fn", 3),
    ("persistent_workers", "no"), ("multiprocessing_context", 3),
])  # fmt: skip
@pytest.mark.parametrize("workers", [0, 1])
def test_our_loader_refuses_options_of_workers_before_these_start(
    option: str, value: Any, workers: int
) -> None:
    with pytest.raises(tp.ConfigError, match=rf"Loader\({option}\) must be .*, got"):
        tp.Loader(pipeline(), num_workers=workers, **{option: value})


def test_a_timeout_that_ends_no_call_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="trainpipes"):
        tp.Loader(pipeline(), num_workers=1, timeout=12.5)
        assert not caplog.messages
        tp.Loader(pipeline(), timeout=12.5)
    assert "Loader(timeout=12.5): no call is ended here" in caplog.text


def test_our_loader_takes_pipelines_only() -> None:
    with pytest.raises(tp.ConfigError, match=r"got list; for a torch Dataset .*from_dataset"):
        tp.Loader([1, 2, 3])  # type: ignore[arg-type]


# Faults


@LOADERS
def test_a_run_that_is_broken_off_leaves_no_workers(loader: Any) -> None:
    before = psutil.Process().children()
    run = loader(pipeline(), 2)
    assert given_by(run, 1) == EPOCHS[0][:1]
    del run
    assert still_there(before) == []


def test_workers_go_with_the_last_reference_to_a_loader_that_has_ended() -> None:
    before = psutil.Process().children()
    run = ours(pipeline().map(list), 2, persistent_workers=True)
    list(run)
    assert len(psutil.Process().children()) >= len(before) + 2
    del run
    assert still_there(before) == []


def still_there(before: list[psutil.Process]) -> list[psutil.Process]:
    """Children that were started since, and have not ended in a few seconds."""
    started = [child for child in psutil.Process().children() if child not in before]
    _, alive = psutil.wait_procs(started, timeout=5)
    return [p for p in alive if "resource_tracker" not in " ".join(p.cmdline())]


def test_a_function_that_cannot_be_pickled_is_named_when_workers_are_spawned() -> None:
    pipe = tp.from_arrow(TABLE).sharding_filter(4).map(lambda row: row).batch(8)
    run = ours(pipe, 1, multiprocessing_context="spawn")
    with pytest.raises(tp.ConfigError, match="must pickle to reach a spawned worker") as e:
        given_by(run)
    assert "<lambda> (test_loaders.py:" in str(e.value)
    assert "top of a module" in str(e.value)


class Odd(Exception):
    """A user's own exception, with an argument list of its own."""


class Awkward(Exception):
    """A user's exception that cannot be made from one string."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


def odd_at_fifty(row: Any) -> Any:
    if row["row"] == 50:
        raise Odd("cannot take this row")
    return row


def awkward_at_fifty(row: Any) -> Any:
    if row["row"] == 50:
        raise Awkward(3, "cannot take this row")
    return row


def unread_at_fifty(row: Any) -> Any:
    """Its error pickles by arguments of its own, without what is noted of it."""
    return json.loads("[cannot take this row") if row["row"] == 50 else row


@pytest.fixture
def shuffled_files(tmp_path: Path) -> tp.Pipeline:
    write_parquet(tmp_path, [[20, 20], [7, 10, 43]])
    return tp.list_files(tmp_path).read_parquet().sharding_filter(4).shuffle(15)


def test_a_users_exception_names_file_row_group_row_and_stage(shuffled_files: tp.Pipeline) -> None:
    pipe = shuffled_files.map(odd_at_fifty).batch(8)
    for run in (pipe, ours(pipe, 0)):
        with pytest.raises(Odd, match="cannot take this row") as e:
            given_by(run)
        (note,) = e.value.__notes__
        assert "raised in map(odd_at_fifty (test_loaders.py:" in note
        assert "part-001.parquet, row group 1, row 10" in note
        assert traceback.extract_tb(e.value.__traceback__)[-1].name == "odd_at_fifty"


@pytest.mark.usefixtures("failed_workers_let_go")
@pytest.mark.parametrize(("loader", "fn", "error"), [
    (plain, odd_at_fifty, Odd),
    (stateful, awkward_at_fifty, Awkward),
    (ours, odd_at_fifty, Odd),
    (ours, awkward_at_fifty, Awkward),
    (ours, unread_at_fifty, json.JSONDecodeError),
])  # fmt: skip
def test_a_users_exception_in_a_worker_says_the_same(
    loader: Any, fn: Any, error: type[Exception], shuffled_files: tp.Pipeline
) -> None:
    with pytest.raises(Exception if error is Awkward else error) as e:
        given_by(loader(shuffled_files.map(fn).batch(8), 2))
    text = "".join(traceback.format_exception(e.value))
    for said in (
        error.__name__,
        "cannot take this row",
        f"map({fn.__name__} (test_loaders.py:",
        "part-001.parquet, row group 1, row 10",
        f"in {fn.__name__}",  # the traceback of the worker
    ):
        assert said in text


def test_an_iterable_that_failed_once_is_made_anew_and_nothing_is_lost() -> None:
    failing = {50}

    def rows() -> Iterator[int]:
        for number in range(60):
            if number in failing:
                failing.clear()
                raise OSError("a passing trouble")
            yield number

    run = iter(tp.from_iterable(rows, version="rows").batch(4))
    found = [next(run) for _ in range(12)]
    with pytest.raises(OSError, match="a passing trouble"):
        next(run)
    found.extend(run)
    assert [row for batch in found for row in batch] == list(range(60))


def fifty() -> Iterator[int]:
    yield from range(50)


def test_a_generator_that_is_open_here_stays_here_when_workers_are_not_forked() -> None:
    loader = tp.Loader(
        tp.from_iterable(fifty).batch(4),
        num_workers=1,
        multiprocessing_context="forkserver",
        epoch=0,
    )
    assert loader.peek() == [0, 1, 2, 3]
    assert [row for batch in loader for row in batch] == list(range(50))


# Nodes


def node() -> BaseNode[Any]:
    """The stages of ``pipeline()``, as torchdata nodes."""
    source = FromArrow(table=TABLE)
    sharded = ShardingFilter(source, num_shards=4)  # type: ignore[arg-type]
    return Batch(Shuffle(sharded, buffer_size=15, seed=2), batch_size=8)


def test_a_node_gives_what_the_pipeline_of_the_same_stages_gives() -> None:
    run = NodeLoader(node())
    assert [given_by(run) for _ in range(3)] == EPOCHS[:3]


def test_parquet_nodes_run_alone_with_reset_and_next(tmp_path: Path) -> None:
    write_parquet(tmp_path, [[20, 20], [7, 10, 43]])
    files = ListFiles(urls=str(tmp_path))
    alone = Batch(ReadParquet(files), batch_size=8)  # type: ignore[arg-type]
    alone.reset()
    assert rows_of(next(alone)) == list(range(8))
    state = alone.state_dict()
    expected = [rows_of(item) for item in alone]
    again = Batch(ReadParquet(ListFiles(urls=str(tmp_path))), batch_size=8)  # type: ignore[arg-type]
    again.reset(state)
    assert [rows_of(item) for item in again] == expected
    again.reset(state)  # the same dict a second time
    assert [rows_of(item) for item in again] == expected


def test_a_node_that_was_reset_before_its_first_item_has_not_used_up_an_epoch() -> None:
    alone = node()
    alone.reset()
    alone.reset()
    first = [rows_of(item) for item in alone]
    alone.reset()
    second = [rows_of(item) for item in alone]
    assert [first, second] == EPOCHS[:2]
    with pytest.raises(StopIteration):
        next(alone)


def test_batches_from_workers_have_memory_of_their_own() -> None:
    pipe = tp.from_arrow(TABLE).sharding_filter(4).batch(8).collate(format="torch")
    batches = list(ours(pipe, 2))
    before = [batch["row"].clone() for batch in batches]
    batches[0]["row"].fill_(-1)
    assert all(torch.equal(a["row"], b) for a, b in list(zip(batches, before, strict=True))[1:])
    assert all(batch["row"].is_contiguous() for batch in batches)


@pytest.mark.usefixtures("failed_workers_let_go")
def test_a_stateful_data_loaders_state_is_refused_with_other_workers() -> None:
    first = stateful(pipeline(), 2)
    given_by(first, 3)
    run = loaded(stateful(pipeline(), 1), first.state_dict())
    with pytest.raises(tp.StateError, match=r"worker 0 of 2, loaded in worker 0 of 1"):
        given_by(run)
