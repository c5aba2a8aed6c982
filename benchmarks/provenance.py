"""What provenance costs: nothing where it is not asked for.

    python -m benchmarks.provenance [KIND ...] [--against CHECKOUT] [--rows 200000] [--repeats 5]

The same epochs with ``with_provenance=True``, without, and by another checkout of the library, such as a
worktree of a commit before it was there. Every run is a process of its own, and they take turns. Prints a
Markdown table of processor seconds: medians, and what each is of the first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.switches import write

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("counted", "rows", "filtered", "packed")
#: How each way is run: options of the loader.
WAYS: dict[str, dict[str, Any]] = {"before": {}, "off": {}, "on": {"with_provenance": True}}


def pipeline(kind: str, folder: str) -> Any:
    import pyarrow.compute as pc

    import trainpipes as tp

    files = tp.list_files(f"{folder}/*.parquet").read_parquet().sharding_filter(24)
    rows = files.shuffle(16_384, seed=0)
    if kind == "counted":
        return rows.batch(32).pad_collate()
    if kind == "rows":
        return rows.map(len, version="1")
    if kind == "filtered":
        return rows.filter(pc.list_value_length(pc.field("input_ids")) > 40).batch(32).pad_collate()
    return rows.pack(2048).batch(8).pad_collate()


def measured(kind: str, way: str, folder: str) -> float:
    """Processor seconds of two epochs in one thread, after a first one in which memory is grown."""
    import trainpipes as tp

    loader = tp.Loader(pipeline(kind, folder), threads=0, **WAYS[way])
    sum(1 for _ in loader)
    start = time.process_time()
    for _ in range(2):
        sum(1 for _ in loader)
    return time.process_time() - start


def run(kind: str, way: str, folder: str, checkout: Path) -> float:
    command = [sys.executable, __file__, "--one", kind, "--way", way, "--data", folder]
    path = os.pathsep.join([str(checkout / "pipes"), str(checkout / "recipes"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all if left out"
    )
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    for hidden in ("--one", "--way", "--data"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(measured(given.one, given.way, given.data))
        return
    ways = [way for way in WAYS if way != "before" or given.against]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), given.rows)
        print(f"| epochs of | {' | '.join(f'{way}, s' for way in ways)} |")
        print("|---" * (1 + len(ways)) + "|")
        for kind in given.kinds or KINDS:
            found: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(given.repeats):
                for way in ways if number % 2 else reversed(ways):
                    checkout = given.against.resolve() if way == "before" else ROOT
                    found[way].append(run(kind, way, folder, checkout))
            medians = {way: statistics.median(found[way]) for way in ways}
            cells = [f"{s:.3f} ({s / medians[ways[0]]:.3f})" for s in medians.values()]
            print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
