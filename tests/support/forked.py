"""Functions that run in a process of their own, forked from the one that tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

__all__ = ["Child"]


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
