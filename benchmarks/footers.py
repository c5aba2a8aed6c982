"""How long a pipeline over many files takes to start, with and without the index of their footers.

    python benchmarks/footers.py [--files 1000] [--repeats 5]

Makes small Parquet files, and opens a pipeline over them until it knows its rows: with footers that are read
(``index=False``), and with those of an index that is there (``index=PATH``). All in this process, in turn;
medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import trainpipes as tp

__all__ = ["start_times"]


def start_times(files: int, repeats: int) -> dict[str, float]:
    """Median seconds until the number of rows is known."""
    found: dict[str, list[float]] = {"footers": [], "index": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "data")
        folder.mkdir()
        table = pa.table({"input_ids": [[1, 2, 3]] * 8})
        for number in range(files):
            pq.write_table(table, folder / f"{number:05d}.parquet")
        kinds: dict[str, str | bool] = {"footers": False, "index": str(Path(name, "index.arrow"))}
        for repeat in range(repeats + 1):
            for kind, index in kinds.items():
                begun = time.perf_counter()
                rows = len(tp.list_files(str(folder)).read_parquet(index=index))
                took = time.perf_counter() - begun
                if rows != 8 * files:
                    raise RuntimeError(f"{rows} rows of {8 * files}")
                if repeat:  # the first one writes the index
                    found[kind].append(took)
    return {kind: statistics.median(times) for kind, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    times = start_times(args.files, args.repeats)
    print(f"| {args.files:,} files | ms | ms a file |\n|---|---|---|")
    for kind, took in times.items():
        print(f"| {kind} | {took * 1e3:.1f} | {took * 1e3 / args.files:.3f} |")


if __name__ == "__main__":
    main()
