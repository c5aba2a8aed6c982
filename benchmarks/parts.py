"""Where the time of a row goes: the same rows through a chain that grows, stage by stage.

    python -m benchmarks.parts [--rows 200000] [--repeats 3]

Rows of 154 token ids, so that padding is the same however they are batched. Every run is a process of its
own, and all take turns; what is timed comes after a first epoch, in which memory is grown. Prints a Markdown
table of medians: processor time in one thread, and time by the clock with threads as usual.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["CHAINS", "main"]

TOKENS = 154


def read(folder: str) -> Any:
    import trainpipes as tp

    return tp.list_files(f"{folder}/*.parquet").read_parquet()


#: What is measured, each with what it has besides the one before. None: Arrow alone decodes all row groups.
CHAINS: dict[str, Callable[[str], Any] | None] = {
    "row groups decoded by Arrow alone": None,
    "joined, as int64 ids and mask, 2,048 rows a batch": lambda folder: (
        read(folder).batch(2048).pad_collate()
    ),
    "shuffled in a buffer of 40,960": lambda folder: (
        read(folder).shuffle(40_960, seed=0).batch(2048).pad_collate()
    ),
    "32 rows a batch": lambda folder: read(folder).shuffle(40_960, seed=0).batch(32).pad_collate(),
    "dealt to 24 shards": lambda folder: (
        read(folder).sharding_filter(24).shuffle(40_960, seed=0).batch(32).pad_collate()
    ),
}


def write(folder: Path, rows: int) -> None:
    """Token ids in 8 files of 5 row groups."""
    rng = np.random.default_rng(0)
    for number in range(8):
        values = pa.array(rng.integers(0, 16_384, rows // 8 * TOKENS).astype(np.int32))
        offsets = pa.array(np.arange(0, len(values) + 1, TOKENS, dtype=np.int32))
        table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, values)})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=rows // 40)


def scan(folder: str, threads: int | None) -> None:
    if threads == 0:
        pa.set_cpu_count(1)
    for path in sorted(Path(folder).glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                file.read_row_group(group, use_threads=threads is None)


def measured(name: str, folder: str, threads: int | None) -> float:
    """Seconds of one epoch, of two: processor time in one thread, else by the clock."""
    make = CHAINS[name]
    if make is None:
        epoch = lambda: scan(folder, threads)  # noqa: E731
    else:
        import trainpipes as tp

        loader = tp.Loader(make(folder), threads=threads)
        epoch = lambda: [None for _ in loader]  # noqa: E731
    epoch()
    clock = time.perf_counter if threads is None else time.process_time
    start = clock()
    epoch()
    epoch()
    return (clock() - start) / 2


def run(name: str, serial: bool, folder: str) -> float:
    command = [sys.executable, "-m", "benchmarks.parts", "--one", name, "--data", folder]
    done = subprocess.run(
        [*command, *(["--serial"] if serial else [])], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("--serial", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.one is not None:
        print(measured(args.one, args.data, 0 if args.serial else None))
        return
    found: dict[tuple[str, bool], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.rows)
        rows = args.rows // 8 * 8
        for _ in range(args.repeats):
            for name in CHAINS:
                for serial in (True, False):
                    seconds = run(name, serial, folder)
                    found.setdefault((name, serial), []).append(seconds / rows * 1e6)
    threads = min(8, os.cpu_count() or 1)
    print(f"| | one thread, us a row | more | {threads} threads, us a row |\n|---|---|---|---|")
    before = 0.0
    for name in CHAINS:
        alone, several = (statistics.median(found[name, serial]) for serial in (True, False))
        print(f"| {name} | {alone:.2f} | {alone - before:+.2f} | {several:.2f} |", flush=True)
        before = alone


if __name__ == "__main__":
    main()
