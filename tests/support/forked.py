"""Functions that run in a process of their own, forked from the one that tests."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

import pytest
import torch

__all__ = ["Child", "in_child"]


class Child:
    """A process that runs a function, which it gives a way to say something. At the end it is killed."""

    def __init__(self, function: Callable[[Callable[[Any], None]], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._said, say = context.Pipe(duplex=False)
        self._process = context.Process(target=function, args=(say.send,))
        self._process.start()
        say.close()

    def hear(self) -> Any:
        assert self._said.poll(120)
        return self._said.recv()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def in_child(work: Callable[[], Any]) -> Any:
    """What a function gives in a process of its own, which may die of it."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def run() -> None:
        forkserver._forkserver.__init__()  # type: ignore[misc]  # what was started is no child of this one
        torch.set_num_threads(1)  # the others stayed behind
        try:
            send.send((True, work()))
        except BaseException:
            send.send((False, traceback.format_exc()))

    process = context.Process(target=run)
    process.start()
    send.close()
    try:
        good, found = receive.recv()
        process.join(30)
    except EOFError:
        process.join(30)
        pytest.fail(f"the process died with {process.exitcode}", pytrace=False)
    finally:
        process.kill()  # where the test is stopped, or the process hangs at its end
        process.join()
    if not good:
        pytest.fail(found, pytrace=False)
    assert process.exitcode == 0
    return found
