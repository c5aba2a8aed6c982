"""Who stands where: loaders and iterators of one pipeline do not disturb one another."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp
from drawn import rows_of, table_of_rows
from every_stage import FINITE
from hundred_rows import TABLE, epochs_of, given_by, kept, loaded, of_unknown_length, pipeline
from ranks import Leg
from slow_workers import SlowToStart, late
from trainpipes.testing import digest

pytestmark = pytest.mark.usefixtures("no_processes_left")

WORKERS = pytest.mark.parametrize("workers", [0, 2])
EPOCHS = epochs_of(8)


# A Loader and its pipeline


@WORKERS
def test_what_becomes_of_its_pipeline_does_not_move_a_loader(workers: int) -> None:
    pipe = pipeline()
    loader = tp.Loader(pipe, num_workers=workers)
    next(iter(pipe))
    for number in (0, 1):
        for taken, item in enumerate(loader, start=1):
            assert rows_of(item) == EPOCHS[number][taken - 1]
            if taken == 5:
                next(iter(pipe))
                list(tp.Loader(pipe))
                pipe.load_state_dict(pipe.state_at(3, epoch=7))
                pipe.set_epoch(5)
                resumed = loaded(tp.Loader(pipeline()), kept(loader.state_dict()))
                assert given_by(resumed) == EPOCHS[number][5:]
    assert given_by(loader) == EPOCHS[2]


@WORKERS
def test_two_loaders_over_one_pipeline_have_each_epoch_and_a_state_of_their_own(
    workers: int,
) -> None:
    pipe = pipeline()
    loaders = [tp.Loader(pipe, num_workers=workers) for _ in range(2)]
    for number in range(2):
        runs = [iter(loader) for loader in loaders]
        for step in range(3):
            assert [rows_of(next(run)) for run in runs] == [EPOCHS[number][step]] * 2
        given_by(runs[0], 4)
        for loader, taken in zip(loaders, (7, 3), strict=True):
            resumed = loaded(tp.Loader(pipeline()), kept(loader.state_dict()))
            assert given_by(resumed) == EPOCHS[number][taken:]
        assert given_by(runs[1]) == EPOCHS[number][3:]


@pytest.mark.filterwarnings("ignore:pin.. does nothing here")
@pytest.mark.parametrize(("workers", "options"), [(0, {}), (2, {"pin_memory": True})])
def test_a_loader_starts_where_its_pipeline_stands_when_it_is_made(
    workers: int, options: dict[str, Any]
) -> None:
    pipe = pipeline()
    state = kept(pipe.state_at(6, epoch=1))
    pipe.load_state_dict(state)
    loader = tp.Loader(pipe, num_workers=workers, **options)
    pipe.load_state_dict(pipe.state_at(2, epoch=3))
    assert given_by(pipe, 1) == EPOCHS[3][2:3]
    pipe.load_state_dict(state)
    assert given_by(pipe, 1) == EPOCHS[1][6:7]  # which leaves the loader where it is
    assert loader.state_dict() == state
    assert rows_of(loader.peek()) == EPOCHS[1][6]
    assert given_by(loader) == EPOCHS[1][6:]
    assert given_by(loader) == EPOCHS[2]


@WORKERS
def test_a_state_that_was_loaded_into_a_pipeline_is_used_by_one_loader_only(workers: int) -> None:
    pipe = pipeline()
    pipe.load_state_dict(pipe.state_at(6))
    assert given_by(tp.Loader(pipe, num_workers=workers)) == EPOCHS[0][6:]
    assert given_by(tp.Loader(pipe, num_workers=workers)) == EPOCHS[1]
    assert given_by(pipe) == EPOCHS[2]


@WORKERS
def test_a_pipeline_does_not_answer_for_a_loader_that_iterates_it(workers: int) -> None:
    pipe = pipeline()
    loader = tp.Loader(pipe, num_workers=workers)
    given_by(loader, 3)
    with pytest.raises(tp.StateError, match=r"save the state_dict\(\) of the Loader"):
        pipe.state_dict()
    pipe.load_state_dict(loader.state_dict())
    assert given_by(pipe) == EPOCHS[0][3:]


def test_a_pipeline_does_not_answer_for_workers_that_iterate_it() -> None:
    pipe = pipeline()
    running = iter(DataLoader(pipe, batch_size=None, num_workers=2))
    given_by(running, 3)
    with pytest.raises(tp.StateError, match=r"pipe.state_at\(batches"):
        pipe.state_dict()


def test_a_loader_passes_through_pickle_with_the_place_where_it_starts() -> None:
    loader = loaded(tp.Loader(pipeline()), pipeline().state_at(6))
    again = pickle.loads(pickle.dumps(loader))
    assert given_by(again) == given_by(loader) == EPOCHS[0][6:]
    assert given_by(pickle.loads(pickle.dumps(loader))) == given_by(loader) == EPOCHS[1]


# Several iterators


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["no workers", "workers", "persistent workers"],
)
def test_iterators_of_one_loader_side_by_side_each_go_their_own_way(
    options: dict[str, Any],
) -> None:
    loader = tp.Loader(pipeline(), **options)
    first, second = iter(loader), iter(loader)
    assert given_by(first, 2) == EPOCHS[0][:2]
    assert given_by(second, 5) == EPOCHS[1][:5]
    states = [kept(first.state_dict()), kept(second.state_dict())]
    assert given_by(first) == EPOCHS[0][2:]
    assert given_by(second) == EPOCHS[1][5:]
    assert given_by(loader) == EPOCHS[2]
    for state, rest in zip(states, (EPOCHS[0][2:], EPOCHS[1][5:]), strict=True):
        resumed = iter(tp.Loader(pipeline(), **options))
        resumed.load_state_dict(state)
        assert given_by(resumed) == rest
    loader.load_state_dict(states[0])
    assert [given_by(loader) for _ in range(2)] == [EPOCHS[0][2:], EPOCHS[1]]


@pytest.mark.sample(20)
@pytest.mark.filterwarnings("ignore:pin.. does nothing here")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if " / " in n else []) for n in FINITE]
)
def test_iterators_of_any_pipeline_side_by_side_each_go_their_own_way(
    name: str, folder: Path
) -> None:
    alone, pipe = FINITE[name](folder), FINITE[name](folder)
    expected = [[digest(item) for item in alone] for _ in range(2)]
    found: list[list[str]] = [[], []]
    for first, second in zip_longest(iter(pipe), iter(pipe)):
        found[0] += [] if first is None else [digest(first)]
        found[1] += [] if second is None else [digest(second)]
    assert found == expected


@pytest.mark.parametrize(
    ("workers", "make"), [(0, pipeline), (0, of_unknown_length), (2, of_unknown_length)]
)
def test_an_iteration_within_an_iteration_disturbs_neither(
    workers: int, make: Callable[[], tp.Pipeline]
) -> None:
    expected = epochs_of(3, make)
    loader = tp.Loader(make(), num_workers=workers)
    for taken, item in enumerate(loader, start=1):
        assert rows_of(item) == expected[0][taken - 1]
        if taken == 2:
            assert given_by(loader) == expected[1]
            assert rows_of(loader.peek()) == expected[2][0]
        if taken == 3:
            state = kept(loader.state_dict())
    assert given_by(loaded(tp.Loader(make()), state)) == expected[0][3:]
    assert given_by(loader) == expected[2]


def test_a_state_of_the_last_item_says_so_where_another_iterator_is_unfinished() -> None:
    loader = tp.Loader(pipeline())
    training = iter(loader)
    given_by(training, 5)
    next(iter(loader))
    with pytest.warns(UserWarning, match="the one that gave the last item"):
        assert loader.state_dict()["epoch"] == 1
    state = kept(training.state_dict())
    resumed = loaded(tp.Loader(pipeline()), state)
    assert given_by(resumed) == given_by(training) == EPOCHS[0][5:]


@pytest.mark.parametrize("make", [pipeline, of_unknown_length])
@pytest.mark.parametrize("run", [lambda pipe: pipe, tp.Loader], ids=["pipeline", "Loader"])
def test_asking_an_iterator_that_never_starts_for_its_state_uses_nothing_up(
    make: Callable[[], tp.Pipeline], run: Any
) -> None:
    expected = epochs_of(3, make)
    subject = run(make())
    iter(subject).state_dict()
    assert given_by(subject) == expected[0]
    subject.load_state_dict(make().state_at(2, epoch=1))
    asked = iter(subject)
    state = kept(asked.state_dict())
    assert subject.state_dict() == state
    assert given_by(subject) == expected[1][2:]
    assert given_by(asked) == expected[2]


def test_iterators_that_were_made_before_an_endless_one_moved_go_on_where_it_is() -> None:
    pipe = pipeline().repeat()
    first, second = iter(pipe), iter(pipe)
    found = given_by(first, 5) + given_by(second, 3)
    assert found == EPOCHS[0][:8]


@WORKERS
def test_a_loader_of_an_endless_pipeline_starts_where_that_stands(workers: int) -> None:
    pipe = pipeline().repeat()
    running = iter(pipe)
    expected = given_by(running, 3)
    loader = tp.Loader(pipe, num_workers=workers)
    given_by(running, 6)
    expected += given_by(loader, 4) + given_by(loader, 4)
    assert expected == EPOCHS[0][:11]


def failing(batch: Any, asked: list[int]) -> Any:
    asked.append(1)
    if len(asked) == 1:
        raise ValueError("not yet")
    return batch


@pytest.mark.parametrize("run", [lambda pipe: pipe, tp.Loader], ids=["pipeline", "Loader"])
def test_an_iterator_that_failed_or_gave_nothing_takes_no_further_epoch(run: Any) -> None:
    subject = run(pipeline().map(partial(failing, asked=[])))
    running = iter(subject)
    with pytest.raises(ValueError, match="not yet"):
        next(running)
    state = subject.state_dict()
    assert (state["epoch"], state["batches"]) == (0, 0)
    assert given_by(running) == EPOCHS[0]
    nothing = run(tp.from_arrow(TABLE.slice(0, 0)).batch(8))
    running = iter(nothing)
    assert [next(running, None) for _ in range(3)] == [None] * 3
    assert nothing.state_dict()["epoch"] == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_that_is_refused_leaves_the_one_that_was_loaded(workers: int) -> None:
    def endless() -> tp.Pipeline:
        return of_unknown_length().repeat()

    ranks = [tp.Loader(endless().distributed(rank=r, world_size=2)) for r in range(2)]
    states = []
    for rank in ranks:
        given_by(rank, 3)
        states.append(rank.state_dict())
    loader = tp.Loader(endless().distributed(rank=1, world_size=2), num_workers=workers)
    loader.load_state_dict(states[1])
    with pytest.raises(tp.StateError, match="shards"):
        loader.load_state_dict(states[0])
    assert given_by(loader, 3) == given_by(endless(), 12)[7::2]


# Threads


def at_once(count: int, work: Callable[[], None]) -> None:
    """Do something in so many threads, which begin together."""
    start = threading.Barrier(count)

    def begin() -> None:
        start.wait()
        work()

    threads = [threading.Thread(target=begin) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def slowly(row: Any) -> Any:
    time.sleep(0.003)
    return row


@pytest.mark.parametrize("options", [{}, {"threads": 0}, {"num_workers": 1}])
def test_of_two_threads_that_ask_one_iterator_at_once_one_is_refused(
    options: dict[str, Any],
) -> None:
    """And what the other one gets is what would have come."""
    running = iter(tp.Loader(tp.from_arrow(TABLE).map(slowly).batch(8), **options))
    found: list[list[int]] = []
    errors: list[Exception] = []

    def ask() -> None:
        while True:
            try:
                found.append(rows_of(next(running)))
            except RuntimeError as error:
                errors.append(error)
                return
            except StopIteration:
                return

    at_once(2, ask)
    assert ["already executing" in str(error) for error in errors] == [True]
    assert found == [list(range(first, min(first + 8, 100))) for first in range(0, 100, 8)]


def test_a_function_that_asks_its_own_iterator_is_refused_after_a_state_too() -> None:
    rows: Any = iter(tp.from_arrow(TABLE).map(lambda row: next(rows) if row["row"] else row))
    next(rows)
    rows.state_dict()
    with pytest.raises(RuntimeError, match="already executing"):
        next(rows)


def test_a_state_is_not_taken_while_another_thread_takes_an_item() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait(row: Any) -> Any:
        inside.set()
        assert go_on.wait(20)
        return row

    loader = tp.Loader(tp.from_arrow(TABLE).map(wait).batch(8))
    thread = threading.Thread(target=lambda: next(running))
    running = iter(loader)
    thread.start()
    assert inside.wait(20)
    with pytest.raises(RuntimeError, match="in the thread that iterates"):
        running.state_dict()
    go_on.set()
    thread.join()
    assert loader.state_dict()["batches"] == 1


def test_threads_that_start_iterators_of_one_pipeline_at_once_get_an_epoch_each() -> None:
    pipe = pipeline()
    found: list[list[list[int]]] = []
    at_once(8, lambda: found.append(given_by(pipe)))
    assert sorted(found) == sorted(EPOCHS[:8])


# Workers of DataLoaders


def rows_one_by_one(num_shards: int) -> tp.Pipeline:
    return tp.from_arrow(table_of_rows(0, 4 * num_shards)).sharding_filter(num_shards).shuffle(9)


@pytest.mark.parametrize(
    "workers", [64, *(pytest.param(n, marks=pytest.mark.slow) for n in (63, 128))]
)
def test_many_workers_read_one_epoch_after_the_other(workers: int) -> None:
    expected = epochs_of(2, lambda: rows_one_by_one(workers))
    leg = Leg(rows_one_by_one(workers), 1, workers, "workers")
    for number in range(2):
        leg.begin()
        found = [rows_of(leg.step()[0]) for _ in range(4 * workers)]
        assert found == expected[number]


def test_a_worker_that_never_started_is_not_taken_for_one_of_the_next_pass() -> None:
    loader = DataLoader(pipeline(), batch_size=None, num_workers=2, worker_init_fn=SlowToStart())
    torch.manual_seed(7)
    assert given_by(loader, 1) == EPOCHS[0][:1]
    torch.manual_seed(7)
    assert given_by(loader) == EPOCHS[1]


@pytest.mark.parametrize(("kind", "method"), [
    (DataLoader, "fork"),
    (StatefulDataLoader, "fork"),
    pytest.param(StatefulDataLoader, "forkserver", marks=pytest.mark.slow),
    pytest.param(DataLoader, "spawn", marks=pytest.mark.slow),
    pytest.param(StatefulDataLoader, "spawn", marks=pytest.mark.slow),
])  # fmt: skip
def test_an_iterator_of_the_parent_does_not_part_workers_that_start_late(
    kind: Any, method: str
) -> None:
    pipe = pipeline()
    loader = kind(
        pipe, batch_size=None, num_workers=2, worker_init_fn=late, multiprocessing_context=method
    )
    running = iter(loader)
    found = given_by(running, 1)
    next(iter(pipe))
    found += given_by(running)
    assert found == EPOCHS[0]


@pytest.mark.parametrize(("kind", "workers"), [(tp.Loader, 2), (StatefulDataLoader, 2)])
def test_persistent_workers_load_a_state_of_mid_epoch_and_then_of_its_start(
    kind: Any, workers: int
) -> None:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True}
    if kind is StatefulDataLoader:
        options["batch_size"] = None
    first = kind(pipeline(), **options)
    given_by(first)
    start = kept(first.state_dict())
    running = iter(first)
    given_by(running, 5)
    middle = kept(first.state_dict())
    loader = kind(pipeline(), **options)
    for _ in range(2):
        loader.load_state_dict(middle)
        assert given_by(loader) == EPOCHS[1][5:]
        loader.load_state_dict(start)
        assert given_by(loader) == EPOCHS[1]
    assert given_by(loader) == EPOCHS[2]


@pytest.mark.usefixtures("failed_workers_let_go")
def test_persistent_workers_do_not_start_an_epoch_from_which_they_know_the_start_only() -> None:
    pipe = pipeline()
    loader = DataLoader(pipe, batch_size=None, num_workers=2, persistent_workers=True)
    given_by(loader)
    pipe.load_state_dict(pipe.state_at(0, epoch=3))
    assert given_by(loader) == EPOCHS[3]
    pipe.load_state_dict(pipe.state_at(5, epoch=1))
    with pytest.raises(tp.StateError, match=r"within epoch 1 .*make a new DataLoader"):
        given_by(loader)
    pipe.load_state_dict(pipe.state_at(5, epoch=1))
    loader = DataLoader(pipe, batch_size=None, num_workers=2, persistent_workers=True)
    assert [given_by(loader) for _ in range(2)] == [EPOCHS[1][5:], EPOCHS[2]]


def ends_of_epochs(make: Callable[[], tp.Pipeline]) -> Iterator[dict[str, Any]]:
    """The states of the last item of an epoch, and after it."""
    loader = tp.Loader(make())
    for _ in loader:
        state = kept(loader.state_dict())
    yield state
    yield kept(loader.state_dict())


@pytest.mark.parametrize(("kind", "workers", "persistent", "make"), [
    (DataLoader, 0, False, of_unknown_length),
    (DataLoader, 2, False, pipeline),
    (StatefulDataLoader, 1, True, of_unknown_length),
    pytest.param(StatefulDataLoader, 2, False, of_unknown_length, marks=pytest.mark.slow),
    pytest.param(DataLoader, 2, True, pipeline, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_state_of_an_epochs_end_goes_on_with_the_next_in_workers(
    kind: Any, workers: int, persistent: bool, make: Callable[[], tp.Pipeline]
) -> None:
    expected = [sorted(epoch) for epoch in epochs_of(3, make)]  # workers get out of step at ends
    for state in ends_of_epochs(make):
        pipe = loaded(make(), state)
        loader = kind(pipe, batch_size=None, num_workers=workers, persistent_workers=persistent)
        assert [sorted(given_by(loader)) for _ in range(2)] == expected[1:]


def test_a_state_beyond_the_step_at_which_ranks_end_together_is_refused() -> None:
    rows = tp.from_dataset(range(60)).sharding_filter(4, split="stride")
    pipe = rows.filter(lambda x: x < 20 or x % 4 != 1, version="1").batch(3)
    batches, numbers = iter(pipe), []
    for _ in batches:
        m = batches.state_dict()["batches"]
        numbers.append(m - 1 if m else numbers[-1] + 1)
    hole = next(m for m in range(100) if m not in numbers)
    assert hole < numbers[-1]  # shards end at different steps
    ranks = pipe.distributed(rank=0, world_size=2)
    assert ranks.state_at(hole // 2)["batches"] == hole // 2 * 2
    with pytest.raises(tp.StateError, match=rf"has {hole // 2} batches for each of 2 ranks, got"):
        ranks.state_at(hole // 2 + 1)
    assert pipe.state_at(len(numbers))  # one process goes on to the last shard's end
