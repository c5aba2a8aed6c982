"""Text: shuffled, tokenized, padded, in batches of 32."""

from __future__ import annotations

from typing import Any

from benchmarks.race import Make, race
from benchmarks.settings import Spec

TITLE = "Text: shuffle, tokenize, batch, pad"
TEXT = True
SLOW = MANY = ONCE = MEMORY = False
ENTRIES = (
    "ours", "ours-engine", "ours-workers", "blog", "blog-workers", "nodes", "hf", "hf-arrow",
    "grain", "mosaic", "litdata", "lance", "spdl", "engine",
)  # fmt: skip
QUICK = ("ours", "ours-engine", "nodes", "hf-arrow", "engine")
COLUMNS = (
    ("rate", "rows/s", ",.0f"),
    ("cpu", "processor time a row, us", ",.1f"),
    ("first", "first batch, fresh process, ms", "ms"),
)
#: Rows after which the clock may stop. Text is read fast and tokenized when it is due: no bursts but
#: those of a ``map`` over 1,000 rows.
EVERY = 4_000
#: Rows before the clock starts: tokenizers keep the words that they have met, and are slow at first.
WARM = 8_000


def measure(make: Make, spec: Spec) -> dict[str, Any]:
    rows = spec.settings.sizes.text_rows
    return race(make, spec, min(EVERY, rows), min(WARM, rows // 6))
