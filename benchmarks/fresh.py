"""Work in a process of its own, in which nothing was read before; its processor time. Needs ``os.fork``."""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Opener", "begin", "medians"]

#: Opens something; what it gives reads all rows, and counts them.
Opener = Callable[[], Callable[[], int]]


def begin(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begin with something in a new process. What comes back waits for its result, of JSON types."""
    gc.collect()
    gc.freeze()  # else the child would copy what the parent holds, as soon as it looks for garbage
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            os.write(writer, json.dumps(work()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)

    def result() -> Any:
        with open(reader, "rb") as said:
            text = said.read()
        os.waitpid(child, 0)
        if not text:
            raise RuntimeError("the process failed")
        return json.loads(text)

    return result


def medians(
    ways: Mapping[str, Opener], rows: int, repeats: int, *, opening: bool = False
) -> dict[str, float]:
    """Median processor time of each way to read the same rows, each time in a fresh process, in turn.

    Args:
        ways: of each the reader.
        rows: that there are.
        repeats: how often each reads them.
        opening: whether what it costs to open is counted, too.
    """

    def read(opened: Opener) -> tuple[float, int]:
        begun = time.process_time()
        read = opened()
        begun = begun if opening else time.process_time()
        found = read()
        return time.process_time() - begun, found

    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, opened in ways.items():
            seconds, found = begin(lambda opened=opened: read(opened))()  # type: ignore[misc]
            if found != rows:
                raise RuntimeError(f"{name}: {found} rows of {rows}")
            took[name].append(seconds)
    return {name: statistics.median(values) for name, values in took.items()}
