"""The targets of the suite, as ratios of medians taken in one run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.contestants import ENTRIES

__all__ = ["PEERS", "TARGETS", "Cell", "Cells", "Target", "median", "rates"]

#: Peers that read the same Parquet files as they are.
ON_PARQUET = ("blog", "blog-workers", "nodes", "hf", "hf-arrow", "grain", "spdl")
PEERS = tuple(name for name, entry in ENTRIES.items() if entry.group == "peer")

Cells = dict[str, Any]


def median(cells: Cells, job: str, entry: str, key: str) -> float | None:
    """Of the runs of a cell; None if it has none."""
    runs = cells.get(job, {}).get(entry, {}).get("runs", [])
    held = [run[key] for run in runs if isinstance(run.get(key), int | float)]
    return statistics.median(held) if held else None


#: A figure of a contestant: job, entry, key of a result.
Cell = tuple[str, str, str]


@dataclass(frozen=True)
class Target:
    """One line of the table: a figure, or the ratio of two.

    Args:
        what: is compared.
        must, stretch: bounds.
        above: the figure; of several, the largest, once all are there.
        below: what it is divided by, the largest of those that are there; nothing if there are none.
        most: whether the bounds are upper ones.
        percent: how they are printed.
        where: it is promised; for targets, that is here.
    """

    what: str
    must: float
    stretch: float | None
    above: tuple[Cell, ...]
    below: tuple[Cell, ...] = ()
    most: bool = False
    percent: bool = False
    where: str = "benchmarks/targets.py"

    def ratio(self, cells: Cells) -> float | None:
        """From the cells; None if they have no runs."""
        top = [median(cells, *cell) for cell in self.above]
        found = [value for value in top if value is not None]
        if len(found) < len(top):
            return None
        if not self.below:
            return max(found)
        others = [value for cell in self.below if (value := median(cells, *cell))]
        return max(found) / max(others) if others else None

    def reaches(self, found: float, bound: float) -> bool:
        return found <= bound if self.most else found >= bound

    def verdict(self, found: float | None) -> str:
        if found is None:
            return "not measured"
        for bound, word in ((self.stretch, "met, stretch too"), (self.must, "met")):
            if bound is not None and self.reaches(found, bound):
                return word
        return "missed"

    def shown(self, value: float | None) -> str:
        if value is None:
            return ""
        return f"{value:.1%}" if self.percent else f"{value:.2f}"


def rates(job: str, *entries: str) -> tuple[Cell, ...]:
    return tuple((job, entry, "rate") for entry in entries)


IDS, TEXT = rates("pretokenised", "ours"), rates("text", "ours")

TARGETS = (
    Target(
        "pretokenised, against the fastest of row buffer, nodes, HF, Grain",
        15, 25, IDS, rates("pretokenised", *ON_PARQUET),
    ),
    Target(
        "pretokenised, against the fastest peer, those with formats of their own too",
        15, 25, IDS, rates("pretokenised", *PEERS),
    ),
    Target(
        "pretokenised, against the Parquet scan alone, 2 threads",
        0.30, 0.5, IDS, rates("pretokenised", "scan-two"),
    ),
    Target(
        "pretokenised with threads=0, against the scan alone, 1 thread",
        0.30, 0.5, rates("pretokenised", "ours-serial"), rates("pretokenised", "scan"),
    ),
    Target(
        "text with tokenizers, against that engine alone, ids read out",
        0.90, 0.95, rates("text", "ours-engine"), rates("text", "engine"),
    ),
    Target("text, against the fastest peer", 2.5, 6, TEXT, rates("text", *PEERS)),
    Target(
        "epoch 2 with .cache(), against the fastest peer's epoch",
        10, 20, (("epoch_two", "ours-cache", "two"),), rates("text", *PEERS),
    ),
    Target(
        "first batch after a resume, the slowest of three, s",
        0.35, 0.2, tuple(("resume", "ours", f"at {part}") for part in (0.1, 0.5, 0.9)), most=True,
    ),
    Target(
        "read before it with threads=0, of all bytes: windows of one span only",
        0.35, 0.2, (("resume", "ours-serial", "read"),), most=True,
    ),
    Target(
        "one shard against 24",
        0.7, 1, rates("one_shard", "ours-one"), rates("one_shard", "ours"),
    ),
    Target(
        "Loader(num_workers=2), against the row buffer with 2 workers, pretokenised",
        8, 20, rates("pretokenised", "ours-workers"), rates("pretokenised", "blog-workers"),
    ),
    Target(
        "time waiting, 0.5 ms a step, local files",
        0.03, 0.01, (("waiting", "ours-endless", "share"),), most=True, percent=True,
    ),
    Target(
        "time waiting, 0.5 ms a step, storage of 20 ms latency",
        0.03, 0.01, (("waiting_slow", "ours-endless", "share"),), most=True, percent=True,
    ),
)  # fmt: skip
