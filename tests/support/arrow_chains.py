"""Chains of Arrow only: a pipeline for each built-in stage that needs no Python object for a row.

Run as a program, with the names of a log file and of a folder: starts the chains in a process forked from one
that has imported the library and nothing more, takes batches, and prints as JSON what the log file, to which
a stand-in for pandas writes who imports it, got meanwhile; then of each chain alone.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader

import trainpipes as tp
from trainpipes import Pipeline

ROWS = 300
#: Of each chain: enough to go through more than one window and row group.
BATCHES = 40

Make = Callable[[Path], Any]


def rows(folder: Path) -> Pipeline:
    return tp.list_files(str(folder / "*.parquet")).read_parquet()


def plain(folder: Path) -> Pipeline:
    return rows(folder).select("number", "text", "input_ids")


def held(folder: Path) -> Pipeline:
    return tp.from_arrow(table()).select("number", "text", "input_ids")


def narrow() -> Pipeline:
    """The numbers in another type."""
    numbers = table().select(["number"])
    return tp.from_arrow(numbers.cast(pa.schema([("number", pa.int32())])))


def sharded(folder: Path) -> Pipeline:
    return rows(folder).sharding_filter(4).shuffle(64, seed=1)


def texts(folder: Path) -> Pipeline:
    return sharded(folder).select("number", "text", "said")


def tokens(folder: Path) -> Pipeline:
    return sharded(folder).select("input_ids")


def table() -> pa.Table:
    """Rows of every plain type. Made of Arrow's own memory, for what makes it of lists imports pandas."""
    edges = np.arange(0, 5 * ROWS + 1, 5)
    ids = _numbers(np.arange(5 * ROWS, dtype=np.int32) % 100)
    number = np.arange(ROWS)
    text = _numbers(number).cast(pa.string())
    columns = {
        "number": _numbers(number),
        "real": _numbers(number / 7),
        "flag": _numbers(number % 2).cast(pa.bool_()),
        "text": text,
        "said": text.cast(pa.large_string()),
        "group": text.dictionary_encode(),
        "day": _numbers(number).cast(pa.timestamp("us")),
        "input_ids": pa.ListArray.from_arrays(_numbers(edges.astype(np.int32)), ids),
        "wide": pa.LargeListArray.from_arrays(_numbers(edges), ids.cast(pa.int64())),
        "answer": pa.ListArray.from_arrays(
            _numbers(edges.astype(np.int32)), _numbers(np.arange(5 * ROWS) % 3 // 2)
        ),
        "even": pa.FixedSizeListArray.from_arrays(ids, 5),
    }
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def _numbers(values: Any) -> pa.Array:
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def pieces() -> pa.Table:
    return pa.concat_tables([table().slice(0, 7), table().slice(7, 150), table().slice(157)])


def bpe(folder: Path) -> str:
    return str(folder / "tokenizer.json")


def cached(folder: Path) -> Iterator[Any]:
    kept = plain(folder).select("number", "text").tokenize("bytes").cache(folder / "cache")
    chain = kept.sharding_filter(2).shuffle(64)
    batches = chain.select("number", "input_ids").batch(8).pad_collate()
    yield from batches
    yield from batches  # from what is there by now


def cached_with_holes(folder: Path) -> Iterator[Any]:
    kept = rows(folder).sample(0.5, seed=2).cache(folder / "holes")
    for _ in range(2):
        yield from kept.shuffle(64).batch(8).collate(format="arrow")


def resumed(pipe: Pipeline) -> Iterator[Any]:
    first = iter(pipe)
    yield next(first)
    state = pipe.state_dict()
    assert state is not None
    pipe.load_state_dict(state)
    yield from pipe


def padded(folder: Path) -> Pipeline:
    pipe = texts(folder).tokenize("bytes").select("number", "input_ids")
    return pipe.batch(8).pad_collate()


def written(folder: Path) -> Iterator[Any]:
    pipe = sharded(folder)
    yield from pipe.write_parquet(folder / "out-parquet").files
    yield from pipe.write_arrow(folder / "out-arrow").files
    yield from pipe.write_json(folder / "out-json").files
    yield from pipe.select("number", "input_ids").write_memmap(folder / "out.memmap")
    yield from pipe.to_map_dataset(folder / "rows.arrow")


def everything(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def renamed(table: pa.Table) -> dict[str, Any]:
    return {"n": table.column("number")}


NUMBERS = ("number", "real", "flag", "input_ids", "wide", "even")

CHAINS: dict[str, Make] = {
    "rows": lambda d: sharded(d).select(*NUMBERS),
    "batches as dicts": lambda d: sharded(d).select(*NUMBERS).batch(8),
    "stages of rows": lambda d: (
        rows(d).take(290).skip(3).enumerate().sample(0.9, seed=2)
        .sample(0.9, key=["number", "text", "real", "day", "flag"])
        .split({"a": 0.9, "b": 0.1}, key="text")["a"]
        .sharding_filter(4, tail="uneven").shuffle(64)
        .map_batches(everything, format="arrow").with_columns(renamed, format="arrow")
        .rename({"real": "r"}).drop_columns("text", "said", "day").select("index", "n", "r")
        .batch(8).repeat(2).pad_collate()
    ),
    "index": lambda d: (
        tp.list_files(str(d / "*.parquet")).read_parquet(["number"], index=str(d / "footers.index"))
        .sharding_filter(4, split="stride").batch(4).pad_collate()
    ),
    "tables in memory": lambda d: (
        tp.concat(tp.from_arrow(table()), tp.from_arrow(pieces())).shuffle(scope="global", seed=1)
        .select(*NUMBERS).batch(8).pad_collate()
    ),
    "a weighted sampler": lambda d: (
        tp.from_arrow(table()).shuffle(sampler=tp.samplers.WeightedRandomSampler([1.0] * ROWS, 90))
        .select("number").batch(8).pad_collate()
    ),
    "from_memmap": lambda d: (
        tp.from_memmap(d / "numbers.memmap").shuffle(scope="global").batch(8).pad_collate()
    ),
    "from_tensors": lambda d: tp.from_tensors(x=torch.arange(ROWS)).shuffle(64).batch(8),
    "tokenize bytes": lambda d: (
        texts(d).tokenize("bytes", max_length=3, add_eos=True, labels=True).select("input_ids")
        .batch(8).pad_collate()
    ),
    "tokenize a template": lambda d: (
        texts(d).tokenize("bytes", template="{text}: {said}").select("input_ids").batch(8)
        .pad_collate()
    ),
    "tokenize pairs": lambda d: (
        texts(d).tokenize(bpe(d), ["text", "said"], pair=True, engine="tokenizers")
        .select("input_ids").batch(8).pad_collate()
    ),
    "tokenize several columns": lambda d: (
        texts(d).tokenize(bpe(d), {"text": "a", "said": "b"}).select("a", "b").batch(8).pad_collate()
    ),
    "stages of tokens": lambda d: (
        tokens(d).truncate(4).truncate(3, truncation_side="left")
        .mask_tokens(mask_token_id=99, special_ids=[0], vocab_size=100, seed=1).batch(8).pad_collate()
    ),
    "add_labels": lambda d: (
        sharded(d).select("input_ids", "answer").add_labels(where="answer", ignore=7).batch(8)
        .pad_collate()
    ),
    "pack": lambda d: resumed(tokens(d).pack(16).batch(4).pad_collate()),
    "pack a stream": lambda d: (
        sharded(d).select("input_ids", "answer").pack(16, method="concat", along=["answer"])
        .batch(4).pad_collate()
    ),
    "bucket_by_length": lambda d: (
        tokens(d).bucket_by_length(8, num_buckets=2, buffer_size=64).pad_collate()
    ),
    "buckets of tokens": lambda d: (
        tokens(d).bucket_by_length(max_tokens=64, buffer_size=64).pad_collate()
    ),
    "batch by tokens": lambda d: tokens(d).batch(max_tokens=64).pad_collate(),
    "mix": lambda d: (
        tp.mix({"files": plain(d), "table": held(d)}, weights={"files": 2, "table": 1}, output_column="whose")
        .select("number", "whose").batch(8).collate(format="arrow")
    ),
    "mix by tokens": lambda d: (
        tp.mix({"files": plain(d), "table": held(d)}, weights={"files": 2, "table": 1}, weight_by="tokens")
        .sharding_filter(2).select("input_ids").batch(8).pad_collate()
    ),
    "concat of several types": lambda d: (
        tp.concat(plain(d).select("number"), narrow()).shuffle(64).batch(8).collate(format="arrow")
    ),
    "zip": lambda d: (
        plain(d).select("number").zip(held(d).select("input_ids"), tp.from_tensors(y=torch.zeros(ROWS)))
        .shuffle(64).batch(8).pad_collate()
    ),
    "cache": cached,
    "cache of some rows": cached_with_holes,
    "pad_collate": lambda d: (
        sharded(d).select(*NUMBERS).batch(8)
        .pad_collate(
            max_length=4, padding_side="left", truncation_side="left", mask={"input_ids": "attention_mask"}
        )
    ),
    **{
        f"collate {kind}": lambda d, kind=kind: (
            resumed(
                sharded(d).select("number", "real", "flag", "even").batch(8)
                .collate(everything, format=kind)
            )
        )
        for kind in ("arrow", "numpy", "torch")
    },
    "writers": written,
    "recipe": lambda d: tp.recipe(
        "pretrain", files=str(d / "*.parquet"), tokenizer="bytes", max_length=16, batch_size=4
    ),
    "explain": lambda d: iter([str(texts(d).tokenize("bytes").batch(8).pad_collate().explain())]),
    "Loader": lambda d: tp.Loader(padded(d)),
    "Loader with workers": lambda d: tp.Loader(padded(d), num_workers=2),
    "DataLoader with workers": lambda d: DataLoader(padded(d), batch_size=None, num_workers=2),
}  # fmt: skip


def imported(log: Path, folder: Path, *names: str) -> str:
    """Who imported pandas while chains ran in one process; nothing if nobody did."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(folder, *names))
    process.start()
    process.join()
    found = log.read_text() if log.exists() else ""
    log.unlink(missing_ok=True)
    return found if process.exitcode == 0 else f"exit code {process.exitcode}\n{found}"


def _run(folder: Path, *names: str) -> None:
    for name in names:
        count = sum(1 for _ in islice(CHAINS[name](folder), BATCHES))
        assert count, f"{name} gives nothing"


def main(log: Path, folder: Path) -> None:
    with suppress(FileNotFoundError):
        raise AssertionError(f"an import alone:\n{log.read_text()}")
    found = dict.fromkeys(CHAINS, "")
    if imported(log, folder, *CHAINS):  # which of them
        for made in (
            *folder.glob("out*"),
            folder / "cache",
            folder / "holes",
            folder / "rows.arrow",
        ):
            shutil.rmtree(made, ignore_errors=True)
        found = {name: imported(log, folder, name) for name in CHAINS}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
