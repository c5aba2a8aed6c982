"""Memory does not grow over epochs, nor with workers beyond their own windows."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flat_memory
import trainpipes as tp
from trainpipes.columns.run import Run
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.sources.from_dataset import FromDataset, PackedList, packed

SCRIPT = Path(flat_memory.__file__)
#: Bytes of all windows of the pipelines below, about.
WINDOWS = 40_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(0)
    for file in range(4):
        ends = np.concatenate([[0], np.cumsum(rng.integers(20, 200, 20_000))]).astype(np.int32)
        ids = pa.array(rng.integers(0, 50_000, ends[-1]).astype(np.int32))
        table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(ends), ids)})
        pq.write_table(table, folder / f"{file}.parquet", row_group_size=2000)
    return folder


def measured(what: str, workers: int, epochs: int) -> tuple[list[int], int]:
    """Bytes held after each epoch; without workers, those of a bare one."""
    command = [sys.executable, "-W", "ignore", SCRIPT, what, str(workers), str(epochs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["batches"] > 100
    return found["epochs"], found["bare"]


def check(what: str) -> None:
    alone, bare = measured(what, 0, 60)
    shared, _ = measured(what, 4, 60)
    # By epoch 20 workers have their own copies of what they count. What allocators keep comes and goes.
    for held in (alone, shared):
        assert median(held[40:]) <= 1.04 * median(held[20:40]), held
    assert shared[-1] <= alone[-1] + 4 * (bare + WINDOWS)


@pytest.mark.timeout(300)
def test_four_epochs_of_a_python_list_in_workers_hold_what_one_does() -> None:
    held, _ = measured("26000", 2, 4)
    assert held[-1] <= 1.05 * held[1], held


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_epochs_of_parquet_files_hold_no_more_than_those_before(folder: Path) -> None:
    check(str(folder))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_epochs_of_a_python_list_hold_no_more_than_those_before() -> None:
    check("100000")


def test_a_packed_list_is_the_list() -> None:
    items: list[Any] = [{"n": n, "t": (n, [None, 1.5])} for n in range(20)]
    found = PackedList(items)
    assert list(found) == items
    assert found[-1] == items[-1]
    assert found[3:7] == items[3:7]
    assert len(PackedList([])) == 0
    assert list(pickle.loads(pickle.dumps(found))) == items
    with pytest.raises(IndexError):
        found[20]


def test_what_does_not_pickle_or_shares_much_or_is_no_list_stays_as_it_is() -> None:
    for dataset in ([threading.Lock()] * 2000, [1, 2], range(5000)):
        stage = FromDataset(dataset)
        assert packed(stage) is stage
    shared = list(range(1000))
    stage = FromDataset([{"n": n, "shared": shared} for n in range(2000)])
    assert packed(stage) is stage, "each item would hold a copy"
    long = packed(FromDataset([0] * 2000))
    assert isinstance(long, FromDataset)
    assert isinstance(long.dataset, PackedList)


class Keep(RunStage, keeps_rows=False):
    """Keeps the rows that are in a list; it looks at what the list is."""

    dataset: Any

    def process(self, run: Run) -> Run:
        assert type(self.dataset) is list
        kept = [k for k, row in enumerate(run.unroll()) if row in self.dataset]
        return run.pick(np.array(kept, dtype=np.int64))


def test_a_list_that_another_stage_calls_its_dataset_reaches_workers_as_it_is() -> None:
    pipe = tp.from_dataset(list(range(3000))).then(Keep(dataset=list(range(0, 6000, 3))))
    pipe = pipe.sharding_filter(4).batch(100)
    found = [row for batch in tp.Loader(pipe, num_workers=1) for row in batch]
    assert sorted(found) == list(range(0, 3000, 3))
