"""Work that a thread shares with those who wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from trainpipes._internal.pool import SharedWork, in_parts, is_of_pool, shares_work

ITEMS = range(8)


def beside(shared: SharedWork, work: Callable[[], Any], helpers: int = 2) -> None:
    """Do something while others help."""
    over = threading.Event()
    threads = [
        threading.Thread(target=partial(shared.help, over.is_set), daemon=True)
        for _ in range(helpers)
    ]
    for thread in threads:
        thread.start()
    try:
        with shared.here():
            work()
    finally:
        over.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def test_alone_parts_are_done_in_turn() -> None:
    assert not shares_work()
    assert not is_of_pool()
    assert in_parts(str, ITEMS) == list(map(str, ITEMS))
    shared = SharedWork()
    with shared.here():
        assert shares_work()
        assert in_parts(str, ITEMS) == list(map(str, ITEMS))
        assert in_parts(str, []) == []
    assert not shares_work()


def test_those_who_wait_do_parts_and_results_keep_their_places() -> None:
    shared, both = SharedWork(), threading.Barrier(3, timeout=10)

    def work() -> None:
        for _ in range(20):
            doers: set[int] = set()

            def part(item: int, doers: set[int] = doers) -> str:
                if item < 3:
                    both.wait()  # three threads are at a part each
                doers.add(threading.get_ident())
                return str(item)

            assert in_parts(part, ITEMS) == list(map(str, ITEMS))
            assert len(doers) == 3

    beside(shared, work)


def test_the_first_error_is_raised_when_nobody_is_at_a_part() -> None:
    shared, running = SharedWork(), []
    both = threading.Barrier(2, timeout=10)

    def part(item: int) -> int:
        running.append(item)
        try:
            if item < 2:
                both.wait()
            if item in (1, 4):
                raise ValueError(str(item))
            return item
        finally:
            running.remove(item)

    def work() -> None:
        with pytest.raises(ValueError, match="1"):
            in_parts(part, ITEMS)
        assert not running

    beside(shared, work, helpers=1)


def test_who_is_interrupted_between_parts_waits_for_others_alone() -> None:
    shared, at_part, go_on = SharedWork(), threading.Event(), threading.Event()
    done: list[int] = []

    def part(item: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert at_part.wait(10)
            threading.Timer(0.05, go_on.set).start()
            raise KeyboardInterrupt
        at_part.set()
        assert go_on.wait(10)
        done.append(item)

    def work() -> None:
        with pytest.raises(KeyboardInterrupt):
            in_parts(part, range(2))
        assert len(done) == 1

    beside(shared, work, helpers=1)


def test_who_helps_where_nothing_is_to_be_done_takes_no_processor() -> None:
    shared, over, took = SharedWork(), threading.Event(), []

    def help_and_count() -> None:
        began = time.thread_time()
        shared.help(over.is_set)
        took.append(time.thread_time() - began)

    helper = threading.Thread(target=help_and_count)
    helper.start()
    time.sleep(0.3)
    over.set()
    helper.join(10)
    assert took[0] < 0.1
