"""Tests that run in a process of their own fail where they would fail here."""

from __future__ import annotations

import os
import signal

from forked import run_in_child


def test_what_a_function_raises_is_said() -> None:
    assert run_in_child(lambda: None) == ""
    assert "ZeroDivisionError: division by zero" in run_in_child(lambda: 1 // 0)


def test_how_a_process_died_is_said() -> None:
    assert run_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL)) == "the process ended with -9"
