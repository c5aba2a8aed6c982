"""What a batch costs does not depend on how many others its rows were read with, nor on where it stands in
the epoch: work is counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp

LIBRARY = str(Path(tp.__file__).parent)
#: Methods of arrays, tensors and tables that go through all that they are called on.
READING = {
    "all", "any", "argsort", "astype", "clone", "combine_chunks", "contiguous", "copy", "cumsum", "filter",
    "flatten", "index_select", "max", "min", "repeat", "sum", "take", "to", "tobytes", "tolist", "to_pylist",
}  # fmt: skip
HOLDERS = (np.ndarray, torch.Tensor, pa.Table, pa.ChunkedArray, pa.Array)


@dataclass
class Work:
    """What was done.

    Args:
        calls: of functions of the library.
        nbytes: of all arrays, tensors and tables of which a method went through the whole.
        widened: bytes of arrays that were cast to another dtype.
    """

    calls: int = 0
    nbytes: int = 0
    widened: int = 0


def counted(do: Callable[[], Any]) -> tuple[Any, Work]:
    """What a function returns, and the work that this thread did for it."""
    work = Work()

    def hook(frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            work.calls += frame.f_code.co_filename.startswith(LIBRARY)
        elif event == "c_call" and function.__name__ in READING:
            held = getattr(function, "__self__", None)
            if isinstance(held, HOLDERS):
                work.nbytes += held.nbytes
                work.widened += held.nbytes if function.__name__ == "astype" else 0

    sys.setprofile(hook)
    try:
        found = do()
    finally:
        sys.setprofile(None)
    return found, work


Make = Callable[[Path, int], tp.Pipeline]
LENGTH = 32


def table(rows: int) -> pa.Table:
    lengths = np.random.default_rng(0).integers(1, LENGTH, rows)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    values = pa.array(np.arange(int(lengths.sum()), dtype=np.int32))
    ids = pa.ListArray.from_arrays(offsets, values)
    return pa.table({"input_ids": ids, "n": range(rows)})


def tokens(folder: Path, rows: int, name: str = "tokens.bin", dtype: str = "uint16") -> tp.Pipeline:
    path = folder / f"{rows}-{name}"
    np.arange(rows * LENGTH + 1).astype(dtype).tofile(path)
    return tp.from_memmap(path, dtype=dtype, length=LENGTH, labels=True)


def even(folder: Path, rows: int) -> tp.Pipeline:
    images = np.arange(rows * LENGTH, dtype=np.uint8).reshape(rows, LENGTH)
    path = folder / f"{rows}-even"
    tp.write_memmap(path, {"input_ids": images, "n": np.arange(rows)}, overwrite=True)
    return tp.from_memmap(path)


def ragged(folder: Path, rows: int) -> tp.Pipeline:
    path = folder / f"{rows}-ragged"
    tp.write_memmap(path, table(rows), overwrite=True)
    return tp.from_memmap(path)


def tensors(folder: Path, rows: int) -> tp.Pipeline:
    return tp.from_tensors(input_ids=torch.zeros(rows, LENGTH), n=torch.arange(rows))


def arrow(folder: Path, rows: int) -> tp.Pipeline:
    return tp.from_arrow(table(rows))


def parquet(folder: Path, rows: int) -> tp.Pipeline:
    path = folder / f"{rows}.parquet"
    pq.write_table(table(rows), path, row_group_size=500)
    return tp.list_files(str(path)).read_parquet()


def mixed(folder: Path, rows: int) -> tp.Pipeline:
    parts = [tokens(folder, rows // 2, name) for name in ("a", "b")]
    return tp.mix({"a": parts[0].shuffle(200), "b": parts[1]})


def row_dicts(folder: Path, rows: int) -> tp.Pipeline:
    return tp.from_dataset(range(rows)).map(lambda n: {"input_ids": [n] * (1 + n % 9)})


SOURCES: dict[str, Make] = {
    make.__name__: make for make in (tokens, even, ragged, tensors, arrow, parquet, mixed)
}
FINISHES: dict[str, Callable[[tp.Pipeline], tp.Pipeline]] = {
    "collate": lambda pipe: pipe.collate(),
    "collate of columns": lambda pipe: pipe.collate(format="numpy"),
    "pad_collate": lambda pipe: pipe.pad_collate(),
    "pad_collate and on": lambda pipe: pipe.pad_collate().map(lambda batch: batch).to("cpu"),
    "a function": lambda pipe: pipe.collate(len),
    "none": lambda pipe: pipe,
}
RAGGED = {"ragged", "arrow", "parquet"}


def of_an_epoch(pipe: tp.Pipeline) -> tuple[int, Work]:
    """Batches, and the work for them by the one thread that there is."""
    loader = tp.Loader(pipe, threads=0)
    batches, work = counted(lambda: sum(1 for _ in loader))
    return batches, work


#: Each source with half of the finishes. Rows of several lengths are not stacked.
PAIRS = [
    (source, finish)
    for place, source in enumerate(SOURCES)
    for number, finish in enumerate(FINISHES)
    if (place + number) % 2 and (finish != "collate" or source not in RAGGED)
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("source", "finish"), PAIRS)
def test_small_batches_go_through_no_more_bytes_than_large_ones(source, finish, tmp_path):
    rows = SOURCES[source](tmp_path, 4096)
    made = FINISHES[finish]
    few, large = of_an_epoch(made(rows.batch(256)))
    many, small = of_an_epoch(made(rows.batch(8)))
    assert (few, many) == (16, 512)
    assert small.nbytes <= 1.5 * large.nbytes + 100_000
    assert small.calls - large.calls <= 360 * (many - few)


CUTS = {
    "batch": lambda pipe: pipe.batch(8),
    "max_tokens": lambda pipe: pipe.batch(max_tokens=16 * LENGTH),
    "bucket_by_length": lambda pipe: pipe.bucket_by_length(8, buffer_size=256),
    "pack": lambda pipe: pipe.pack(4 * LENGTH).batch(8),
}
CUT_SOURCES = [tokens, ragged, arrow, parquet, mixed, row_dicts]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("source", "cut"),
    [(s, cut) for n, s in enumerate(CUT_SOURCES) for k, cut in enumerate(CUTS) if (n + k) % 2],
)
def test_a_long_epoch_costs_a_batch_no_more_than_a_short_one(source, cut, tmp_path):
    short, less = of_an_epoch(CUTS[cut](source(tmp_path, 1000)).pad_collate())
    long, more = of_an_epoch(CUTS[cut](source(tmp_path, 4000)).pad_collate())
    assert long > 3 * short
    assert more.calls / long <= 1.2 * less.calls / short + 20
    assert more.nbytes / long <= 1.3 * less.nbytes / short + 10_000


ORDERS = {
    "in order": lambda p: p,
    "global": lambda p: p.shuffle(scope="global"),
    "buffer": lambda p: p.shuffle(500),
    "shards": lambda p: p.sharding_filter(3).shuffle(500),
    "mix": lambda p: tp.mix({"a": p.shuffle(99), "b": p}, weights={"a": 1, "b": 1}),
}


@pytest.mark.parametrize("batch", [1, 12, 300])
@pytest.mark.parametrize("order", ORDERS)
def test_token_ids_are_made_wide_once_when_their_batch_is_made(order, batch, tmp_path):
    batches = ORDERS[order](tokens(tmp_path, 1500)).batch(batch)
    pipe = batches.collate() if (batch + len(order)) % 2 else batches.pad_collate()
    delivered = 0

    def drain() -> None:
        nonlocal delivered
        for item in tp.Loader(pipe, threads=0):
            assert item["labels"].dtype == torch.int64
            delivered += len(item["labels"])

    _, work = counted(drain)
    assert delivered >= 1500
    assert work.widened <= 2 * delivered * LENGTH * 2 + 300_000  # ids and labels, of 2 bytes each


def test_a_token_budget_over_rows_of_a_function_counts_each_row_a_few_times(tmp_path):
    pipe = row_dicts(tmp_path, 3000).batch(max_tokens=9 * 1000).collate(len)
    batches, work = of_an_epoch(pipe)
    assert batches == 3
    assert work.calls <= 100 * 3000


def test_token_files_of_different_widths_are_mixed_by_value(tmp_path):
    wide = tokens(tmp_path, 40, "wide", "uint32")
    narrow = tokens(tmp_path, 40, "narrow", "uint16")
    pipe = tp.mix({"wide": wide, "narrow": narrow}).batch(7).collate()
    found = torch.cat([batch["input_ids"] for batch in pipe])
    assert found.dtype == torch.int64
    assert sorted(found.flatten().tolist()) == sorted([*range(40 * LENGTH)] * 2)


def test_a_batch_may_be_changed_and_the_next_ones_are_as_they_were(tmp_path):
    for make in (tokens, even, tensors, mixed):
        for finish in (FINISHES["collate"], FINISHES["pad_collate"]):
            pipe = finish(make(tmp_path, 300).batch(50))
            wanted = [batch["input_ids"].clone() for batch in pipe]
            pipe.load_state_dict(pipe.state_at(0, epoch=0))
            for batch, before in zip(pipe, wanted, strict=True):
                assert torch.equal(batch["input_ids"], before)
                batch["input_ids"].zero_()
