"""What one rank of a very large run has to do before its first batch: planning alone, nothing is read.

    python benchmarks/scale.py [--row-groups 10000000] [--ranks 4096] [--workers 4] [--repeats 3]

By default 15 T tokens in 10 million row groups of 100,000 files, read by 4,096 ranks of 4 workers. The
footers are made up; all else is what the library does. Lengths are lognormal, over documents and over files,
since files come from different sources. Each repeat is a process of its own, as each worker of a rank is;
times are medians. Prints Markdown tables, and says which of the targets for planning are missed: 5 s, 1 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import trainpipes as tp
from trainpipes.engine.iterating.consumer import Consumer
from trainpipes.engine.planning.plan import Plan
from trainpipes.order.layout import Layout, Topology, segments
from trainpipes.sources.files.file_source import FileSource
from trainpipes.sources.files.index_store import IndexStore
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.parquet_footers import RowGroupLayout
from trainpipes.sources.read_parquet import RowGroups
from trainpipes.state.format import Position

SECONDS, GIGABYTES = 5.0, 1.0
TOKENS = 15e12
GROUPS_A_FILE = 100
#: Bytes of a token on disk and in memory.
TOKEN_BYTES = 4
#: Rows of a row group, on average.
ROWS_A_GROUP = 1500
#: Spread of the logarithm of a file's mean document length.
DRIFT = 0.6
#: Memory that the windows of one process may take.
WINDOW_BYTES = 1 << 30
BUFFER, BATCH = 40_960, 8


def make_up(row_groups: int, folder: Path) -> None:
    """What the footers of a crawl might say."""
    rng = np.random.default_rng(0)
    files = -(-row_groups // GROUPS_A_FILE)
    first_group = np.minimum(np.arange(files + 1) * GROUPS_A_FILE, row_groups)
    rows = rng.poisson(ROWS_A_GROUP, row_groups).astype(np.int64)
    means = np.exp(rng.normal(-(DRIFT**2) / 2, DRIFT, files))  # 1 on average
    tokens = np.repeat(means, np.diff(first_group)) * rows
    # Documents of one file are lognormal too; over 1,500 of them that evens out to a few per cent.
    tokens *= np.exp(rng.normal(0, 0.03, row_groups))
    tokens *= TOKENS / 1e7 * row_groups / tokens.sum()
    group_bytes = (tokens * TOKEN_BYTES).astype(np.int64)
    for name, array in (("first_group", first_group), ("rows", rows), ("group_bytes", group_bytes)):
        np.save(folder / name, array)


def footers(folder: Path) -> FileSource:
    """The same as the library would hold it, had it read them."""
    first_group, rows, group_bytes = (
        np.load(folder / f"{name}.npy") for name in ("first_group", "rows", "group_bytes")
    )
    sizes = np.add.reduceat(group_bytes, first_group[:-1])
    names = [f"/data/crawl/{n % 100:02d}/part-{n:06d}.parquet" for n in range(len(sizes))]
    zeros = np.zeros(len(sizes), dtype=np.int64)
    listed = FileList(names, names, sizes, zeros, (), [""] * len(names), zeros)
    schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
    layouts = []
    for file, size in enumerate(sizes.tolist()):
        own = slice(*first_group[file : file + 2].tolist())
        nowhere = np.zeros(own.stop - own.start, dtype=np.int64)
        extra = np.array([8, 0, 0, *group_bytes[own]], dtype=np.int64).tobytes()
        layouts.append(RowGroupLayout(rows[own], nowhere, nowhere, schema, extra, size=size))
    return FileSource(
        IndexStore(listed, "read_parquet", "Parquet", index=False),
        RowGroups(None, schema),
        layouts=layouts,
        schema=schema,
        row_bytes=float(group_bytes.sum() / rows.sum()),
        block_bytes=group_bytes.astype(np.float64),
    )


class Clock:
    """Seconds and gigabytes of each phase."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phases.append((name, time.perf_counter() - start, peak()))


def peak() -> float:
    """Most memory that this process has had at once, GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def plan_one_rank(folder: Path, ranks: int, workers: int) -> dict[str, Any]:
    """Everything that a worker does before it reads, and what it would read."""
    shards = ranks * workers
    stages = (
        tp.list_files("/data/crawl").read_parquet().sharding_filter(shards)
        .shuffle(BUFFER, max_bytes=WINDOW_BYTES * shards).batch(BATCH).stages
    )  # fmt: skip
    before = peak()
    clock = Clock()
    with clock.phase("row groups as blocks"):
        source = footers(folder)
        plan = Plan.of([stage._fresh() for stage in stages], source)
        assert plan.inputs.blocks.rows
    with clock.phase("identity of data and stages"):
        identity = plan.identity
    with clock.phase("spans"):
        layout = plan.layouts.usual
        assert isinstance(layout, Layout)
        spans = layout.num_spans
    with clock.phase("order of row groups"):
        starts, order = plan.inputs.blocks.order(0, plan.layouts.block_order)
        assert order is not None
    topology = Topology(ranks // 3, ranks)
    with clock.phase("state of a rank"):
        state = Consumer(plan, topology, Position(0, 0, shards)).state()
    with clock.phase("first windows of a rank"):
        own = [shard % spans for shard in range(topology.rank, shards, ranks)]
        for span in own:
            first = layout.span(span)[0]
            start, stop = layout.window(span, 0)
            segments(starts, order, first + start, first + stop)
    most = peak()
    opened, blocks = files_of(own, layout, starts, order, source.file_of_block)
    middle = spans // 2
    return {
        "phases": clock.phases,
        "before": before,
        "peak": most,
        "spans": spans,
        "window rows": int(np.diff(layout.window(middle, 0))[0]),
        "state": len(json.dumps(state)),
        "identity": len(identity),
        "files": len(source.files),
        "opened": opened,
        "row groups": blocks,
        "seek": seek(plan, ranks),
    }


def seek(plan: Plan, ranks: int) -> float:
    """Seconds to find, by arithmetic, all cursors at nine tenths of the epoch."""
    start = time.perf_counter()
    m = int(plan.counts.batches_in_pass * 0.9) // ranks * ranks
    for shard in range(plan.chain.num_shards):
        plan.counts.cursor_at(m, shard, 0)
    return time.perf_counter() - start


def files_of(
    own: list[int], layout: Layout, starts: Any, order: Any, file_of_block: Any
) -> tuple[int, int]:
    """Different files, and row groups, that hold the rows of these spans."""
    blocks = set()
    for span in own:
        blocks |= {block for block, _, _ in segments(starts, order, *layout.span(span))}
    return len(set(file_of_block[list(blocks)].tolist())), len(blocks)


def planned(row_groups: int, ranks: int, workers: int, repeats: int) -> dict[str, Any]:
    """What ``plan_one_rank`` finds in processes of their own: medians of times, the most of memory."""
    with tempfile.TemporaryDirectory() as folder:
        make_up(row_groups, Path(folder))
        command = [sys.executable, __file__, "--one", folder]
        command += ["--ranks", str(ranks), "--workers", str(workers)]
        runs = []
        for _ in range(repeats):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs.append(json.loads(done.stdout))
    found: dict[str, Any] = runs[0]
    found["seek"] = statistics.median(run["seek"] for run in runs)
    found["phases"] = [
        (phase[0][0], statistics.median(p[1] for p in phase), max(p[2] for p in phase))
        for phase in zip(*(run["phases"] for run in runs), strict=True)
    ]
    found["seconds"] = sum(phase[1] for phase in found["phases"])
    found["grown"] = found["peak"] - found["before"]
    return found


def report(found: dict[str, Any], ranks: int, workers: int) -> None:
    print("| planning, one process | s | peak GB |\n|---|---|---|")
    for name, seconds, memory in found["phases"]:
        print(f"| {name} | {seconds:.2f} | {memory:.2f} |")
    seconds, grown = found["seconds"], found["grown"]
    print(f"| all | {seconds:.2f} | {found['peak']:.2f} |\n")
    shards = ranks * workers
    lines = {
        "ranks, workers, shards": f"{ranks:,}, {workers}, {shards:,}",
        "spans": f"{found['spans']:,}",
        "rows of a window": f"{found['window rows']:,}",
        "state": f"{found['state']:,} bytes",
        "files, opened by one rank in an epoch": f"{found['files']:,}, {found['opened']:,}",
        "row groups that one rank reads": f"{found['row groups']:,}",
        "all cursors by arithmetic": f"{found['seek']:.2f} s",
        "memory before and while planning": f"{found['before']:.2f} GB, {grown:.2f} GB more",
    }
    print("| | |\n|---|---|")
    for name, text in lines.items():
        print(f"| {name} | {text} |")
    for what, value, target, unit in (
        ("planning", seconds, SECONDS, "s"),
        ("memory", grown, GIGABYTES, "GB"),
    ):
        verdict = "met" if value <= target else "MISSED"
        print(f"\n{what}: {value:.2f} {unit}, target {target:.0f} {unit}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--row-groups", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(plan_one_rank(args.one, args.ranks, args.workers)))
        return
    found = planned(args.row_groups, args.ranks, args.workers, args.repeats)
    report(found, args.ranks, args.workers)


if __name__ == "__main__":
    main()
