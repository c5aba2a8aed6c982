"""Tests that run in a process of their own fail where they would fail here."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from forked import in_child

PARENT = os.getpid()


def test_what_a_function_gives_is_given() -> None:
    assert in_child(lambda: os.getppid()) == os.getpid()


@pytest.mark.parametrize(("work", "said"), [
    (lambda: 1 // 0, "ZeroDivisionError: division by zero"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "the process died with -9"),
    (lambda: pytest.fail("no reason"), "no reason"),
])  # fmt: skip
def test_what_a_function_raises_or_dies_of_is_said(work: Callable[[], Any], said: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=said):
        in_child(work)


@pytest.mark.own_process
@pytest.mark.parametrize("number", [1, 2])
def test_a_test_with_the_mark_is_in_a_process_of_its_own(number: int, tmp_path: Any) -> None:
    assert tmp_path.is_dir()
    assert os.getppid() == PARENT
