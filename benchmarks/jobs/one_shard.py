"""Pretokenised, without ``sharding_filter``: one shard instead of 24."""

from __future__ import annotations

from typing import Any

from benchmarks.race import Make, race
from benchmarks.settings import Spec

TITLE = "One shard (sharding_filter left out) and 24"
TEXT = SLOW = MANY = ONCE = MEMORY = False
ENTRIES = ("ours", "ours-one")
QUICK = ENTRIES
COLUMNS = (
    ("rate", "rows/s", ",.0f"),
    ("cpu", "processor time a row, us", ",.1f"),
    ("first", "first batch, fresh process, ms", "ms"),
)


def measure(make: Make, spec: Spec) -> dict[str, Any]:
    return race(make, spec, spec.settings.sizes.buffer)
