"""Row numbers a second: random orders by position against whole lists, and weighted draws.

    python benchmarks/samplers.py [--rows 10000000] [--repeats 5]

All in this process, in turn; medians. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trainpipes.samplers import RandomSampler, WeightedRandomSampler

#: As many at a time as a pipeline asks for.
WINDOW = 1 << 16


def windows(sampler: Any, count: int, rows: int, first: int = 0) -> Callable[[], None]:
    def run() -> None:
        for start in range(first, first + count, WINDOW):
            sampler.index(0, start, min(start + WINDOW, first + count), rows)

    return run


def rates_of(rows: int, repeats: int) -> dict[str, float]:
    """Row numbers a second of each, medians."""
    weights = np.random.default_rng(0).random(1_000_000)
    generator = np.random.default_rng(0)
    contestants: dict[str, Callable[[], Any]] = {
        "RandomSampler": windows(RandomSampler(), rows, rows),
        "RandomSampler, in the midst of 10^9 rows": windows(
            RandomSampler(), rows, 10**9, 5 * 10**8
        ),
        "RandomSampler with replacement": windows(
            RandomSampler(replacement=True, num_samples=rows), rows, rows
        ),
        "WeightedRandomSampler, 10^6 weights": windows(
            WeightedRandomSampler(weights, rows), rows, len(weights)
        ),
        "numpy permutation, at once": lambda: generator.permutation(rows),
        "torch.randperm, at once": lambda: torch.randperm(rows),
    }
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            found[name].append(rows / (time.perf_counter() - start))
    return {name: statistics.median(rates) for name, rates in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print("| | million indices/s | memory |\n|---|---|---|")
    for name, rate in rates_of(args.rows, args.repeats).items():
        rows = args.rows if "at once" in name else WINDOW
        print(f"| {name} | {rate / 1e6:.1f} | {rows * 8 / 1e6:,.1f} MB |")


if __name__ == "__main__":
    main()
