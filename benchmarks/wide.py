"""Tables of many columns: batches of numbers, against forty lines over Arrow and against the scan.

    python -m benchmarks.wide [--rows 400000] [--columns 120] [--repeats 5] [--kinds numbers ...]

Makes Parquet files of float32 and, a sixth of them, int64 columns, in row groups of 25,000. An epoch is
shuffled in 50,000 rows and comes in batches of 4,096, a tensor for each column. The forty lines have one
thread: they read row groups until 50,000 rows are there, permute them by ``Table.take``, and make tensors of
slices, float32 as they are stored; ``collate()`` makes float64, as torch does of rows, or float32 by
``dtype=``. The scan decodes the columns and drops them. All run in turn in this process, after one epoch of
each; rates are of the medians. ``--kinds``: also "lists" (20 columns of 8 ids on average), "texts" (20
columns of short texts, of them 5 as dictionaries, beside the numbers), "many" (1,000 columns).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import trainpipes as tp

FILES, GROUP_ROWS, BUFFER, BATCH = 4, 25_000, 50_000, 4096


def numbers(rows: int, columns: int, draw: np.random.Generator) -> dict[str, Any]:
    floats = columns * 5 // 6
    made: dict[str, Any] = {
        f"float_{n}": draw.standard_normal(rows, dtype=np.float32) for n in range(floats)
    }
    return made | {f"int_{n}": draw.integers(0, 1000, rows) for n in range(columns - floats)}


def lists(rows: int, _: int, draw: np.random.Generator) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for n in range(20):
        offsets = np.append(0, np.cumsum(draw.integers(0, 17, rows))).astype(np.int32)
        ids = draw.integers(0, 100_000, int(offsets[-1]))
        made[f"ids_{n}"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
    return made


def texts(rows: int, columns: int, draw: np.random.Generator) -> dict[str, Any]:
    words = np.array([f"word {n}" for n in range(5000)])
    made = numbers(rows, columns, draw)
    for n in range(20):
        column = pa.array(words[draw.integers(0, len(words), rows)])
        made[f"text_{n}"] = column.dictionary_encode() if n < 5 else column
    return made


KINDS: dict[str, Callable[[int, int, np.random.Generator], dict[str, Any]]] = {
    "numbers": numbers, "lists": lists, "texts": texts,
    "many": lambda rows, _, draw: numbers(rows // 4, 1000, draw),
}  # fmt: skip


def write(folder: Path, kind: str, rows: int, columns: int) -> list[str]:
    draw = np.random.default_rng(0)
    paths = []
    for number in range(FILES):
        table = pa.table(KINDS[kind](rows // FILES, columns, draw))
        paths.append(str(folder / f"{kind}-{number}.parquet"))
        pq.write_table(table, paths[-1], row_group_size=GROUP_ROWS)
    return paths


def scan(paths: list[str], threads: bool = False) -> Iterator[int]:
    for path in paths:
        for batch in pq.ParquetFile(path).iter_batches(65_536, use_threads=threads):
            yield len(batch)


def forty_lines(paths: list[str]) -> Iterator[dict[str, torch.Tensor]]:
    draw, held = np.random.default_rng(0), []
    groups = [(path, n) for path in paths for n in range(pq.read_metadata(path).num_row_groups)]
    for place, (path, number) in enumerate(groups):
        held.append(pq.ParquetFile(path).read_row_group(number, use_threads=False))
        if sum(map(len, held)) < BUFFER and place + 1 < len(groups):
            continue
        table = pa.concat_tables(held)
        table = table.take(pa.array(draw.permutation(len(table))))
        for start in range(0, len(table), BATCH):
            part = table.slice(start, BATCH)
            yield {name: tensor(part.column(name)) for name in part.column_names}
        held = []


def tensor(column: pa.ChunkedArray) -> Any:
    if pa.types.is_list(column.type):  # values and offsets, as an embedding bag takes them
        array = column.combine_chunks()
        offsets = array.offsets.to_numpy()
        return torch.from_numpy(array.flatten().to_numpy().copy()), torch.from_numpy(
            offsets - offsets[0]
        )
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return torch.from_numpy(column.to_numpy().copy())
    return column.to_pylist()


def ours(paths: list[str], threads: int, kind: str, dtype: torch.dtype | None = None) -> tp.Loader:
    rows = tp.read_parquet(paths).shuffle(BUFFER, seed=0).batch(BATCH)
    batches = rows.pad_collate(mask=False) if kind == "lists" else rows.collate(dtype=dtype)
    return tp.Loader(batches, threads=threads)


def rates_of(rows: int, columns: int, repeats: int, kind: str = "numbers") -> dict[str, float]:
    """Rows a second of each."""
    with tempfile.TemporaryDirectory() as name:
        paths = write(Path(name), kind, rows, columns)
        count = sum(pq.read_metadata(path).num_rows for path in paths)
        two, none = ours(paths, 2, kind), ours(paths, 0, kind)
        narrow, narrow_none = (ours(paths, threads, kind, torch.float32) for threads in (2, 0))
        ways: dict[str, Callable[[], Any]] = {
            "scan": lambda: scan(paths),
            "forty lines": lambda: forty_lines(paths),
            "ours, 2 threads": lambda: two,
            "ours, 2 threads, float32": lambda: narrow,
            "ours, no threads": lambda: none,
            "ours, no threads, float32": lambda: narrow_none,
        }
        took: dict[str, list[float]] = {way: [] for way in ways}
        for repeat in range(repeats + 1):
            for way, begin in ways.items():
                started = time.perf_counter()
                for _ in begin():
                    pass
                if repeat:
                    took[way].append(time.perf_counter() - started)
        return {way: count / statistics.median(seconds) for way, seconds in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--columns", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["numbers"])
    args = parser.parse_args()
    for kind in args.kinds:
        rates = rates_of(args.rows, args.columns, args.repeats, kind)
        print(f"\n| {kind} | rows/s | of forty lines | of the scan |\n|---|---|---|---|")
        for way, rate in rates.items():
            of = rate / rates["forty lines"], rate / rates["scan"]
            print(f"| {way} | {rate:,.0f} | {of[0]:.2f} | {of[1]:.2f} |")


if __name__ == "__main__":
    main()
