"""The lock of processes that share a pipeline's count of passes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from forked import Child, in_child
from trainpipes._internal.locks import ForkLock, ProcessLock


@pytest.mark.parametrize("without_memory", [False, True])
def test_a_process_waits_until_the_one_that_holds_it_ends(
    without_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_memory:  # as where a system has no files of memory
        monkeypatch.delattr(os, "memfd_create", raising=False)
    lock = ProcessLock()
    lock.share()

    def hold(say: Callable[[Any], None]) -> None:
        with lock:
            say("held")
            signal.pause()  # until it is killed

    def take(say: Callable[[Any], None]) -> None:
        say("begun")
        with lock:
            say(time.monotonic())

    with Child(hold) as first:
        assert first.hear() == "held"
        second = Child(take)
        assert second.hear() == "begun"
        time.sleep(0.1)
        killed = time.monotonic()
    with second:
        assert second.hear() > killed
    with lock:
        pass


def test_it_keeps_threads_apart_where_all_files_were_closed() -> None:
    lock = ProcessLock()
    lock.share()
    os.close(lock._file)
    with lock:
        assert lock._is_owned()
    assert not lock._is_owned()


def test_what_a_thread_holds_is_free_in_a_forked_child() -> None:
    lock, held, over = ForkLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    try:
        assert not lock.acquire(blocking=False)
        assert in_child(lambda: lock.acquire(blocking=False))
    finally:
        over.set()
        thread.join()
