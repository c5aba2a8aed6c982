"""Items handed out and done in any order are each done once an epoch, over kills and ranks."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import trainpipes as tp
from hundred_rows import loaded
from interrupts import is_interrupted, places_of
from trainpipes.loader import work_queue
from trainpipes.loader.work_items import InFlight
from trainpipes.testing import digest
from work_runs import PIPELINES, ROWS, Run, dealt, plain, rows


def queue_of(pipe: tp.Pipeline, **options: Any) -> tp.WorkQueue:
    return tp.WorkQueue(tp.Loader(pipe, threads=0), **options)


def queues_of(pipe: tp.Pipeline, ranks: int) -> list[tp.WorkQueue]:
    """Those of all ranks."""
    return [queue_of(pipe.distributed(rank=rank, world_size=ranks)) for rank in range(ranks)]


def taken(queue: tp.WorkQueue, count: int) -> list[tp.Work]:
    found = [queue.get(timeout=0) for _ in range(count)]
    return [work for work in found if work is not None]


def rest(queue: tp.WorkQueue) -> list[Any]:
    found = []
    for work in queue:
        found.append(work.item["id"])
        queue.done(work.key)
    return found


@pytest.mark.parametrize("place", ["before", "after"])
def test_ctrl_c_as_an_item_is_noted_loses_none(monkeypatch: Any, place: str) -> None:
    add, left = InFlight.add, 5

    def interrupted(*what: Any) -> None:
        nonlocal left
        left -= 1
        if left or place == "after":
            add(*what)
        if not left:
            raise KeyboardInterrupt

    monkeypatch.setattr(InFlight, "add", interrupted)
    queue, later = queue_of(rows(slice(60))), queue_of(rows(slice(60)))
    done = []
    for _ in range(4):
        work = queue.get()
        assert work is not None
        done.append(work.item["id"])
        queue.done(work.key)
    with pytest.raises(KeyboardInterrupt):
        queue.get()
    later.load_state_dict(queue.state_dict())
    others = sorted({*range(60)} - {*done})
    assert sorted(rest(queue)) == sorted(rest(later)) == others


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_while_an_item_is_waited_for_loses_none(error: type[BaseException]) -> None:
    rooms = ("loader", "_internal")

    def full() -> tuple[tp.WorkQueue, tp.Work]:
        queue = queue_of(rows(slice(5)), max_in_flight=2)
        first, _ = taken(queue, 2)
        return queue, first

    def get(queue: tp.WorkQueue, first: tp.Work, seconds: float = 0.02) -> None:
        timer = threading.Timer(seconds, queue.done, [first.key])
        timer.start()
        try:
            seen.append(queue.get())
        finally:
            timer.join()

    seen: list[tp.Work | None] = []
    args = full()
    places = [place for place in places_of(lambda: get(*args), rooms) if "/loader/" in place[0]]
    assert len(places) > 8
    for place in places:
        for seconds in (0.02, 0.5, 5):  # on a busy machine it may not wait yet
            seen.clear()
            queue, first = full()
            came = is_interrupted(partial(get, queue, first, seconds), place, rooms, error)
            if came:
                break
        assert came, place
        again = tp.WorkQueue(tp.Loader(rows(slice(5)), threads=0))
        again.load_state_dict(queue.state_dict())
        assert sorted(rest(again)) == [1, 2, 3, 4], place
        if not seen:
            assert queue.get(timeout=5) is not None, place


# Random runs


@pytest.mark.filterwarnings("ignore:5 ranks do not divide")
@pytest.mark.parametrize(
    "part", [pytest.param(n, marks=[pytest.mark.slow] * (n > 0)) for n in range(200)]
)
def test_each_item_is_done_once(part: int) -> None:
    for seed in range(part * 10, part * 10 + 10):
        run = Run(seed)
        try:
            run.go()
            run.check()
        except Exception as error:
            error.add_note(f"of Run({seed})")
            raise


#: Runs of processes that are killed: 50, each of another draw.
KILLED_RUNS = 50
ORDER = ("shuffled", "filtered", "packed", "mixed", "batches", *PIPELINES)


def work_until_killed(folder: Path, name: str, most: int) -> None:
    """A process: threads that take random times, and a checkpoint of what is done with the state."""
    queue = queue_of(PIPELINES[name](), max_in_flight=most, epochs=2)
    done: list[Any] = []
    if (folder / "saved").exists():
        done, state = pickle.loads((folder / "saved").read_bytes())
        queue.load_state_dict(state)
    lock = threading.Lock()  # what is trained, and that it is done, change together

    def work() -> None:
        for one in queue:
            time.sleep(random.random() * 0.004)
            if random.random() < 0.1:
                queue.again(one.key)
                continue
            with lock:
                done.append((*one.key, digest(one.item)))
                queue.done(one.key)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    while over := any(thread.is_alive() for thread in threads) or not (folder / "over").exists():
        with lock:
            saved = pickle.dumps((done, queue.state_dict()))
            over = not any(thread.is_alive() for thread in threads)
        (folder / "new").write_bytes(saved)
        os.replace(folder / "new", folder / "saved")
        if over:
            (folder / "over").touch()
        time.sleep(0.002)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] * (n > 0)) for n in range(KILLED_RUNS)]
)
def test_each_item_is_done_once_by_processes_that_are_killed(number: int, tmp_path: Path) -> None:
    draw, kills = random.Random(number), 0
    name, most = ORDER[number % len(ORDER)], draw.choice([2, 8, 40, 512])
    while not (tmp_path / "over").exists():
        process = multiprocessing.get_context("fork").Process(
            target=work_until_killed, args=(tmp_path, name, most)
        )
        process.start()
        longest = 0.12 if kills else 0.03  # so that the first one comes before the end
        process.join(0.01 + longest * draw.random() if kills < 10 else 60)
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
            kills += 1
        process.join()
    assert kills
    done, _ = pickle.loads((tmp_path / "saved").read_bytes())
    assert len({key[:2] for key in done}) == len(done)
    for epoch, wanted in enumerate(plain(name, 2)):
        assert Counter(item for e, _, item in done if e == epoch) == wanted


# One queue


def test_what_is_open_comes_first_in_its_order() -> None:
    queue = queue_of(rows())
    works = taken(queue, 10)
    for n in (9, 1, 5, 0, 3):
        queue.done(works[n].key)
    again = loaded(queue_of(rows()), json.loads(json.dumps(queue.state_dict())))
    assert rest(again) == [2, 4, 6, 7, 8, *range(10, ROWS)]
    assert again.get() is None
    assert loaded(queue_of(rows()), again.state_dict()).get() is None


def test_a_state_that_is_loaded_takes_the_place_of_what_is_in_flight() -> None:
    state = queue_of(rows()).state_dict()
    queue = queue_of(rows(), max_in_flight=10)
    assert len(taken(queue, 10)) == 10
    queue.load_state_dict(state)
    assert queue.in_flight == 0
    assert rest(queue) == [*range(ROWS)]


def test_keys_are_alike_in_every_run_and_on_any_number_of_ranks() -> None:
    pipe = dealt(rows()).shuffle(20, seed=1)
    alone = {work.key: work.item["id"] for work in taken(queue_of(pipe), ROWS)}
    assert [*alone] == [(0, n) for n in range(ROWS)]
    found = {}
    for rank, queue in enumerate(queues_of(pipe, 3)):
        found |= {w.key: w.item["id"] for w in taken(queue, len(range(rank, ROWS, 3)))}
    assert found == alone


def test_what_failed_comes_next_and_what_is_done_meanwhile_does_not() -> None:
    queue = queue_of(rows(), max_in_flight=5)
    works = taken(queue, 5)
    queue.again(works[3].key)
    queue.again(works[1].key)
    queue.again(works[2].key)
    queue.done(works[1].key)
    assert [work.item["id"] for work in taken(queue, 3)] == [3, 2, 5]
    assert queue.in_flight == 5


@pytest.mark.parametrize("by", [None, "id"])
def test_a_retired_row_is_in_no_later_epoch(by: str | None) -> None:
    def make() -> tp.WorkQueue:
        return queue_of(rows(slice(0, 12)).shuffle(12, seed=1), epochs=None, by=by)

    queue, seen = make(), []
    for count in (15, None):
        for work in islice(queue, count):
            epoch, number = work.key.epoch, work.item["id"]
            seen.append((epoch, number))
            queue.retire(work.key) if number % 3 == epoch else queue.done(work.key)
        if count:
            queue = loaded(make(), queue.state_dict())
    # All are retired after three epochs: there is nothing for a fourth.
    assert Counter(epoch for epoch, _ in seen) == {0: 12, 1: 8, 2: 4}
    assert all(number % 3 >= epoch for epoch, number in seen)


@pytest.mark.parametrize("by", [None, "id"])
def test_an_item_that_was_changed_is_retired_and_comes_again_as_it_was(by: str | None) -> None:
    queue, seen = queue_of(numbered(*range(4)), epochs=3, by=by), []
    work = queue.get()
    assert work is not None
    work.item.update(id=7, reward=0.0)
    queue.again(work.key)
    for work in queue:
        seen.append(dict(work.item))
        work.item.update(id=work.item["id"] + 10, reward=1.0)
        queue.retire(work.key)
    assert seen == [{"id": n} for n in range(4)]


def test_what_an_item_holds_may_be_changed_too() -> None:
    prompts = [{"messages": [{"role": "user", "parts": ("hi", [n])}]} for n in range(3)]
    queue, seen = queue_of(tp.from_dataset(prompts), epochs=2), []
    work = queue.get()
    assert work is not None
    work.item["messages"].append({"role": "assistant"})
    queue.again(work.key)
    for work in queue:
        seen.append(json.dumps(work.item))
        work.item["messages"][0]["parts"][1].append("seen")
        work.item["messages"].append({"role": "assistant"})
        queue.retire(work.key)
    assert seen == [json.dumps(prompt) for prompt in prompts]
    assert all(len(prompt["messages"]) == 1 for prompt in prompts)


def numbered(*numbers: int) -> tp.Pipeline:
    return tp.from_dataset([{"id": n} for n in numbers])


@pytest.mark.parametrize("epochs", [20, None])
def test_an_epoch_without_items_of_a_rank_is_not_the_last(epochs: int | None) -> None:
    pipe = numbered(*range(6)).sharding_filter(2, tail="uneven").shuffle(6, seed=0)
    pipe = pipe.distributed(rank=1, world_size=2)
    queue, seen = queue_of(pipe, epochs=epochs, by="id"), list[tuple[int, int]]()
    while (work := queue.get()) is not None and work.key.epoch < 20:
        seen.append((work.key.epoch, work.item["id"]))
        queue.retire(work.key) if work.item["id"] < 4 else queue.done(work.key)
        if len(seen) == 9:
            queue = loaded(queue_of(pipe, epochs=epochs, by="id"), queue.state_dict())
    each = [list(tp.Loader(pipe, epoch=epoch, threads=0)) for epoch in range(20)]
    live = [[row["id"] for row in rows if row["id"] > 3] for rows in each]
    assert [n for _, n in seen if n > 3] == [n for part in live for n in part]
    assert [] in live[: seen[-1][0]]


def test_an_epoch_that_draws_no_row_is_not_the_last() -> None:
    pipe = tp.from_dataset([{"id": n, "c": False} for n in range(3)])
    pipe = pipe.sample_by("c", {True: 1, False: 0.2})
    sizes = [len(list(tp.Loader(pipe, epoch=n, threads=0))) for n in range(12)]
    assert not sizes[0]
    assert len(rest(queue_of(pipe, epochs=12))) == sum(sizes) > 0


@pytest.mark.parametrize("epochs", [10**9, None])
def test_a_queue_whose_rows_are_all_retired_ends(epochs: int | None) -> None:
    queue = queue_of(numbered(*range(6)), epochs=epochs)
    for work in queue:
        queue.retire(work.key)
    assert queue.get() is None
    assert queue_of(numbered(1).filter(pc.field("id") > 1), epochs=None).get() is None


def test_retired_rows_are_known_by_what_named_them() -> None:
    def make(by: str | None, part: int = 0, of: int = 1) -> tp.WorkQueue:
        pipe = dealt(tp.from_dataset([{"id": n, "g": n % 3} for n in range(24)]))
        return queue_of(pipe.distributed(rank=part, world_size=of), by=by, epochs=2)

    def state(queue: tp.WorkQueue) -> dict[str, Any]:
        (work,) = taken(queue, 1)
        queue.retire(work.key)
        return queue.state_dict()

    saved = state(make("id"))
    assert len(rest(loaded(make("id"), saved))) == 23 + 23
    for by in ("g", None):
        error = rf"WorkQueue\(by\): the retired rows of the state are named by 'id', got {by!r}"
        with pytest.raises(tp.StateError, match=error):
            make(by).load_state_dict(saved)
    make("g").load_state_dict(make("id").state_dict())  # of which none is retired
    earlier = {**saved, "retired": saved["retired"].partition(" ")[0]}
    make("g").load_state_dict(earlier)  # which does not say
    with pytest.raises(tp.StateError, match="named alike in all states, got 'g' and 'id'"):
        tp.merge_states([state(make("id", 0, 2)), state(make("g", 1, 2))])
    merged = tp.merge_states([state(make("id", 0, 2)), make("id", 1, 2).state_dict()])
    with pytest.raises(tp.StateError, match="named by 'id'"):
        make(None).load_state_dict(merged)


@pytest.mark.parametrize("by", [None, "id"])
def test_a_batch_is_not_retired(by: str | None) -> None:
    queue = queue_of(rows().batch(2).collate(), by=by)
    (work,) = taken(queue, 1)
    error = r"retire\(key\) must be of a row, got a batch of batch\(2\).* without batches"
    with pytest.raises(tp.ConfigError, match=error):
        queue.retire(work.key)
    queue.done(work.key)


@pytest.mark.parametrize("name", [None, float("nan")])
def test_a_value_that_is_missing_names_no_row(name: Any) -> None:
    queue = queue_of(tp.from_dataset([{"id": name, "x": n} for n in range(3)]), by="id")
    work = queue.get()
    assert work is not None
    with pytest.raises(tp.SchemaError, match=r"WorkQueue\(by\): 'id' must name a row, got "):
        queue.retire(work.key)
    queue.done(work.key)
    assert [work.item["x"] for work in taken(queue, 2)] == [1, 2]


@pytest.mark.parametrize("timeout", ["5", -1, float("nan"), 10**400])
def test_a_timeout_that_is_no_time_is_refused(timeout: Any) -> None:
    queue = queue_of(rows())
    with pytest.raises(
        tp.ConfigError, match=r"WorkQueue.get\(timeout\) must be seconds, from 0 on"
    ):
        queue.get(timeout)
    assert queue.get(float("inf")) is not None


def test_a_full_queue_waits_and_says_for_what(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(work_queue, "PATIENCE", 0.05)
    queue = queue_of(rows(), max_in_flight=2)
    first, _ = taken(queue, 2)
    with pytest.raises(
        TimeoutError, match=r"2 of 2 are in flight, \(0, 0\), \(0, 1\), the oldest for"
    ):
        queue.get(timeout=0)
    threading.Timer(0.2, queue.done, [first.key]).start()
    with caplog.at_level(logging.WARNING, "trainpipes"):
        assert (queue.get() or first).item["id"] == 2
    assert "no more may be handed out until items are marked by done()" in caplog.text
    assert "(0, 0), (0, 1), the oldest for" in caplog.text


def test_a_loop_that_holds_the_last_items_itself_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(work_queue, "AT_THE_END", 0.05)
    queue, held = queue_of(rows(slice(7))), list[tp.Work]()
    threading.Timer(0.5, queue.close).start()
    with caplog.at_level(logging.WARNING, "trainpipes"):
        held.extend(queue)  # which waits, for what it holds
    assert len(held) == 7
    (said,) = caplog.messages
    assert "all was handed out until items are marked by done() or again(): 7 of" in said
    assert "are in flight, (0, 0), (0, 1), (0, 2), (0, 3), (0, 4) and 2 more" in said
    assert "asks by get(timeout=...)" in said


def test_an_asynchronous_loop_is_told_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(work_queue, "PATIENCE", 1.1)
    queue, said = queue_of(rows(), max_in_flight=2), list[str]()

    def hear(words: str, *values: Any) -> None:
        said.append(words % values)
        threading.Timer(0, queue.close).start()

    async def loop() -> None:
        async for _ in queue:
            pass

    monkeypatch.setattr(work_queue.log, "warning", hear)
    asyncio.run(asyncio.wait_for(loop(), 20))
    assert "no more may be handed out until items are marked by done()" in said[0]


def test_the_queue_waits_for_an_item_that_lags_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "REACH", 20)
    queue = queue_of(rows(), max_in_flight=5)
    first = taken(queue, 1)[0]
    for _ in range(20):
        queue.done(taken(queue, 1)[0].key)
    with pytest.raises(TimeoutError, match=r"1 of 5 are in flight, \(0, 0\), the oldest for"):
        queue.get(timeout=0)
    assert len(queue.state_dict()["work-0000"]) < 500
    queue.done(first.key)
    assert rest(queue)[-1] == ROWS - 1


def test_keys_that_are_not_in_flight_are_refused_by_name() -> None:
    queue = queue_of(rows())
    works = taken(queue, 3)
    queue.done(list(works[0].key))  # type: ignore[arg-type]  # from JSON
    for method in (queue.done, queue.again, queue.retire):
        with pytest.raises(tp.ConfigError, match=r"in flight, got .*; it is done already"):
            method(works[0].key)
        with pytest.raises(tp.ConfigError, match=r"\(key\) must be the key of an item in flight"):
            method(tp.WorkKey(0, 50))
        with pytest.raises(tp.ConfigError, match="give the key of a Work"):
            method(works[1])  # type: ignore[arg-type]
        with pytest.raises(tp.ConfigError, match="give the key of a Work"):
            method(("0", "1"))  # type: ignore[arg-type]  # from CSV
    queue.again(works[1].key)
    with pytest.raises(tp.ConfigError, match="it waits already"):
        queue.again(works[1].key)
    assert queue.in_flight == 2


def test_an_error_of_the_loader_loses_nothing() -> None:
    fails = [True]

    def sometimes(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 90 and fails[0]:
            raise OSError("away")
        return row

    queue = queue_of(dealt(rows()).map(sometimes))
    found = [work.item["id"] for work in taken(queue, 5)]
    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            found.extend(work.item["id"] for work in queue)
    fails[0] = False
    found += [work.item["id"] for work in taken(queue, ROWS - len(found))]
    assert sorted(found) == [*range(ROWS)]


def test_many_threads_and_an_event_loop_take_each_item_once() -> None:
    queue, seen = queue_of(rows(), max_in_flight=7), []

    def work() -> None:
        for one in queue:
            time.sleep(0.0005)
            seen.append(one.item["id"])
            queue.done(one.key)

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(seen) == [*range(ROWS)]

    queue, found = queue_of(rows(), max_in_flight=7), []

    async def loop() -> None:
        async for one in queue:
            try:
                await asyncio.sleep(0.0005)
            except asyncio.CancelledError:
                queue.again(one.key)
                raise
            found.append(one.item["id"])
            queue.done(one.key)

    async def cancelled_and_more() -> None:
        first = asyncio.create_task(loop())
        await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.gather(*(loop() for _ in range(5)))

    asyncio.run(cancelled_and_more())
    assert sorted(found) == [*range(ROWS)]


def test_an_item_that_comes_as_its_task_is_cancelled_is_handed_out_again() -> None:
    queue = queue_of(rows(slice(3)))

    async def cancelled() -> None:
        task = asyncio.ensure_future(anext(aiter(queue)))
        await asyncio.sleep(0)
        while not queue.in_flight:
            time.sleep(0.01)
        time.sleep(0.2)  # the item is there, and the loop has not heard of it
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert rest(queue) == [0, 1, 2]


def test_close_ends_those_that_wait() -> None:
    queue = queue_of(rows(), max_in_flight=1)
    taken(queue, 1)
    threading.Timer(0.1, queue.close).start()
    assert queue.get() is None


def test_weights_of_a_mix_change_where_nothing_is_in_flight() -> None:
    def make(a: float) -> tp.WorkQueue:
        parts = {"a": rows(slice(0, 40)), "b": rows(slice(40, 97))}
        return queue_of(tp.mix(parts, weights={"a": a, "b": 1}).repeat())

    queue = make(1)
    works = taken(queue, 30)
    with pytest.raises(tp.StateError, match="nothing is in flight, got one with 30 items"):
        make(9).load_state_dict(queue.state_dict(), allow_changes=["mix"])
    for work in works:
        queue.done(work.key)
    other = make(9)
    with pytest.raises(tp.StateError, match="weights"):
        other.load_state_dict(queue.state_dict())
    other.load_state_dict(queue.state_dict(), allow_changes=["mix"])
    before, after = works, taken(other, 100)
    assert sum(work.item["id"] < 40 for work in before) == 15
    assert sum(work.item["id"] < 40 for work in after) == 90


def test_what_a_queue_cannot_save_does_not_change() -> None:
    def mixed() -> tp.Loader:
        parts = {"a": rows(slice(0, 40)), "b": rows(slice(40, 97))}
        return tp.Loader(tp.mix(parts, weights={"a": 1, "b": 1}, stop="repeat"))

    loader = mixed()
    tp.WorkQueue(loader)
    with pytest.raises(tp.ConfigError, match=r"must be left out for the Loader of a WorkQueue"):
        loader.set_weights({"a": 9})
    loader = mixed()
    loader.set_weights({"a": 9})
    with pytest.raises(
        tp.ConfigError, match=r"without set_weights\(\), which a queue's state does"
    ):
        tp.WorkQueue(loader)


def test_the_batch_size_changes_between_epochs_only() -> None:
    queue, states = queue_of(rows().batch(4), epochs=2), []
    for count in (5, -(-ROWS // 4) - 5):
        for work in taken(queue, count):
            queue.done(work.key)
        states.append(queue.state_dict())
    within, between = states
    with pytest.raises(tp.StateError, match=r"may change only between epochs.*\(batches = 5\)"):
        queue_of(rows().batch(6)).load_state_dict(within, allow_changes=["batch_size"])
    other = queue_of(rows().batch(6), epochs=2)
    other.load_state_dict(between, allow_changes=["batch_size"])
    assert sum(len(work.item) for work in taken(other, -(-ROWS // 6))) == ROWS


# Ranks


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_two_ranks_loads_on_four(tmp_path: Path) -> None:
    pipe = dealt(rows()).shuffle(20, seed=1)

    done, states = [], []
    for rank, queue in enumerate(queues_of(pipe, 2)):
        for number, work in enumerate(taken(queue, 20 + 5 * rank)):
            if number % 3:
                queue.done(work.key)
                done.append(work.item["id"])
        states.append(queue.state_dict())
    dcp.save({"queue": tp.merge_states(states)}, checkpoint_id=tmp_path, no_dist=True)
    for queue in queues_of(pipe, 4):
        held = {"queue": queue}
        dcp.load(held, checkpoint_id=tmp_path, no_dist=True)
        done += rest(queue)
    assert sorted(done) == [*range(ROWS)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:5 ranks do not divide")
@pytest.mark.parametrize(
    ("name", "before", "after"), [("shuffled", 5, 5), ("filtered", 5, 4), ("shuffled", 4, 5)]
)
def test_a_checkpoint_of_ranks_that_do_not_divide_the_shards_loads_as_one_file(
    name: str, before: int, after: int, tmp_path: Path
) -> None:
    done, states = [], {}
    for queue in queues_of(PIPELINES[name](), before):
        for number, work in enumerate(taken(queue, 9)):
            if number % 3:
                queue.done(work.key)
                done.append(work.item["id"])
        states |= queue.state_dict()
    dcp.save({"queue": states}, checkpoint_id=tmp_path, no_dist=True)
    queues = queues_of(PIPELINES[name](), after)
    if after == before:
        for queue in queues:
            dcp.load({"queue": queue}, checkpoint_id=tmp_path, no_dist=True)
    else:
        error = r"make one file of a folder.* by its dcp_to_torch_save|Missing key .*work-00"
        with pytest.raises(BaseException, match=error):
            dcp.load({"queue": queues[-1]}, checkpoint_id=tmp_path, no_dist=True)
        dcp_to_torch_save(tmp_path, tmp_path / "one.pt")
        whole = torch.load(tmp_path / "one.pt", weights_only=True)["queue"]
        for queue in queues:
            queue.load_state_dict(whole)
    for queue in queues:
        done += rest(queue)
    assert Counter(done) == Counter(row["id"] for row in PIPELINES[name]())


@pytest.mark.parametrize(("after", "merged"), [(1, True), (2, True), (2, False), (4, True)])
def test_ranks_that_count_the_items_of_all_go_on_on_any_number(after: int, merged: bool) -> None:
    done, states = [], []
    for number, queue in enumerate(queues_of(PIPELINES["taken"](), 2)):
        for work in taken(queue, 5 + number):
            queue.done(work.key)
            done.append(work.item["id"])
        states.append(queue.state_dict())
    again = queues_of(PIPELINES["taken"](), after)
    with pytest.raises(tp.StateError, match="got one whose ranks stand at different places"):
        again[0].load_state_dict(tp.merge_states(states), allow_changes=["filter"])
    for number, queue in enumerate(again):
        queue.load_state_dict(tp.merge_states(states) if merged else states[number])
        done += rest(queue)
    assert sorted(done) == sorted(row["id"] for row in PIPELINES["taken"]())


def test_ranks_do_not_read_again_what_a_change_made_others_of() -> None:
    def changed(ids: range) -> tp.Pipeline:
        pipe = dealt(rows()).shuffle(20, seed=1)
        return pipe.filter(~pc.field("id").isin([*ids])).batch(1)

    queues = queues_of(changed(range(2)), 2)
    for queue in queues:
        for work in taken(queue, 9):
            queue.done(work.key)
    state, pipe = tp.merge_states([queue.state_dict() for queue in queues]), changed(range(0, 60))
    queues = queues_of(pipe, 2)
    for count, queue in enumerate(queues):
        queue.load_state_dict(state, allow_changes=["filter"])
        for work in taken(queue, 2 + count):
            queue.done(work.key)
    state = tp.merge_states([queue.state_dict() for queue in queues])
    for number, queue in enumerate(queues_of(pipe, 2)):
        queue.load_state_dict(state)
        assert [work.key for work in taken(queue, 5)] == [
            work.key for work in taken(queues[number], 5)
        ]
    (alone,) = queues_of(pipe, 1)
    with pytest.raises(tp.StateError, match=r"changed within epoch 0 \(batches = 18\): load it on"):
        alone.load_state_dict(state)


def test_states_of_other_runs_and_missing_ranks_are_refused() -> None:
    pipe = dealt(rows())
    two = [queue.state_dict() for queue in queues_of(pipe, 2)]
    with pytest.raises(tp.StateError, match=r"work-0001.* are missing: merge the states"):
        tp.merge_states(two[:1])
    with pytest.raises(tp.StateError, match="merge one state of each rank"):
        tp.merge_states([two[0], two[0]])
    with pytest.raises(tp.StateError, match="merge the states of all ranks"):
        queue_of(pipe).load_state_dict(two[0])
    with pytest.raises(tp.StateError, match="that of a loader"):
        queue_of(pipe).load_state_dict(tp.Loader(pipe).state_dict())
    with pytest.raises(tp.StateError, match="build the pipeline as it was"):
        queue_of(dealt(rows()).shuffle(20)).load_state_dict(tp.merge_states(two))


@pytest.mark.parametrize("key", ["first_epoch", "num_classes", "pipeline", "work-0003", "retired"])
def test_a_damaged_state_is_refused(key: str) -> None:
    state = queue_of(dealt(rows())).state_dict()
    state[key] = state[key] + (1 if isinstance(state[key], int) else "x")
    with pytest.raises(tp.StateError, match="edited or is damaged"):
        queue_of(dealt(rows())).load_state_dict(state)


def test_loaders_that_leave_items_out_are_refused() -> None:
    even = rows().sharding_filter(12).distributed(rank=0, world_size=2)
    with pytest.raises(tp.ConfigError, match=r"sharding_filter\(tail\) must be \"uneven\""):
        queue_of(even)
    with pytest.raises(tp.ConfigError, match="a trainpipes Loader"):
        tp.WorkQueue(rows())  # type: ignore[arg-type]
    with pytest.raises(tp.ConfigError, match="max_in_flight"):
        queue_of(rows(), max_in_flight=0)
    with pytest.raises(tp.ConfigError, match="epochs"):
        tp.WorkQueue(tp.Loader(rows(), epoch=0), epochs=2)


# Bounds


@pytest.mark.parametrize("copy_of", [pickle.dumps, copy.deepcopy], ids=["pickle", "deepcopy"])
def test_one_cannot_be_copied(copy_of: Any) -> None:
    with pytest.raises(
        TypeError, match=r"begin one in each process that reads, WorkQueue\(loader\)"
    ):
        copy_of(queue_of(rows()))


def test_a_state_of_20_000_in_flight_is_below_14_kilobytes() -> None:
    table = pa.table({"id": range(40_000)})
    queue = queue_of(tp.from_arrow(table).sharding_filter(24), max_in_flight=20_000)
    draw, flight = random.Random(0), []
    for _ in range(39_000):
        flight += [work.key for work in taken(queue, 1)]
        if len(flight) == 20_000:
            place = draw.randrange(1, 20_000)
            flight[place], flight[-1] = flight[-1], flight[place]
            queue.done(flight.pop())
    assert queue.in_flight > 19_000
    state = queue.state_dict()
    assert len(json.dumps(state)) < 14 * 1024
    again = loaded(queue_of(tp.from_arrow(table).sharding_filter(24), max_in_flight=20_000), state)
    assert {w.key for w in taken(again, 1000)} == set(sorted(flight)[:1000])
