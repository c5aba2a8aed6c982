"""Text, tokenized once and kept: the first epoch and those after it."""

from __future__ import annotations

import shutil
import time
from typing import Any

from benchmarks.race import Make, rows_of
from benchmarks.settings import Spec

TITLE = "Text with .cache(): the first epoch, and the next"
TEXT = True
SLOW = MANY = ONCE = MEMORY = False
ENTRIES = ("ours-cache",)
QUICK = ENTRIES
COLUMNS = (("one", "epoch 1, rows/s", ",.0f"), ("two", "epoch 2, rows/s", ",.0f"))


def measure(make: Make, spec: Spec) -> dict[str, Any]:
    contestant = make()
    shutil.rmtree(contestant.data.converted("cache"), ignore_errors=True)
    start = time.perf_counter()
    rows = sum(map(rows_of, contestant.epoch()))
    begun = time.perf_counter()
    later = 0
    while time.perf_counter() - begun < spec.settings.seconds:
        later += sum(map(rows_of, contestant.epoch()))
    end = time.perf_counter()
    return {"one": rows / (begun - start), "two": later / (end - begun)}
