"""Data of some 2 GB in memory, and the peak of a process that repacks it, for ``test_repack_memory``.

Run as a program, with the name of a case and a folder: makes the data, repacks it in a process of its own,
and prints the highest sum of resident memory of that process and its children, in MB, and the seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

GB = 1 << 30


def tokens(rows: int, seed: int) -> pa.Table:
    """Rows of 150 tokens, about."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(100, 200, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = draw.integers(0, 50_000, offsets[-1], dtype=np.int32)
    ids = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
    return pa.table({"ids": ids, "n": pa.array(np.arange(rows) + seed * rows)})


def groups(parts: Iterator[pa.Table], path: Path) -> None:
    """Each part as a row group."""
    writer = None
    for part in parts:
        writer = writer or pq.ParquetWriter(
            path, part.schema, compression="lz4", use_dictionary=False
        )
        writer.write_table(part, row_group_size=len(part))
    assert writer is not None
    writer.close()


def many_groups(folder: Path) -> None:
    groups((tokens(50_000, seed) for seed in range(67)), folder / "rows.parquet")


def one_group(folder: Path) -> None:
    table = pa.concat_tables(tokens(50_000, seed) for seed in range(67))
    pq.write_table(
        table, folder / "rows.parquet", row_group_size=len(table), compression="lz4",
        use_dictionary=False,
    )  # fmt: skip


def wide_rows(folder: Path) -> None:
    def part(seed: int) -> pa.Table:
        text = [np.random.default_rng(seed * 16 + n).bytes(1 << 20) for n in range(16)]
        return pa.table({"blob": pa.array(text, pa.large_binary()), "n": np.arange(16) + 16 * seed})

    groups(map(part, range(128)), folder / "rows.parquet")


def tiny_rows(folder: Path) -> None:
    table = pa.table({"n": np.arange(10_000_000), "tag": pa.array(["a", "b"] * 5_000_000)})
    pq.write_table(table, folder / "rows.parquet")


CASES: dict[str, Callable[[Path], None]] = {
    "many row groups": many_groups,
    "one row group": one_group,
    "wide rows": wide_rows,
    "tiny rows": tiny_rows,
}
OPTIONS = {"sorted": ["--sort", "n"], "once": ["--drop-duplicates"], "shuffled": ["--shuffle"]}


def main(name: str, options: str, folder: Path) -> None:
    if not (folder / "rows.parquet").exists():
        CASES[name](folder)
    begun = time.monotonic()
    start = "from trainpipes.cli import main; main()"
    command = [sys.executable, "-c", start, "repack", folder / "rows.parquet", folder / "out"]
    running = subprocess.Popen([*command, *OPTIONS[options], "--json"], stdout=subprocess.PIPE)
    peak = 0
    process = psutil.Process(running.pid)
    while running.poll() is None:
        try:
            all_of = [process, *process.children(recursive=True)]
            peak = max(peak, sum(one.memory_info().rss for one in all_of))
        except psutil.Error:
            pass
        time.sleep(0.02)
    assert running.stdout is not None
    done = json.loads(running.stdout.read())
    sys.stdout.write(
        json.dumps(
            {"peak_mb": peak >> 20, "seconds": time.monotonic() - begun, "rows": done["rows"],
             "files": len(done["files"])}
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
