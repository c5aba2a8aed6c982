"""States that are changed, and runs that last."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import trainpipes as tp
from attacks.rounds import Round
from attacks.storage import BUCKET, QUICK, Faults, failing_store
from flat_memory import held
from state.test_damaged_states import made, refused

__all__ = ["changed_states", "soak"]


def changed_states(folder: Path, draw: random.Random) -> Iterator[Round]:
    subjects = made(folder, 6)

    def change() -> Iterator[str]:
        named = refused(subjects, 100, draw.randrange(1 << 32))
        yield from ["named"] * named + ["exact"] * (100 - named)

    while True:
        yield change


def soak(folder: Path, draw: random.Random) -> Iterator[Round]:
    """Epoch after epoch from a store that fails at times; memory, open files and threads stay as they are."""
    with failing_store(folder) as (server, system, options):
        for file in range(8):
            sink = pa.BufferOutputStream()
            rows = pa.table({"x": range(2000 * file, 2000 * file + 2000)})
            pq.write_table(rows, sink, row_group_size=500)
            system.pipe(f"{BUCKET}/in/{file}.parquet", sink.getvalue().to_pybytes())
        found: list[tuple[int, int, int]] = []

        def epoch() -> Iterator[str]:
            server.fault = Faults(draw.randrange(1 << 32), 0.05, [*QUICK, "half, then close"])
            # Small files stay in memory once they are read: each epoch lists and reads them anew.
            files = tp.list_files(f"s3://{BUCKET}/in/*.parquet", storage_options=options)
            rows = files.read_parquet(index=False).sharding_filter(4).shuffle(500, seed=1)
            loader = tp.Loader(rows.batch(16))
            loader.set_epoch(len(found))
            numbers = sorted(row["x"] for batch in loader for row in batch)
            pa.default_memory_pool().release_unused()
            if len(server.asked) <= 8:
                yield f"only {len(server.asked)} requests of an epoch"
            server.asked.clear()
            found.append((held(), len(os.listdir("/proc/self/fd")), threading.active_count()))
            yield "exact" if numbers == list(range(16_000)) else f"{len(numbers)} rows of 16,000"
            if len(found) > 10:  # by then all is as large as it gets
                (memory, opened, threads), now = max(found[5:10]), found[-1]
                if now[0] > 1.1 * memory + (32 << 20):
                    yield f"memory grew from {memory:,} to {now[0]:,} bytes in {len(found)} epochs"
                if now[1] > opened + 40 or now[2] > threads + 40:  # connections that are kept
                    yield f"open files and threads: {opened, threads}, then {now[1:]}"

        while True:
            yield epoch
