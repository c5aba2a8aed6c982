"""Batches by ``collate()``: Python rows against a plain ``DataLoader``, columns against ``pad_collate()``.

    python benchmarks/collating.py [--rows 64000] [--repeats 7]

Shuffled batches of 32 in this process, in turn, without threads; medians of the processor's time, so that
others at work on the machine don't count. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from torch.utils.data import DataLoader

import trainpipes as tp

BATCH, COLUMNS = 32, 16


def rows_of(count: int) -> dict[str, list[Any]]:
    """Lists of rows of several kinds."""
    return {
        "ints": list(range(count)),
        "tuples": [(n, n * 0.5) for n in range(count)],
        "dicts": [{"x": n, "y": n * 0.5, "z": n % 3} for n in range(count)],
    }


def micros_of(rows: int, repeats: int) -> dict[str, float]:
    """Microseconds of the processor a row, medians."""
    contestants: dict[str, Iterable[Any]] = {}
    for kind, data in rows_of(rows).items():
        plain: Any = DataLoader(data, batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
        contestants[f"{kind}, DataLoader"] = plain
        shuffled = tp.from_dataset(data).shuffle(scope="global")
        contestants[f"{kind}, collate"] = tp.Loader(shuffled.batch(BATCH).collate(), threads=0)
    generator = np.random.default_rng(0)
    columns = {f"column {n}": generator.random(rows, np.float32) for n in range(COLUMNS)}
    cut = tp.from_arrow(pa.table(columns)).shuffle(40_960).batch(BATCH)
    contestants["columns, collate"] = tp.Loader(cut.collate(), threads=0)
    contestants["columns, pad_collate"] = tp.Loader(cut.pad_collate(), threads=0)
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(repeats + 1):
        for name, batches in contestants.items():
            took = seconds(batches)
            if number:
                found[name].append(took * 1e6 / rows)
    return {name: statistics.median(times) for name, times in found.items()}


def seconds(batches: Iterable[Any], clock: Callable[[], float] = time.process_time) -> float:
    start = clock()
    for _ in batches:
        pass
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64_000)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print("| | us a row |\n|---|---|")
    for name, took in micros_of(args.rows, args.repeats).items():
        print(f"| {name} | {took:.2f} |")


if __name__ == "__main__":
    main()
