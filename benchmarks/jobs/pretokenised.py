"""Token ids that are in the files: shuffled, padded, in batches of 32."""

from __future__ import annotations

from typing import Any

from benchmarks.race import Make, race
from benchmarks.settings import Spec

TITLE = "Pretokenised: shuffle, batch, pad"
TEXT = SLOW = MANY = ONCE = MEMORY = False
ENTRIES = (
    "ours", "ours-serial", "ours-workers", "blog", "blog-workers", "nodes", "hf", "hf-arrow", "grain",
    "mosaic", "litdata", "lance", "spdl", "scan", "scan-two", "copy",
)  # fmt: skip
QUICK = ("ours", "ours-workers", "blog-workers", "nodes", "hf-arrow", "grain", "scan-two")
COLUMNS = (
    ("rate", "rows/s", ",.0f"),
    ("cpu", "processor time a row, us", ",.1f"),
    ("first", "first batch, fresh process, ms", "ms"),
)


def measure(make: Make, spec: Spec) -> dict[str, Any]:
    return race(make, spec, spec.settings.sizes.buffer)
