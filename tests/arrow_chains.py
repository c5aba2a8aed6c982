"""Chains of Arrow only: a pipeline for each built-in stage that needs no Python object for a row.

Run as a program, with the names of a log file and of a folder: starts each chain in a process forked from one
that has imported the library and nothing more, takes batches, and prints as JSON what the log file, to which
a stand-in for pandas writes who imports it, got meanwhile.
"""

from __future__ import annotations

import json
import multiprocessing
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


def loaded(workers: int) -> Make:
    def make(folder: Path) -> Any:
        pipe = texts(folder).tokenize("bytes").select("number", "input_ids")
        return tp.Loader(pipe.batch(8).pad_collate(), num_workers=workers)

    return make


def plain_loader(folder: Path) -> Any:
    pipe = texts(folder).tokenize("bytes").select("number", "input_ids").batch(8).pad_collate()
    return DataLoader(pipe, batch_size=None, num_workers=2)


def everything(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def renamed(table: pa.Table) -> dict[str, Any]:
    return {"n": table.column("number")}


NUMBERS = ("number", "real", "flag", "input_ids", "wide", "even")

CHAINS: dict[str, Make] = {
    "read_parquet": lambda d: rows(d).batch(16).collate(format="arrow"),
    "index": lambda d: (
        tp.list_files(str(d / "*.parquet"))
        .read_parquet(["number"], index=str(d / "footers.index"))
        .batch(4)
        .pad_collate()
    ),
    "shuffle a buffer": lambda d: sharded(d).select(*NUMBERS).batch(8).pad_collate(),
    "shuffle all": lambda d: (
        tp.from_arrow(table()).shuffle(scope="global", seed=1).select(*NUMBERS).batch(8).pad_collate()
    ),
    "sharding by stride": lambda d: (
        rows(d).sharding_filter(4, split="stride").select("number").batch(8).pad_collate()
    ),
    "sharding by bytes": lambda d: (
        rows(d)
        .sharding_filter(4, balance="bytes", tail="ragged")
        .shuffle(64)
        .select("input_ids")
        .batch(8)
        .pad_collate()
    ),
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
    "truncate": lambda d: (
        tokens(d).truncate(3).truncate(2, truncation_side="left").batch(8).pad_collate()
    ),
    "pack": lambda d: tokens(d).pack(16).batch(4).pad_collate(),
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
    "mask_tokens": lambda d: (
        tokens(d).mask_tokens(mask_token_id=99, special_ids=[0], vocab_size=100).batch(8).pad_collate()
    ),
    "add_labels": lambda d: (
        sharded(d).select("input_ids", "answer").add_labels(where="answer", ignore=7).batch(8)
        .pad_collate()
    ),
    "mix": lambda d: (
        tp.mix({"files": plain(d), "table": held(d)}, weights={"files": 2, "table": 1}, output_column="whose")
        .select("number", "whose").batch(8).collate(format="arrow")
    ),
    "mix by tokens": lambda d: (
        tp.mix({"files": plain(d), "table": held(d)}, weights={"files": 2, "table": 1}, weight_by="tokens")
        .sharding_filter(2).select("input_ids").batch(8).pad_collate()
    ),
    "concat": lambda d: (
        tp.concat(plain(d), held(d)).shuffle(64).select("number", "input_ids").batch(8)
        .pad_collate()
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
    "collate arrow": lambda d: sharded(d).batch(8).collate(everything, format="arrow"),
    "collate numpy": lambda d: (
        sharded(d).select("number", "real", "flag", "even").batch(8)
        .collate(everything, format="numpy")
    ),
    "collate torch": lambda d: (
        sharded(d).select("number", "real", "flag", "even").batch(8)
        .collate(everything, format="torch")
    ),
    "batches as dicts": lambda d: sharded(d).select(*NUMBERS).batch(8),
    "from_arrow": lambda d: (
        tp.from_arrow(table()).sharding_filter(4).shuffle(64).select(*NUMBERS).batch(8)
        .pad_collate()
    ),
    "from_arrow of several chunks": lambda d: (
        tp.from_arrow(pieces()).shuffle(scope="global").select(*NUMBERS).batch(8).pad_collate()
    ),
    "from_memmap": lambda d: (
        tp.from_memmap(d / "numbers.memmap").shuffle(scope="global").batch(8).pad_collate()
    ),
    "from_tensors": lambda d: tp.from_tensors(x=torch.arange(ROWS)).shuffle(64).batch(8),
    "rename": lambda d: (
        sharded(d).select("number", "real").rename({"number": "n"}).batch(8).pad_collate()
    ),
    "sample": lambda d: sharded(d).sample(0.5).select("number").batch(8).pad_collate(),
    "sample by keys": lambda d: (
        sharded(d).sample(0.5, key=["number", "text", "real", "day", "flag"]).select("number")
        .batch(8).pad_collate()
    ),
    "split by key": lambda d: (
        sharded(d).split({"a": 0.5, "b": 0.5}, key="text")["a"].select("number").batch(8)
        .pad_collate()
    ),
    "enumerate": lambda d: (
        rows(d).enumerate().sharding_filter(4).shuffle(64).select("index", "number").batch(8).pad_collate()
    ),
    "draw": lambda d: (
        tp.from_arrow(table()).shuffle(sampler=tp.samplers.WeightedRandomSampler([1.0] * ROWS, 90))
        .select("number").batch(8).pad_collate()
    ),
    "take, skip, repeat": lambda d: (
        rows(d).take(50).skip(3).select("number").batch(8).repeat(2).pad_collate()
    ),
    "rows": lambda d: sharded(d).select(*NUMBERS),
    "map_batches": lambda d: (
        sharded(d).map_batches(everything, format="arrow").select("number").batch(8).pad_collate()
    ),
    "with_columns": lambda d: (
        sharded(d).with_columns(renamed, format="arrow").select("n", "number").batch(8).pad_collate()
    ),
    "drop_columns": lambda d: sharded(d).drop_columns("text", "said", "day").batch(8),
    "write_parquet": lambda d: iter(sharded(d).write_parquet(d / "out-parquet").files),
    "write_arrow": lambda d: iter(sharded(d).write_arrow(d / "out-arrow").files),
    "write_json": lambda d: iter(sharded(d).write_json(d / "out-json").files),
    "write_memmap": lambda d: iter(
        sharded(d).select("number", "input_ids").write_memmap(d / "out.memmap")
    ),
    "to_map_dataset": lambda d: iter(sharded(d).to_map_dataset()),
    "a state": lambda d: resumed(sharded(d).select("number").batch(8).pad_collate()),
    "a state of packing": lambda d: resumed(tokens(d).pack(16).batch(2).pad_collate()),
    "recipe": lambda d: tp.recipe(
        "pretrain", files=str(d / "*.parquet"), tokenizer="bytes", max_length=16, batch_size=4
    ),
    "explain": lambda d: iter([str(texts(d).tokenize("bytes").batch(8).pad_collate().explain())]),
    "Loader": loaded(0),
    "Loader with workers": loaded(2),
    "DataLoader with workers": plain_loader,
}  # fmt: skip


def imported(log: Path, name: str, folder: Path) -> str:
    """Who imported pandas while a chain ran; nothing if nobody did."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(name, folder))
    process.start()
    process.join()
    found = log.read_text() if log.exists() else ""
    log.unlink(missing_ok=True)
    return found if process.exitcode == 0 else f"exit code {process.exitcode}\n{found}"


def _run(name: str, folder: Path) -> None:
    count = sum(1 for _ in islice(CHAINS[name](folder), BATCHES))
    assert count, f"{name} gives nothing"


def main(log: Path, folder: Path) -> None:
    with suppress(FileNotFoundError):
        raise AssertionError(f"an import alone:\n{log.read_text()}")
    sys.stdout.write(json.dumps({name: imported(log, name, folder) for name in CHAINS}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
