"""Functions that run in a process of their own, forked from the one that tests."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

__all__ = ["Child", "run_in_child"]


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


def run_in_child(function: Callable[[], object]) -> str:
    """Run a function in a forked process; the traceback of what it raises, or how the process died."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # from Python 3.12 on: threads are here, which are not there
        pid = os.fork()
    if not pid:
        _end_with(function, writes)
    os.close(writes)
    try:
        with os.fdopen(reads, "rb") as said:
            text = said.read().decode()
    except BaseException:  # it took too long
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return text or (f"the process ended with {code}" if code else "")


def _end_with(function: Callable[[], object], writes: int) -> None:
    code = 1
    try:
        faulthandler.enable()
        torch.set_num_threads(1)  # those of before the fork are gone
        function()
        code = 0
    except BaseException:
        with os.fdopen(writes, "wb") as says:
            says.write(traceback.format_exc().encode("utf-8", "replace"))
    finally:
        os._exit(code)
