"""Properties that are made once, asked for by several threads."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from trainpipes._internal import locks
from trainpipes._internal.locks import cached_property


class Made:
    def __init__(self) -> None:
        self.a, self.b = 1, 2

    @cached_property
    def first(self) -> object:
        return object()

    @cached_property
    def second(self) -> object:
        return object()


def test_all_threads_get_the_same_one() -> None:
    for _ in range(300):
        made, ready = Made(), threading.Barrier(4)

        def ask(name: str, made: Made = made, ready: threading.Barrier = ready) -> Any:
            ready.wait()
            return getattr(made, name)

        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(ask, ("first", "second") * 2))
        assert answers[0] is answers[2] is made.first
        assert answers[1] is answers[3] is made.second


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collects no garbage while it makes a dict")
def test_one_thread_at_a_time_asks_for_the_dict_of_attributes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking: list[int] = []
    most: list[int] = []

    def slow(one: Any) -> dict[str, Any]:
        asking.append(1)
        most.append(len(asking))
        time.sleep(0.002)  # as where garbage collection runs Python code
        asking.pop()
        return vars(one)

    monkeypatch.setattr(locks, "vars", slow, raising=False)
    made = [Made() for _ in range(20)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda one: (one.first, one.second), made * 2))
    assert len(most) >= 40
    assert set(most) == {1}


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="has no lock")
def test_a_thread_that_holds_it_too_long_does_not_stop_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locks, "_PATIENCE", 0.01)
    done = threading.Event()
    ready = threading.Event()

    def hold() -> None:
        with locks._making_dicts:
            ready.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert ready.wait(60)
        assert Made().first is not None
    finally:
        done.set()
        holder.join()
