"""The first batch from the start and after a resume, pretokenised: when it came, what was read for it, and
whether it went on exactly."""

from __future__ import annotations

import gc
import pickle
import re
import time
from pathlib import Path
from typing import Any

from benchmarks.contestants.contestant import Cannot
from benchmarks.digest import Tally
from benchmarks.race import Make
from benchmarks.settings import Spec

TITLE = "First batch from cold and after a resume, ms"
TEXT = SLOW = MANY = ONCE = MEMORY = False
ENTRIES = (
    "ours", "ours-serial", "ours-workers", "blog-stateful", "nodes", "hf", "hf-arrow", "grain", "mosaic",
    "litdata", "lance",
)  # fmt: skip
QUICK = ("ours", "ours-serial", "blog-stateful", "hf-arrow", "grain")
COLUMNS = (
    ("cold", "cold", "ms"),
    ("at 0.1", "at 10 %", "ms"),
    ("at 0.5", "at 50 %", "ms"),
    ("at 0.9", "at 90 %", "ms"),
    ("read", "most read before it, of all bytes", ".2f"),
    ("exact", "the batches that would have come", ""),
)


def measure(make: Make, spec: Spec) -> dict[str, Any]:
    if not spec.states.exists():
        raise Cannot("has not gone through an epoch")
    states, after = pickle.loads(spec.states.read_bytes())
    if not states:
        raise Cannot("has no state")
    # What comes first in a process pays for more: each in turn is first.
    starts: list[float | None] = [None, *sorted(states)]
    shift = spec.round % len(starts)
    found: dict[str, Any] = {}
    wrong, read = [], 0
    for part in starts[shift:] + starts[:shift]:
        state = None if part is None else pickle.loads(states[part])
        before, start = bytes_read(), time.perf_counter()
        contestant = make()
        if state is not None:
            contestant.load(state)
        batches = contestant.epoch()
        batch = next(batches)
        found["cold" if part is None else f"at {part}"] = time.perf_counter() - start
        if part is not None:
            read = max(read, bytes_read() - before)
        if part is not None and spec.round == 0:
            count, sequence = after[part]
            tally = Tally()
            tally.add(batch)
            while tally.batches < count and (batch := next(batches, None)) is not None:
                tally.add(batch)
            if (tally.batches, tally.sequence) != (count, sequence):
                wrong.append(f"{part:.0%}")
        size = sum(Path(file).stat().st_size for file in contestant.data.files)
        del batches, contestant
        gc.collect()
    found["read"] = read / size
    if spec.round == 0:
        found["right"] = float(not wrong)
        found["exact"] = f"no, at {', '.join(wrong)}" if wrong else "yes"
    return found


def bytes_read() -> int:
    """By this process so far, from files. Linux only; elsewhere 0."""
    counts = Path("/proc/self/io")
    found = re.search(r"rchar: (\d+)", counts.read_text()) if counts.exists() else None
    return int(found[1]) if found else 0
