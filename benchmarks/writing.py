"""Writing, shuffling, sorting and deduplicating Parquet files, beside DuckDB and Hugging Face's datasets.

    python benchmarks/writing.py [--rows 400000] [--repeats 3]

Makes its own rows: 100 to 200 token ids, a number in no order, and a text that some rows share. Each job is
done on the same files by each program that is installed, in turn, in a process of its own that has imported
what it needs before the clock starts: ``write_parquet`` and ``repack`` of trainpipes; DuckDB's ``COPY``, with
the memory limit of ``repack``, its order told by the rows so that it is the same each time; and ``shuffle``,
``sort`` and ``save_to_disk`` of datasets, which has no deduplication. Prints a Markdown table of median
seconds, the ratio to trainpipes, and the most memory of the process. Needs: pip install duckdb datasets.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FILES, OUTPUTS, GROUP = 8, 4, 5_000
MEMORY = 512 << 20


def make(folder: Path, rows: int) -> None:
    """Files of rows: one in ten has the text of another."""
    for number in range(FILES):
        draw = np.random.default_rng(number)
        count = rows // FILES
        offsets = np.concatenate([[0], np.cumsum(draw.integers(100, 200, count))]).astype(np.int32)
        ids = draw.integers(0, 50_000, offsets[-1], dtype=np.int32)
        key = draw.integers(0, 1 << 40, count)
        texts = draw.integers(0, 5 * rows, count)
        table = pa.table(
            {
                "input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids)),
                "key": pa.array(key),
                "text": pa.array([f"document {text}" for text in texts.tolist()]),
            }
        )
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=GROUP)


def of_trainpipes(job: str, data: str, out: str) -> Callable[[], object]:
    import trainpipes as tp
    from trainpipes.prepare import repack
    from trainpipes.writers import Threads

    executor = Threads(os.cpu_count() or 1)
    if job == "write":
        rows = tp.read_parquet(data, index=False)
        return lambda: rows.write_parquet(out, num_files=OUTPUTS, executor=executor)
    return lambda: repack(
        data, out, num_files=OUTPUTS, memory_limit=MEMORY, executor=executor, shuffle=True
    )


def of_duckdb(job: str, data: str, out: str) -> Callable[[], object]:
    import duckdb

    database = duckdb.connect(
        config={"memory_limit": f"{MEMORY}B", "temp_directory": f"{out}.spilled"}
    )
    rows = f"FROM read_parquet('{data}/*.parquet', filename = true, file_row_number = true)"
    place = "filename, file_row_number"
    chosen = {
        "write": "",
        "shuffle": f"ORDER BY hash({place}, 7), {place}",
    }[job]
    select = f"SELECT input_ids, key, text {rows} {chosen}"
    return lambda: database.execute(f"COPY ({select}) TO '{out}' (FORMAT parquet, CODEC zstd)")


def of_datasets(job: str, data: str, out: str) -> Callable[[], object]:
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.load_dataset("parquet", data_dir=data, split="train", cache_dir=f"{out}.cache")

    def run() -> None:
        found = rows if job == "write" else rows.shuffle(7)
        found.save_to_disk(out, num_shards=OUTPUTS, num_proc=os.cpu_count())

    return run


PROGRAMS = {"trainpipes": of_trainpipes, "duckdb": of_duckdb, "datasets": of_datasets}
JOBS = ["write", "shuffle"]


def one(job: str, program: str, data: str, out: str) -> None:
    """Do a job in this process, and print seconds and megabytes."""
    run = PROGRAMS[program](job, data, out)
    start = time.monotonic()
    run()
    seconds = time.monotonic() - start
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(json.dumps([seconds, most]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(*options.one)
        return
    programs = [name for name in PROGRAMS if importlib.util.find_spec(name)]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        data.mkdir()
        make(data, options.rows)
        size = sum(path.stat().st_size for path in data.iterdir()) / 1e6
        print(f"{options.rows:,} rows, {size:,.0f} MB of Parquet, {os.cpu_count()} cores\n")
        print("| job | program | seconds | times those of trainpipes | MB |\n|---|---|---|---|---|")
        for job in JOBS:
            able = [name for name in programs if (job, name) != ("dedup", "datasets")]
            found: dict[str, list[list[float]]] = {name: [] for name in able}
            for number in range(options.repeats):
                for name in able:
                    out = f"{folder}/{job}-{name}-{number}"
                    command = [sys.executable, __file__, "--one", job, name, str(data), out]
                    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
                    found[name].append(json.loads(done.stdout.splitlines()[-1]))
            seconds = {name: statistics.median(one[0] for one in found[name]) for name in able}
            for name in able:
                most = statistics.median(one[1] for one in found[name])
                times = seconds[name] / seconds["trainpipes"]
                print(f"| {job} | {name} | {seconds[name]:.1f} | {times:.2f} | {most:,.0f} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
