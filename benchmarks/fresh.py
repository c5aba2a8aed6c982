"""Processor time of work in a process of its own, in which nothing was read before. Needs ``os.fork``."""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Mapping

__all__ = ["Opener", "medians", "seconds"]

#: Opens something; what it gives reads all rows, and counts them.
Opener = Callable[[], Callable[[], int]]


def seconds(opened: Opener, rows: int, *, opening: bool = False) -> float:
    """Processor time of reading all rows.

    Args:
        opened: opens what is read.
        rows: that there are.
        opening: whether that is counted, too.
    """
    gc.collect()
    gc.freeze()  # else the child would copy what the parent holds, as soon as it looks for garbage
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            begun = time.process_time()
            read = opened()
            begun = begun if opening else time.process_time()
            found = read()
            took = time.process_time() - begun
            os.write(writer, json.dumps([took, found]).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as said:
        text = said.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError("the reading process failed")
    took, found = json.loads(text)
    if found != rows:
        raise RuntimeError(f"{found} rows of {rows}")
    return float(took)


def medians(
    ways: Mapping[str, Opener], rows: int, repeats: int, *, opening: bool = False
) -> dict[str, float]:
    """Median seconds of each way to read the same rows, each time in a fresh process, in turn."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, opened in ways.items():
            took[name].append(seconds(opened, rows, opening=opening))
    return {name: statistics.median(values) for name, values in took.items()}
