"""Runs of many chains at once."""

from __future__ import annotations

import atexit
import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from frozen import adapter, data
from frozen.chains import read
from frozen.running import run

__all__ = ["Result", "run_all", "run_one", "small_data"]

#: Seconds that one chain may take.
MOST = 120


@dataclass(frozen=True)
class Result:
    """What a chain gave."""

    number: int
    digest: str
    kind: str
    said: str
    accident: bool = False


@contextmanager
def small_data() -> Iterator[Path]:
    """A folder with the files that the chains read."""
    with tempfile.TemporaryDirectory(prefix="frozen-", ignore_cleanup_errors=True) as folder:
        before = os.environ.get("TRAINPIPES_CACHE")
        os.environ["TRAINPIPES_CACHE"] = f"{folder}/cache"
        files = Path(folder) / "data"
        files.mkdir()
        data.make(files, adapter.write_memmap)
        try:
            yield files
        finally:
            if before is None:
                del os.environ["TRAINPIPES_CACHE"]
            else:
                os.environ["TRAINPIPES_CACHE"] = before


def run_one(number: int) -> Result:
    """Run one chain, where ``small_data`` is."""
    line = read().get(number)
    if line is None or adapter.words(line.chain) & adapter.GONE:
        return Result(number, "-" * 16, "gone", "of what the library has no more")
    found = run(line.chain, number)
    return Result(number, found.digest, found.kind, found.said, found.accident)


def _within_time(number: int) -> Result:
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(MOST)
    try:
        return run_one(number)
    except TimeoutError:
        return Result(number, "0" * 16, "hangs", f"more than {MOST} seconds")
    finally:
        signal.alarm(0)


def _too_long(*_: Any) -> None:
    raise TimeoutError


def _prepare() -> None:
    torch.set_num_threads(1)
    kept = small_data()
    kept.__enter__()
    atexit.register(kept.__exit__, None, None, None)


def _some(numbers: list[int]) -> list[Result]:
    return [_within_time(number) for number in numbers]


def run_all(numbers: list[int], jobs: int) -> Iterator[Result]:
    """Run chains in so many processes; results come as they are there."""
    size = max(1, min(20, len(numbers) // (4 * jobs)))
    parts = [numbers[first : first + size] for first in range(0, len(numbers), size)]
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _prepare)
    try:
        for done in as_completed([pool.submit(_some, part) for part in parts]):
            yield from done.result()
    finally:
        pool.shutdown(cancel_futures=True)
