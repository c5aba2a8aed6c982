"""A trainer that takes 0.5 ms a step: how much of the run it waits for data, pretokenised."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.race import Make, epochs
from benchmarks.settings import Spec

TITLE = "A trainer of 0.5 ms a step: time waiting, local files"
TEXT = SLOW = MANY = ONCE = MEMORY = False
ENTRIES = ("ours", "ours-endless", "ours-workers", "blog-workers")
QUICK = ("ours", "ours-endless", "blog-workers")
COLUMNS = (
    ("share", "waiting, of the run", ".2%"),
    ("steps", "steps", ",.0f"),
    ("longest", "longest wait, ms", "ms"),
)
STEP = 0.0005
#: Seconds after which a trainer that mostly waits is stopped.
MOST = 10.0


def measure(make: Make, spec: Spec) -> dict[str, Any]:
    """Steps sleep, as a trainer's Python does while its accelerator works. Epochs follow each other; the
    first batch of all is left out, those of later epochs are not. A wait ends when the batch is there: to
    let go of the one before is the trainer's own work."""
    batches = epochs(make())
    batch = next(batches)
    waited = longest = 0.0
    start = now = time.perf_counter()
    steps = 0
    while steps < spec.settings.steps:
        del batch
        time.sleep(STEP)
        asked = time.perf_counter()
        batch = next(batches, None)
        now = time.perf_counter()
        if batch is None:
            break
        steps += 1
        waited += now - asked
        longest = max(longest, now - asked)
        if now - start > MOST + STEP * spec.settings.steps:
            break
    return {"share": waited / (now - start), "steps": steps, "longest": longest}
