"""Rows of a Lance table in random order: a global shuffle against Lance's own ``take``.

    python -m benchmarks.tables [--rows 1000000] [--batches 200] [--repeats 5] [--batch-size 256 4096]

Makes a table of an int64, 16 float32 and a text in each row, in one fragment. Both read as many batches of
random rows, as Arrow tables: Lance by ``dataset.take`` of rows that are drawn before, trainpipes by
``read_lance(...).shuffle(scope="global")`` with the threads of a Loader. In turn in this process, after some
batches of each; medians. Needs pylance: pip install pylance. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import trainpipes as tp


def write(folder: Path, rows: int) -> str:
    """A table of this many rows: its path."""
    import lance

    draw = np.random.default_rng(0)
    floats = pa.array(draw.standard_normal(16 * rows, dtype=np.float32))
    table = pa.table({
        "id": np.arange(rows),
        "vector": pa.FixedSizeListArray.from_arrays(floats, 16),
        "text": [f"row {n} of a table" for n in range(rows)],
    })  # fmt: skip
    uri = str(folder / "rows.lance")
    lance.write_dataset(table, uri)
    return uri


def taken(uri: str, rows: int, size: int, seed: int) -> Iterator[pa.Table]:
    """Batches of random rows by Lance itself."""
    import lance

    order, dataset = np.random.default_rng(seed).permutation(rows), lance.dataset(uri)
    for start in range(0, rows, size):
        yield dataset.take(order[start : start + size].tolist())


def shuffled(uri: str, size: int) -> Iterator[pa.Table]:
    rows = tp.read_lance(uri).shuffle(scope="global", seed=0).repeat()
    return iter(tp.Loader(rows.batch(size).collate(format="arrow")))


def rates_of(rows: int, batches: int, repeats: int, size: int) -> dict[str, float]:
    """Rows a second of each, medians."""
    with tempfile.TemporaryDirectory() as name:
        uri = write(Path(name), rows)
        ours = shuffled(uri, size)
        ways: dict[str, Callable[[int], Any]] = {
            "take": lambda seed: taken(uri, rows, size, seed),
            "global shuffle": lambda _: ours,
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for repeat in range(repeats + 1):
            for way, begin in ways.items():
                found = begin(repeat)
                started = time.perf_counter()
                read = sum(map(len, islice(found, batches)))
                if repeat:
                    rates[way].append(read / (time.perf_counter() - started))
                del found
        return {way: statistics.median(each) for way, each in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[256, 4096])
    args = parser.parse_args()
    print("| rows in a batch | Lance's take, rows/s | global shuffle, rows/s | of take |")
    print("|---|---|---|---|")
    for size in args.batch_size:
        rates = rates_of(args.rows, args.batches, args.repeats, size)
        take, ours = rates["take"], rates["global shuffle"]
        print(f"| {size:,} | {take:,.0f} | {ours:,.0f} | {ours / take:.2f} |")


if __name__ == "__main__":
    main()
