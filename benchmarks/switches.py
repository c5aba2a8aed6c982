"""What each mechanism of speed buys: the same work with it, and with it switched off.

    python -m benchmarks.switches [NAME ...] [--rows 200000] [--repeats 3]

Every run is a process of its own; with and without take turns. Prints a Markdown table of medians. What
buys less than 5 % does not stay; joining as windows are decoded stays for the memory that it saves; lengths
and a profile are there for what they say.
"""

from __future__ import annotations

import argparse
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

__all__ = ["SWITCHES", "main"]

#: Seconds that a trainer is at work between two batches, and its batches.
STEP, STEPS = 0.5e-3, 4000


def pipeline(folder: str) -> Any:
    import trainpipes as tp

    files = tp.list_files(f"{folder}/*.parquet").read_parquet()
    return files.sharding_filter(24).shuffle(40_960, seed=0).batch(32).pad_collate()


# What is measured: seconds, so that less is better


def epochs(folder: str, threads: int | None = None, workers: int = 0) -> float:
    """Three epochs, without the first: memory is grown in that."""
    import trainpipes as tp

    loader = tp.Loader(pipeline(folder), threads=threads, num_workers=workers)
    sum(1 for _ in loader)
    # In one thread, what else the machine does need not count.
    clock = time.process_time if threads == 0 else time.perf_counter
    start = clock()
    for _ in range(3):
        sum(1 for _ in loader)
    return clock() - start


def serial(folder: str) -> float:
    return epochs(folder, threads=0)


def balanced(folder: str) -> float:
    """Three epochs of even steps, after one. CPU time."""
    import trainpipes as tp

    files = tp.list_files(f"{folder}/*.parquet").read_parquet()
    batches = files.sharding_filter(24).shuffle(40_960, seed=0).batch(32).balance()
    loader = tp.Loader(batches.pad_collate(), threads=0)
    sum(1 for _ in loader)
    start = time.process_time()
    for _ in range(3):
        sum(1 for _ in loader)
    return time.process_time() - start


def profiled(folder: str, threads: int | None = 0) -> float:
    """Three epochs under a profile. CPU time of the process, its sampling thread included."""
    import trainpipes as tp

    loader = tp.Loader(pipeline(folder), threads=threads)
    sum(1 for _ in loader)
    with tp.profile(loader):
        start = time.process_time()
        for _ in range(3):
            sum(1 for _ in loader)
        return time.process_time() - start


def profiled_threads(folder: str) -> float:
    return profiled(folder, None)


def first_epoch(folder: str) -> float:
    import trainpipes as tp

    start = time.perf_counter()
    sum(1 for _ in tp.Loader(pipeline(folder)))
    return time.perf_counter() - start


def first_batch(folder: str) -> float:
    import trainpipes as tp

    start = time.perf_counter()
    next(iter(tp.Loader(pipeline(folder))))
    return time.perf_counter() - start


def waiting(folder: str) -> float:
    """What a trainer waits that is at work for 0.5 ms a step."""
    import trainpipes as tp

    items = iter(tp.Loader(pipeline(folder).repeat()))
    next(items)
    waited = 0.0
    for _ in range(STEPS):
        time.sleep(STEP)
        start = time.perf_counter()
        next(items)
        waited += time.perf_counter() - start
    return waited


# How a mechanism is switched off


def no_joining() -> None:
    """Arrow joins the pieces of a window when all are decoded."""
    from trainpipes.columns import payload

    payload.LARGE = 1 << 62


def no_late_cutting() -> None:
    """Batches are made with their group."""
    from trainpipes.columns import tensor_rows

    tensor_rows.LATE_BYTES = -1


def no_making_ahead() -> None:
    """Batches are made when they are taken, whoever is at work in between."""
    from trainpipes.engine.shards import shard_items

    shard_items.AT_WORK = float("inf")


def no_reading_ahead() -> None:
    """A window is read when its first row is asked for."""
    from trainpipes.engine.planning import layouts

    layouts.HELD_BYTES, layouts.HELD_SHARE = 0, 0.0


def no_memory_of_tables() -> None:
    """Columns are looked at anew for each group."""
    from trainpipes.stages.pad_collate import PadCollate

    PadCollate._by_table = property(lambda _: {})  # type: ignore[assignment]


def no_lengths() -> None:
    """Batches are ordered without a look at their rows."""
    from trainpipes.stages.order import Balance

    Balance._costs = lambda _, run: np.zeros(len(run), np.int64)  # type: ignore[method-assign]


def no_profile() -> None:
    """Nothing watches the run."""
    from contextlib import nullcontext

    import trainpipes as tp

    tp.profile = nullcontext  # type: ignore[assignment]


#: By name: what is switched off, and what is measured.
SWITCHES: dict[str, tuple[Callable[[], None], Callable[[str], float]]] = {
    "windows joined as they are decoded": (no_joining, serial),
    "the same, two threads": (no_joining, epochs),
    "batches cut when they are taken": (no_late_cutting, serial),
    "the same, two threads ": (no_late_cutting, epochs),
    "columns of a window looked at once": (no_memory_of_tables, serial),
    "windows read ahead: first epoch": (no_reading_ahead, first_epoch),
    "windows read ahead: what a trainer waits": (no_reading_ahead, waiting),
    "batches made ahead: what a trainer waits": (no_making_ahead, waiting),
    "lengths for balance(), which are to cost less than 3 %": (no_lengths, balanced),
    "a profile, which is to cost less than 3 %": (no_profile, profiled),
    "the same, two threads  ": (no_profile, profiled_threads),
}


def write(folder: Path, rows: int) -> None:
    """Token ids, 20 to 288 a row, in 8 files of 5 row groups."""
    rng = np.random.default_rng(0)
    for number in range(8):
        lengths = rng.integers(20, 289, rows // 8)
        values = pa.array(rng.integers(0, 16_384, lengths.sum()).astype(np.int32))
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, values)})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=rows // 40)


def run(name: str, on: bool, folder: str) -> float:
    command = [sys.executable, "-m", "benchmarks.switches", "--one", name, "--data", folder]
    done = subprocess.run(
        [*command, *([] if on else ["--off"])], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="switches; all if left out")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("--off", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        switch, measure = SWITCHES[given.one]
        if given.off:
            switch()
        print(measure(given.data))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), given.rows)
        print("| mechanism | with, s | without, s | without / with |\n|---|---|---|---|")
        for name in given.names or SWITCHES:
            runs = [
                (run(name, True, folder), run(name, False, folder)) for _ in range(given.repeats)
            ]
            on, off = (statistics.median(column) for column in zip(*runs, strict=True))
            print(f"| {name} | {on:.3f} | {off:.3f} | {off / on:.2f} |", flush=True)


if __name__ == "__main__":
    main()
