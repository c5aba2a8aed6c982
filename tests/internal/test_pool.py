"""Threads that work ahead: what is done, by whom, and what becomes of them."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from interpreters import python
from trainpipes._internal import locks
from trainpipes._internal import pool as pools
from trainpipes._internal.pool import Pool, Priority, default_threads, waits_for_server


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.join()


_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def before() -> None:
    """What other tests have left does not count."""
    _before.clear()
    _before.update(threading.enumerate())


def workers() -> list[str]:
    """Names of the pools' threads that this test has started and that are alive."""
    started = set(threading.enumerate()) - _before
    return [t.name for t in started if t.name.startswith("trainpipes-")]


def none_left(but: int = 0) -> bool:
    """Whether the threads go, but for so many, within seconds."""
    for _ in range(200):
        gc.collect()
        if len(workers()) <= but:
            return True
        time.sleep(0.02)
    return False


def test_a_pool_does_everything_and_raises_what_was_raised(pool: Pool) -> None:
    futures = [pool.submit(lambda n=n: n * n) for n in range(100)]
    assert [pool.result(future) for future in futures] == [n * n for n in range(100)]
    failing = pool.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        pool.result(failing)
    assert len(workers()) <= 2


def test_who_waits_does_what_nobody_has_begun(pool: Pool) -> None:
    hold = threading.Event()
    for _ in range(2):
        pool.submit(hold.wait)
    future = pool.submit(threading.get_ident)
    assert pool.result(future) == threading.get_ident()
    hold.set()


def test_a_pool_of_functions_that_want_one_thread_keeps_them_in_one() -> None:
    alone = Pool(1, shares=False)
    futures = [alone.submit(threading.get_ident) for _ in range(20)]
    found = {alone.result(future) for future in futures}
    assert len(found) == 1
    assert threading.get_ident() not in found
    alone.join()


@pytest.mark.parametrize("shares", [True, False])
def test_a_pool_that_is_closed_still_gives_results(shares: bool) -> None:
    closed = Pool(1, shares)
    assert closed.result(closed.submit(lambda: 1)) == 1
    closed.join()
    assert closed.result(closed.submit(lambda: 2)) == 2


def test_what_is_more_urgent_is_done_first(pool: Pool) -> None:
    order: list[Priority] = []
    hold = threading.Event()
    holding = [pool.submit(hold.wait) for _ in range(2)]
    while not all(future.begun for future in holding):
        time.sleep(0.001)
    pool.threads = 1  # from here on one after the other
    futures = [
        pool.submit(partial(order.append, priority), priority)
        for priority in (*reversed(Priority), *reversed(Priority))
    ]
    hold.set()
    while not all(future.done for future in futures):
        time.sleep(0.001)
    assert order == sorted([*Priority, *Priority])


def test_a_thread_stays_free_for_what_cannot_wait(pool: Pool) -> None:
    hold = threading.Event()
    ahead = [pool.submit(hold.wait, Priority.READING_AHEAD) for _ in range(3)]
    now = pool.submit(threading.get_ident)
    while not now.done:
        time.sleep(0.001)
    assert [future.begun for future in ahead] == [True, False, False]
    hold.set()
    for future in ahead:
        pool.result(future)


def test_others_work_while_a_task_waits_for_a_server(pool: Pool) -> None:
    answer, most = threading.Event(), threading.Semaphore(0)

    def ask() -> None:
        with waits_for_server():
            most.release()
            answer.wait()

    waiting = [pool.submit(ask) for _ in range(5)]
    for _ in range(5):
        assert most.acquire(timeout=20)  # all five wait at once
    for _ in range(2):  # while they wait, and with the threads that are left of it
        hold = threading.Event()
        working = [pool.submit(hold.wait) for _ in range(4)]
        while not all(future.begun for future in working[:2]):
            time.sleep(0.001)
        time.sleep(0.05)
        assert [future.begun for future in working] == [True, True, False, False]
        answer.set()
        hold.set()
        for future in (*waiting, *working):
            pool.result(future)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_goes_on_without_the_threads(pool: Pool) -> None:
    running = pool.submit(lambda: time.sleep(0.2) or "slept")
    while not running.begun:
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        right = pool.result(running) == "slept" and pool.result(pool.submit(lambda: 7)) == 7
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.result(pool.submit(lambda: 8)) == 8


def files(folder: Path) -> tp.Pipeline:
    table = pa.table({"input_ids": [[n, n + 1] * (n % 9) for n in range(4000)]})
    pq.write_table(table, folder / "a.parquet", row_group_size=150)
    read = tp.list_files(folder).read_parquet().sharding_filter(6).shuffle(300, seed=1)
    return read.batch(8).pad_collate()


def test_threads_go_with_a_run_that_is_broken_off(tmp_path: Path) -> None:
    pipe = files(tmp_path)
    assert none_left()
    for _ in range(3):
        for _ in islice(pipe, 3):
            pass
    assert none_left(but=2 * default_threads())
    del pipe
    assert none_left()


def called_in(pipe: tp.Pipeline, threads: int | None) -> set[int]:
    found: set[int] = set()

    def note(row: Any) -> Any:
        found.add(threading.get_ident())
        return row

    list(tp.Loader(pipe.map(note).batch(4), threads=threads))
    return found


def test_functions_are_called_by_the_thread_that_iterates_unless_another_is_asked_for() -> None:
    rows = tp.from_arrow(pa.table({"x": list(range(600))})).sharding_filter(4).shuffle(50)
    mine = threading.get_ident()
    assert called_in(rows, None) == {mine}
    assert called_in(rows, 0) == {mine}
    theirs = called_in(rows, 3)
    assert len(theirs) == 1
    assert mine not in theirs


def test_a_function_that_raises_stop_iteration_does_not_end_the_epoch() -> None:
    def end(row: Any) -> Any:
        raise StopIteration

    pipe = tp.from_arrow(pa.table({"x": [1, 2]})).map(end).batch(2)
    for threads in (0, 1):
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            list(tp.Loader(pipe, threads=threads))


ODD_THREADS = "Loader(threads) must be an integer of 0 or more (threads), got "
BOTH = (
    "Loader works in threads or in worker processes, got threads=2 and num_workers=1; leave one out"
)


@pytest.mark.parametrize(("options", "message"), [
    ({"threads": -1}, ODD_THREADS + "-1"),
    ({"threads": 1.5}, ODD_THREADS + "1.5"),
    ({"threads": True}, ODD_THREADS + "True"),
    ({"threads": 2, "num_workers": 1}, BOTH),
])  # fmt: skip
def test_numbers_of_threads_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(tp.ConfigError) as caught:
        tp.Loader(tp.from_iterable(lambda: range(3)), **options)
    assert str(caught.value) == message


def test_the_number_of_threads_is_that_of_the_cores_shared_by_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRAINPIPES_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert default_threads() == 8
    for name, value, threads in (
        ("LOCAL_WORLD_SIZE", "16", 4),
        ("LOCAL_WORLD_SIZE", "640", 1),
        ("TRAINPIPES_THREADS", "0", 0),
        ("TRAINPIPES_THREADS", " 3 ", 3),
        ("TRAINPIPES_THREADS", "", 1),  # as if it were not set
    ):
        monkeypatch.setenv(name, value)
        assert default_threads() == threads


@pytest.mark.parametrize("value", ["two", "-1", "1.5", "²", "0x2"])
def test_a_number_of_threads_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TRAINPIPES_THREADS", value)
    rows = tp.from_arrow(pa.table({"x": range(9)})).batch(3)
    said = rf"TRAINPIPES_THREADS must be an integer of 0 or more.*{re.escape(repr(value))}"
    with pytest.raises(tp.ConfigError, match=said):
        next(iter(rows))
    assert next(iter(tp.Loader(rows, threads=0)))  # nobody asks for it


def test_a_script_that_ends_in_mid_epoch_ends_well(tmp_path: Path) -> None:
    files(tmp_path)
    code = (
        "import sys, trainpipes as tp\n"
        "pipe = tp.list_files(sys.argv[1]).read_parquet().sharding_filter(6).shuffle(300)\n"
        "batches = iter(pipe.batch(8).pad_collate())\n"
        "next(batches)\n"
    )
    for _ in range(2):
        run = subprocess.run(
            [*python(), "-c", code, str(tmp_path)], capture_output=True, timeout=60, text=True
        )
        assert (run.returncode, run.stderr) == (0, "")


def test_tokenizers_are_told_how_many_threads_there_are_and_only_by_those_who_iterate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int] = []
    monkeypatch.setattr("trainpipes.stages.tokenizing.take_turns", told.append)
    rows = tp.from_arrow(pa.table({"text": ["a"] * 90})).tokenize("bytes").batch(4)
    loader = tp.Loader(rows, threads=2)
    batches = iter(loader)
    next(batches)
    assert told == [2]
    loader.state_dict()
    loader.peek()
    list(batches)
    loader.state_dict()  # that of the next epoch's start
    assert told == [2]  # peek() takes a batch beside the run, whose threads go on
    list(tp.Loader(rows, threads=0))
    assert told == [2, 0]


def test_a_pool_may_be_closed_by_another_thread_while_it_starts_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As the thread that starts does where it collects an iterator that was the pool's.
    closed: list[bool] = []

    class Thread(locks.LateThread):
        def start(self) -> None:
            closer = threading.Thread(target=pool.close, daemon=True)
            closer.start()
            closer.join(5)
            closed.append(not closer.is_alive())
            super().start()

    pool = Pool(1)
    monkeypatch.setattr(locks, "LateThread", Thread)
    pool.submit(int)
    while not closed:
        time.sleep(0.01)
    assert closed == [True]


def test_a_thread_of_a_pool_starts_once_where_two_threads_begin_tasks(
    monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    started: list[str] = []
    begun: list[object] = []
    helper = locks._thread.start_new_thread

    class Thread(locks.LateThread):
        def start(self) -> None:
            started.append(self.name)
            super().start()

    def start_new_thread(function: Any, arguments: Any) -> None:
        begun.append(function)
        if len(begun) == 1:  # another thread comes between
            pool._start()
        helper(function, arguments)

    with monkeypatch.context() as patched:
        patched.setattr(locks, "LateThread", Thread)
        patched.setattr(locks._thread, "start_new_thread", start_new_thread)
        assert pool.submit(int).result() == 0
        assert len(begun) == 2
    time.sleep(0.05)
    assert len(started) == 1


def test_tasks_in_a_row_begin_no_more_threads_than_the_pool_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Any] = []  # threads that start the pool's: these wait till the last task has come
    with monkeypatch.context() as patched:
        patched.setattr(locks._thread, "start_new_thread", lambda *call: begun.append(call))
        pool = Pool(2)
        tasks = [pool.submit(int) for _ in range(50)]
    assert len(begun) == 2
    for function, arguments in begun:
        function(*arguments)
    for task in tasks:
        locks.wait_for(task.finished)
    pool.join()


def test_a_pool_may_be_closed_while_a_thread_looks_for_a_task(monkeypatch):
    """As when garbage is collected then, and with it the iterator that the pool is of."""
    failed: list[Any] = []
    asked = threading.Event()
    monkeypatch.setattr(threading, "excepthook", failed.append)

    class Closed(Pool):
        def _next_task(self) -> Priority | None:
            found = super()._next_task()
            if found is not None:
                self.close()
                asked.set()
            return found

    pool = Closed(1)
    pool.submit(int)
    assert asked.wait(60)
    pool.join()
    assert not failed


def test_a_pool_may_be_closed_by_garbage_that_is_collected_while_a_child_forgets_its_threads(
    monkeypatch,
):
    pool = Pool(1)
    condition = threading.Condition

    def collecting(lock: Any) -> threading.Condition:
        pool.close()
        return condition(lock)

    monkeypatch.setattr(threading, "Condition", collecting)
    pool.forget()
    pool.close()
    assert not pool.is_alive


def test_tasks_that_come_one_after_the_other_each_get_a_thread() -> None:
    """A thread that was woken for the first one, and is not awake yet, is not there for the second."""
    for _ in range(50):
        pool = Pool(2)
        pool.submit(int).result(wait=True)
        time.sleep(0.002)  # its one thread is idle
        both = threading.Barrier(2)
        for future in [pool.submit(partial(both.wait, 5)) for _ in range(2)]:
            future.result(wait=True)
        pool.close()


def test_a_pool_works_where_there_can_be_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that starts another one does its work."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(locks.LateThread, "start", refused, raising=False)
    alone = Pool(1, shares=False)
    task = alone.submit(threading.get_ident)
    assert task.finished.wait(60)
    assert alone.result(task) != threading.get_ident()
    alone.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_functions_in_threads_may_fork_at_the_same_time(pool: Pool) -> None:
    inner, both = Pool(2, shares=False, within=True), threading.Barrier(2)

    def fork() -> int:
        both.wait(60)
        return subprocess.run(["true"], preexec_fn=os.setsid).returncode

    def wait_for_two() -> list[int]:
        return [inner.result(task) for task in [inner.submit(fork) for _ in range(2)]]

    begun = time.monotonic()
    for _ in range(2):
        assert pool.submit(wait_for_two).result(wait=True) == [0, 0]
    assert time.monotonic() - begun < pools.PATIENCE
    inner.join()


def test_the_end_waits_for_threads_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "PATIENCE", 1.5)
    busy, hold, begun = Pool(4), threading.Event(), threading.Semaphore(0)

    def work() -> None:
        begun.release()
        hold.wait(60)

    for _ in range(4):
        busy.submit(work)
    assert all(begun.acquire(timeout=60) for _ in range(4))
    before = time.monotonic()
    busy.join()
    hold.set()
    assert time.monotonic() - before < 4
