"""Rows a second, padded and shuffled, against a plain DataLoader and against the Parquet scan alone.

    python benchmarks/rows_per_second.py [--rows 200000] [--repeats 5]

Makes its own data: pre-tokenized rows of 154 tokens on average. Each contestant runs in a process of its
own, in turn with the others; the medians' ratios are what to quote. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

import trainpipes as tp

BUFFER, BATCH = 40_960, 32


def make(folder: Path, rows: int) -> None:
    """Files of 50,000 rows in row groups of 10,000."""
    rng = np.random.default_rng(0)
    for number, start in enumerate(range(0, rows, 50_000)):
        lengths = rng.integers(20, 289, min(50_000, rows - start))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = pa.array(rng.integers(0, 32_000, int(offsets[-1])), pa.int32())
        table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), ids)})
        pq.write_table(table, folder / f"part-{number:03d}.parquet", row_group_size=10_000)


class RowBuffer(IterableDataset[Any]):
    """What users write by hand: read N rows, shuffle them, give one at a time."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.parquet"))

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        files = self.files if info is None else self.files[info.id :: info.num_workers]
        held: list[Any] = []
        for path in files:
            for batch in pq.ParquetFile(path).iter_batches(10_000):
                held.extend(batch.column(0).to_pylist())
                if len(held) >= BUFFER:
                    random.shuffle(held)
                    yield from map(torch.tensor, held)
                    held = []
        random.shuffle(held)
        yield from map(torch.tensor, held)


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def pipeline(folder: Path) -> tp.Pipeline:
    return (
        tp.list_files(str(folder)).read_parquet().sharding_filter().shuffle(BUFFER)
        .batch(BATCH).pad_collate()
    )  # fmt: skip


def scan(folder: Path) -> Iterator[Any]:
    for path in sorted(folder.glob("*.parquet")):
        yield from pq.ParquetFile(path, pre_buffer=False).iter_batches(8_192, use_threads=False)


def resumed(folder: Path) -> Iterator[Any]:
    pipe = pipeline(folder)
    pipe.load_state_dict(pipe.state_at(int(len(pipe) * 0.72)))
    return iter(pipe)


CONTESTANTS: dict[str, Callable[[Path], Any]] = {
    "row buffer in a DataLoader": lambda f: DataLoader(
        RowBuffer(f), batch_size=BATCH, collate_fn=padded
    ),
    "row buffer, 2 workers": lambda f: DataLoader(
        RowBuffer(f), batch_size=BATCH, collate_fn=padded, num_workers=2
    ),
    "trainpipes": pipeline,
    "trainpipes.Loader, 2 workers": lambda f: tp.Loader(pipeline(f), num_workers=2),
    "trainpipes, resumed at 72 %": resumed,
    "Parquet scan alone": scan,
}


def measure(name: str, folder: Path) -> dict[str, float]:
    """Rows a second from the first batch on, and seconds to the first batch."""
    start = time.perf_counter()
    iterator = iter(CONTESTANTS[name](folder))
    first = next(iterator)
    begun = time.perf_counter()
    rows = sum(_rows(batch) for batch in iterator)
    assert _rows(first)
    return {"first": begun - start, "rate": rows / (time.perf_counter() - begun)}


def _rows(batch: Any) -> int:
    return batch.num_rows if isinstance(batch, pa.RecordBatch) else len(batch["input_ids"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.folder)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), args.rows)
        for number in range(args.repeats):
            for name in CONTESTANTS:
                print(
                    f"\r{number + 1} of {args.repeats}: {name:<40}",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
                command = [sys.executable, __file__, "--one", name, "--folder", folder]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[name].append(json.loads(done.stdout))
    print(file=sys.stderr)
    rates = {n: statistics.median(r["rate"] for r in runs) for n, runs in found.items()}
    firsts = {n: statistics.median(r["first"] for r in runs) for n, runs in found.items()}
    base = rates["row buffer in a DataLoader"]
    print("| | rows/s | ratio | first batch, ms |\n|---|---|---|---|")
    for name in CONTESTANTS:
        print(
            f"| {name} | {rates[name]:,.0f} | {rates[name] / base:.1f} | {firsts[name] * 1000:.0f} |"
        )


if __name__ == "__main__":
    main()
