"""Functions that run in a process of their own, forked from the one that tests."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

__all__ = ["Child", "as_stranger", "in_child", "strangers_folder"]


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


#: A user who is not this one, nor root.
STRANGER = 12_345


def as_stranger(work: Callable[[], Any]) -> Any:
    """What a function gives in a process of a user who may not read everything, as root may."""

    def run() -> Any:
        if os.geteuid() == 0:
            os.setuid(STRANGER)
        return work()

    return in_child(run)


@contextmanager
def strangers_folder() -> Iterator[Path]:
    """A folder of that user, with a folder ``closed``; who tests sets its mode."""
    with tempfile.TemporaryDirectory() as name:  # to which others may come, unlike to pytest's
        closed = Path(name, "closed")
        closed.mkdir()
        if os.geteuid() == 0:
            os.chown(name, STRANGER, STRANGER)
            os.chown(closed, STRANGER, STRANGER)
        try:
            yield Path(name)
        finally:
            closed.chmod(0o700)
