"""One long epoch, pretokenised, stretch by stretch: rows a second, and memory beside what was told."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.contestants.contestant import Cannot, Contestant
from benchmarks.race import Make, rows_of
from benchmarks.settings import Spec

TITLE = "A long epoch, pretokenised: is it a steady stream"
MANY = True
TEXT = SLOW = ONCE = MEMORY = False
ENTRIES = ("ours", "ours-serial", "scan-two")
QUICK = ENTRIES
#: Ranks in one process; seconds of their trainer's step.
RANKS, STEP = 8, 0.002
COLUMNS = (
    ("rate", "rows/s", ",.0f"),
    ("cpu", "processor time a row, us", ".2f"),
    ("first", "first stretch / median", ".2f"),
    ("slowest", "slowest later one / median", ".2f"),
    ("held", "peak memory above imports, MB", "MB"),
    ("of told", "the same / what explain() says", ".2f"),
    ("slowest rank", f"{RANKS} ranks: steps that wait for the slowest / the mean one", ".2f"),
    ("once", "its files once, rows/s", ",.0f"),
    ("stretches", "1,000 rows/s, sixteenth by sixteenth", ""),
)
#: Equal parts of an epoch.
STRETCHES = 16


def measure(make: Make, _: Spec) -> dict[str, Any]:
    """An epoch of all files, then one of a part of them, which the shuffle mixes as a whole."""
    contestant = make()
    told, before = contestant.told(), resident("VmRSS")
    began, worked = time.perf_counter(), time.process_time()
    rates = list(stretches(contestant))
    took, worked = time.perf_counter() - began, time.process_time() - worked
    held = resident("VmHWM") - before
    rows, usual = contestant.data.made["rows"], statistics.median(rates)
    found = {
        "rate": rows / took,
        "cpu": worked / rows * 1e6,
        "first": rates[0] / usual,
        "slowest": min(rates[1:]) / usual,
        "held": held,
        "stretches": " ".join(f"{rate / 1e3:.0f}" for rate in rates),
        "once": once(type(contestant)(replace(contestant.data, many=False))),
    }
    del contestant
    found["slowest rank"] = slowest_rank(make())
    return found | {"of told": "" if told is None else held / told}


def slowest_rank(contestant: Contestant) -> float | str:
    """How long steps take that wait for the slowest of all ranks, over what the mean rank takes."""
    try:
        ranks = contestant.ranks(RANKS)
    except Cannot as reason:
        return str(reason)
    slowest = mean = 0.0
    while True:
        waits = []
        for batches in ranks:
            asked = time.perf_counter()
            batch = next(batches, None)
            waits.append(time.perf_counter() - asked)
            if batch is None:
                return slowest / mean
        slowest += STEP + max(waits)
        mean += STEP + statistics.mean(waits)
        time.sleep(STEP)


def stretches(contestant: Contestant) -> Iterator[float]:
    """Rows a second of each part of an epoch."""
    part = contestant.data.made["rows"] / STRETCHES
    rows, counted, last = 0, 0, time.perf_counter()
    for batch in contestant.epoch():
        rows += rows_of(batch)
        if rows - counted >= part:
            now = time.perf_counter()
            yield (rows - counted) / (now - last)
            counted, last = rows, now


def once(contestant: Contestant) -> float:
    began = time.perf_counter()
    rows = sum(map(rows_of, contestant.epoch()))
    return rows / (time.perf_counter() - began)


def resident(what: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most. Linux only; elsewhere 0."""
    status = Path("/proc/self/status")
    found = re.search(rf"{what}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else 0
