"""The workers of a ``Loader`` share one shuffle buffer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from interpreters import python

#: Rows of 4 KB, and how many of them are shuffled together: 160 MB.
ROWS, BUFFER = 60_000, 40_960


def halved(row: dict[str, object]) -> dict[str, object]:
    return {"id": row["id"]}


def taken(path: str, workers: int) -> float:
    """Megabytes of all processes in the middle of an epoch, those that they share counted once."""
    pipe = tp.read_parquet(path).sharding_filter(8).shuffle(BUFFER, seed=1).map(halved).batch(32)
    batches = iter(tp.Loader(pipe, num_workers=workers))
    for _ in range(ROWS // 64):
        next(batches)
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(process.memory_full_info().pss for process in processes) / 1e6


@pytest.mark.slow
def test_four_workers_take_little_more_memory_than_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = pa.FixedSizeListArray.from_arrays(pa.array(rng.integers(0, 1 << 40, ROWS * 500)), 500)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": range(ROWS), "ids": values}), path, row_group_size=2_000)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    megabytes = [
        float(json.loads(subprocess.check_output(
            [*python(), __file__, str(path), str(workers)], env=environment, timeout=300
        )))
        for workers in (1, 4)
    ]  # fmt: skip
    assert megabytes[0] > 160
    assert megabytes[1] <= 1.6 * megabytes[0]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(taken(sys.argv[1], int(sys.argv[2]))))
