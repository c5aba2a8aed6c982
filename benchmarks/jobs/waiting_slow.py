"""The same trainer, with files on storage that takes 20 ms to answer."""

from __future__ import annotations

from benchmarks.jobs.waiting import COLUMNS, measure

__all__ = ["COLUMNS", "measure"]

TITLE = "A trainer of 0.5 ms a step: time waiting, storage of 20 ms latency"
SLOW = True
TEXT = MANY = ONCE = MEMORY = False
ENTRIES = ("ours", "ours-endless", "blog-workers")
QUICK = ("ours", "ours-endless")
