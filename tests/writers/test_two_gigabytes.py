"""Jobs on some 2 GB take less than 1 GB of memory, with Python and all packages."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from prepare.test_tokenize_processes import write_texts
from trainpipes.writers import epoch_rows

WRITE = """
import sys
import trainpipes as tp
rows = tp.read_parquet(sys.argv[2]).shuffle(5000)
getattr(rows, sys.argv[1])(sys.argv[3])
"""


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


def one_group(folder: Path) -> None:
    table = pa.concat_tables(tokens(50_000, seed) for seed in range(67))
    pq.write_table(
        table, folder / "rows.parquet", row_group_size=len(table), compression="lz4",
        use_dictionary=False,
    )  # fmt: skip


def wide(seed: int) -> pa.Table:
    blobs = [np.random.default_rng(seed * 16 + n).bytes(1 << 20) for n in range(16)]
    return pa.table({"blob": pa.array(blobs, pa.large_binary()), "n": np.arange(16) + 16 * seed})


DATA: dict[str, Callable[[Path], object]] = {
    "many row groups": lambda folder: groups(
        (tokens(50_000, seed) for seed in range(67)), folder / "rows.parquet"
    ),
    "one row group": one_group,
    "wide rows": lambda folder: groups(map(wide, range(128)), folder / "rows.parquet"),
    "texts": lambda folder: write_texts(folder / "texts", 2_000_000_000, 4, group=2000),
}
COMMAND = [sys.executable, "-m", "trainpipes"]
JOBS: dict[str, list[str]] = {
    "shuffle": [*COMMAND, "repack", "IN", "OUT", "--shuffle"],
    "tokenize": [
        *COMMAND, "tokenize", "IN", "OUT", "--recipe", "pretrain", "--tokenizer", "bytes", "--executor",
        "processes:2",
    ],
} | {
    f"write_{kind}": [sys.executable, "-c", WRITE, f"write_{kind}", "IN", "OUT"]
    for kind in ("parquet", "arrow", "json", "memmap")
}  # fmt: skip
CASES = [
    *(("shuffle", data) for data in DATA if data != "texts"),
    ("tokenize", "texts"), *((job, "many row groups") for job in JOBS if job.startswith("write_")),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("job", "data"), CASES)
def test_two_gigabytes_take_less_than_one_of_memory(job, data, folder, tmp_path, record_property):
    given = folder / data
    if not given.exists():
        given.mkdir()
        DATA[data](given)
    words = {"IN": str(next(given.iterdir())), "OUT": str(tmp_path / "out")}
    process = psutil.Popen([words.get(word, word) for word in JOBS[job]], stdout=subprocess.DEVNULL)
    most = 0
    while process.poll() is None:
        try:  # pages that several processes share count once
            each = [process, *process.children(recursive=True)]
            most = max(most, sum(one.memory_full_info().pss for one in each))
        except psutil.Error:
            continue
        time.sleep(0.05)
    assert process.returncode == 0
    assert (tmp_path / "out" / "_manifest.json").exists()
    record_property("megabytes", most // 1_000_000)
    assert most < 1_000_000_000


def test_an_arrow_group_whose_text_no_array_holds_is_cut(tmp_path, monkeypatch):
    whole = epoch_rows.compact

    def compact(table: pa.Table) -> pa.Table:
        if len(table) > 30:
            raise pa.ArrowInvalid("offset overflow while concatenating arrays")
        return whole(table)

    monkeypatch.setattr(epoch_rows, "compact", compact)
    rows = tp.from_arrow(pa.table({"x": range(200)}))
    done = rows.write_arrow(tmp_path / "out", row_group_size=100)
    batches = pa.ipc.open_file(done.files[0])
    assert [batches.get_batch(n).num_rows for n in range(8)] == [25] * 8
    assert batches.read_all().to_pylist() == list(rows)
