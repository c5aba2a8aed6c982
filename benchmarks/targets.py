"""The targets, as ratios of medians taken in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.contestants import ENTRIES

__all__ = ["TARGETS", "Target", "median"]

#: Peers that read the same Parquet files as they are.
ON_PARQUET = ("blog", "blog-workers", "nodes", "hf", "hf-arrow", "grain", "spdl")
PEERS = tuple(name for name, entry in ENTRIES.items() if entry.group == "peer")

Cells = dict[str, Any]


def median(cells: Cells, job: str, entry: str, key: str) -> float | None:
    """Of the runs of a cell; None if it has none."""
    runs = cells.get(job, {}).get(entry, {}).get("runs", [])
    held = [run[key] for run in runs if isinstance(run.get(key), int | float)]
    return statistics.median(held) if held else None


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Args:
        what: is compared.
        must, stretch: bounds.
        ratio: from the cells; None if they have no runs.
        most: whether the bounds are upper ones.
        percent: how they are printed.
    """

    what: str
    must: float
    stretch: float
    ratio: Callable[[Cells], float | None]
    most: bool = False
    percent: bool = False

    def verdict(self, found: float | None) -> str:
        if found is None:
            return "not measured"
        for bound, word in ((self.stretch, "met, stretch too"), (self.must, "met")):
            if found <= bound if self.most else found >= bound:
                return word
        return "missed"

    def shown(self, value: float | None) -> str:
        if value is None:
            return ""
        return f"{value:.1%}" if self.percent else f"{value:.2f}"


def over(
    above: tuple[str, str, str], *below: tuple[str, str, str]
) -> Callable[[Cells], float | None]:
    """A cell over the largest of others, each (job, entry, key)."""

    def ratio(cells: Cells) -> float | None:
        top = median(cells, *above)
        held = [value for cell in below if (value := median(cells, *cell))]
        return top / max(held) if top and held else None

    return ratio


def rates(job: str, entries: Iterable[str]) -> list[tuple[str, str, str]]:
    return [(job, entry, "rate") for entry in entries]


def slowest_resume(cells: Cells) -> float | None:
    cold = median(cells, "resume", "ours", "cold")
    held = [median(cells, "resume", "ours", f"at {part}") for part in (0.1, 0.5, 0.9)]
    return max(value for value in held if value) / cold if cold and all(held) else None


def waiting(job: str) -> Callable[[Cells], float | None]:
    return lambda cells: median(cells, job, "ours-endless", "share")


IDS, TEXT = ("pretokenised", "ours", "rate"), ("text", "ours", "rate")

TARGETS = (
    Target(
        "pretokenised, against the fastest of row buffer, nodes, HF, Grain",
        15, 25, over(IDS, *rates("pretokenised", ON_PARQUET)),
    ),
    Target(
        "pretokenised, against the fastest peer, those with formats of their own too",
        15, 25, over(IDS, *rates("pretokenised", PEERS)),
    ),
    Target(
        "pretokenised, against the Parquet scan alone, 2 threads",
        0.30, 0.5, over(IDS, ("pretokenised", "scan-two", "rate")),
    ),
    Target(
        "pretokenised with threads=0, against the scan alone, 1 thread",
        0.30, 0.5, over(("pretokenised", "ours-serial", "rate"), ("pretokenised", "scan", "rate")),
    ),
    Target(
        "text with tokenizers, against that engine alone, ids read out",
        0.90, 0.95, over(("text", "ours-engine", "rate"), ("text", "engine", "rate")),
    ),
    Target("text, against the fastest peer", 2.5, 6, over(TEXT, *rates("text", PEERS))),
    Target(
        "epoch 2 with .cache(), against the fastest peer's epoch",
        10, 20, over(("epoch_two", "ours-cache", "two"), *rates("text", PEERS)),
    ),
    Target(
        "first batch after a resume, the slowest of three, against cold",
        1.5, 1.2, slowest_resume, most=True,
    ),
    Target(
        "one shard against 24",
        0.7, 1, over(("one_shard", "ours-one", "rate"), ("one_shard", "ours", "rate")),
    ),
    Target(
        "Loader(num_workers=2), against the row buffer with 2 workers, pretokenised",
        8, 20, over(("pretokenised", "ours-workers", "rate"), ("pretokenised", "blog-workers", "rate")),
    ),
    Target(
        "time waiting, 0.5 ms a step, local files", 0.03, 0.01, waiting("waiting"), most=True, percent=True
    ),
    Target(
        "time waiting, 0.5 ms a step, storage of 20 ms latency",
        0.03, 0.01, waiting("waiting_slow"), most=True, percent=True,
    ),
)  # fmt: skip
