"""A progress bar for long jobs, by tqdm.

Without a terminal or a notebook, or without tqdm, the logger ``trainpipes`` gets a line every 10 seconds at
level INFO. Only rank 0 shows anything. ``TQDM_DISABLE=1`` turns the bars off.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any, TypeVar

import torch.distributed as dist
from torch.utils.data import get_worker_info

from trainpipes._internal.locks import InterruptibleLock
from trainpipes.errors import amount

T = TypeVar("T")

log = logging.getLogger("trainpipes")

#: Seconds after which a job counts as long.
PATIENCE = 1.0
#: Seconds between drawings of a bar, and between lines of the log.
EVERY_DRAWN = 0.2
EVERY_LOGGED = 10.0


class Progress:
    """Counts how much of a job is done. Threads may share it.

    >>> with Progress("reading footers", total=3, unit="files") as progress:
    ...     for _ in range(3):
    ...         progress.advance()
    """

    def __init__(self, job: str, total: int | None, unit: str) -> None:
        self._job, self._total, self._unit = job, total or None, unit
        # Ctrl-C may come as the thread that draws has just taken its lock, which it takes again to end.
        self._counting, self._drawing = threading.Lock(), InterruptibleLock()
        self._bar: Any = None
        self._done = self._before = 0
        self._next = time.monotonic() + PATIENCE

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        with self._drawing:
            self._next = math.inf
            if self._bar is not None:
                self._bar.close()

    def advance(self, count: int = 1) -> None:
        """``count`` more are done."""
        with self._counting:
            self._done += count
        if time.monotonic() >= self._next and self._drawing.acquire(blocking=False):
            try:
                self._draw()
            finally:
                self._drawing.release()

    def skip(self, count: int) -> None:
        """``count`` were done before: they do not count for the rate."""
        self._done += count
        self._before += count

    def _draw(self) -> None:
        if self._next == math.inf or not _may_show():
            self._next = math.inf
        elif _has_bar():
            if self._bar is None:
                self._bar = _new_bar(self._job, self._total, self._unit, self._before)
            self._bar.update(self._done - self._bar.n)
            self._next = time.monotonic() + EVERY_DRAWN
        else:
            log.info(self._line())
            self._next = time.monotonic() + EVERY_LOGGED

    def _line(self) -> str:
        of_bytes = self._unit == "bytes"
        done, total = (amount(n) if of_bytes else f"{n:,}" for n in (self._done, self._total or 0))
        unit = "" if of_bytes else f" {self._unit}"
        if self._total is None:
            return f"{self._job}: {done}{unit}"
        return f"{self._job}: {self._done / self._total:.0%}, {done} of {total}{unit}"


def counted(items: Iterable[T], job: str, total: int | None, unit: str) -> Iterator[T]:
    """The items, with a progress bar."""
    with Progress(job, total, unit) as progress:
        for item in items:
            yield item
            progress.advance()


def _may_show() -> bool:
    started = dist.is_available() and dist.is_initialized()
    if (dist.get_rank() if started else os.environ.get("RANK", "0")) not in (0, "0"):
        return False
    if get_worker_info() is not None or multiprocessing.current_process().daemon:
        return False
    # mp.spawn starts ranks as child processes.
    return started or "RANK" in os.environ or multiprocessing.parent_process() is None


def _has_bar() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    in_notebook = getattr(shell, "kernel", None) is not None
    return (in_notebook or sys.stderr.isatty()) and find_spec("tqdm") is not None


def _new_bar(job: str, total: int | None, unit: str, initial: int) -> Any:
    with warnings.catch_warnings():  # that a notebook lacks ipywidgets: a line of text does as well
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm

    bar = type("Bar", (tqdm,), {"monitor_interval": 0})  # without a thread of its own
    is_bytes = unit == "bytes"
    return bar(
        desc=job, total=total, initial=initial, unit="B" if is_bytes else f" {unit}",
        unit_scale=is_bytes, dynamic_ncols=True, leave=False, mininterval=0,
    )  # fmt: skip
