"""The pipelines whose states stand in ``golden/states``: small ones of every kind.

Never change what is here: a state belongs to its pipeline. A new kind of pipeline is a new entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import trainpipes as tp

__all__ = ["CHANGED", "COUNTED", "FOLDER", "UNCOUNTED", "Make"]

#: Makes a pipeline, given an empty folder for files of its own.
Make = Callable[[Path], tp.Pipeline]

#: What was saved; the rows are its Parquet files.
FOLDER = Path(__file__).parents[1] / "golden" / "states"


def rows() -> tp.Pipeline:
    """97 rows in row groups of 13, 1, 20, 30 and 33: a number x, a text and 0 to 5 tokens."""
    return tp.list_files(str(FOLDER / "rows-*.parquet")).read_parquet()


def sharded(buffer: int = 9, **options: Any) -> tp.Pipeline:
    return rows().sharding_filter(4, **options).shuffle(buffer, seed=3)


def table(first: int, count: int) -> pa.Table:
    x = np.arange(first, first + count)
    return pa.table({"x": x, "tokens": [[int(n)] * (int(n) % 4) for n in x]})


def part(first: int, count: int) -> tp.Pipeline:
    return tp.from_arrow(table(first, count)).shuffle(5, seed=first)


class Squares:
    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


class EverySeventh:
    """A sampler of the user's own: 53 rows, each 7 after the one before."""

    def __len__(self) -> int:
        return 53

    def __iter__(self) -> Iterator[int]:
        return (7 * n % 61 for n in range(53))


class Fours:
    """A batch sampler of the user's own."""

    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Iterator[list[int]]:
        return ([7 * n % 61, n, n + 1, n + 2] for n in range(13))


def count_61() -> Iterator[int]:
    return iter(range(61))


def objects() -> Iterator[dict[str, Any]]:
    return ({"x": n, "name": f"row {n}"} for n in range(61))


def odd(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 2)


def negative(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "x": -row["x"]}


def jitter(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**row, "noise": rng.random()}


def numbered(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "y": columns["x"] + 1}


def words(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each word, none for the first rows."""
    return ({"x": row["x"], "word": word} for word in row["text"].split() if row["x"] > 2)


def long(batch: list[Any]) -> bool:
    return len(batch[0]["text"]) > 9


def memmap(folder: Path) -> tp.Pipeline:
    path = folder / "rows.memmap"
    made = ({"x": n, "tokens": list(range(n % 7))} for n in range(61))
    tp.write_memmap(path, made, overwrite=True)
    return tp.from_memmap(path)


def drawn() -> tp.samplers.WeightedRandomSampler:
    return tp.samplers.WeightedRandomSampler(range(61), 50, seed=2)


#: The position of each shard follows by arithmetic.
COUNTED: dict[str, Make] = {
    "in file order, one shard": lambda _: rows().batch(5),
    "in file order": lambda _: rows().sharding_filter(4).batch(5),
    "rows": lambda _: sharded(4),
    "shuffled": lambda _: sharded().batch(4),
    "one span": lambda _: sharded(97).batch(4),
    "drop_last": lambda _: sharded().batch(7, drop_last=True),
    "tokenized and padded": lambda _: sharded().tokenize("bytes").batch(4).pad_collate(),
    "mapped": lambda _: sharded().map(negative).map(jitter, rng=True).batch(4),
    "stride": lambda _: rows().sharding_filter(4, split="stride").batch(4),
    "ragged": lambda _: sharded(tail="uneven").batch(4),
    "files": lambda _: (
        tp.list_files(str(FOLDER / "rows-*.parquet")).shuffle(seed=1).read_parquet()
        .sharding_filter(4).batch(4)
    ),
    "concat": lambda _: (
        tp.concat(rows().select("x"), tp.from_arrow(table(100, 50)).select("x"))
        .sharding_filter(4).shuffle(20).batch(4).collate()
    ),
    "cache": lambda _: rows().tokenize("bytes").cache().sharding_filter(4).shuffle(9).batch(4).pad_collate(),
    "dataset": lambda _: tp.from_dataset(Squares()).sharding_filter(4).shuffle(7).batch(4).collate(),
    "tensors": lambda _: tp.from_tensors(x=np.arange(61.0)).sharding_filter(4).shuffle(7).batch(4).collate(),
    "memmap": lambda f: memmap(f).sharding_filter(4).shuffle(7).batch(4).pad_collate(),
    "drawn": lambda f: memmap(f).sharding_filter(4).shuffle(sampler=drawn()).batch(4).pad_collate(),
    "drawn by torch": lambda _: (
        tp.from_dataset(Squares()).shuffle(sampler=EverySeventh()).sharding_filter(4).batch(3)
    ),
    "shuffled globally": lambda _: (
        tp.from_tensors(x=np.arange(61)).skip(3).sharding_filter(4).shuffle(scope="global").batch(4).collate()
    ),
    "take rows": lambda _: rows().skip(11).take(70).sharding_filter(4).shuffle(9).batch(4),
    "take batches": lambda _: sharded().batch(4).skip(3).take(15),
    "batch, repeat twice": lambda _: sharded().batch(9).repeat(2),
    "batch, repeat": lambda _: sharded().batch(9).repeat(),
    "batch, take, repeat": lambda _: sharded().batch(4).skip(2).take(11).repeat(),
    "repeat, batch": lambda _: sharded().repeat().batch(9),
    "repeat twice, batch over one span": lambda _: rows().shuffle(9).repeat(2).batch(9),
    "repeat globally, batch": lambda _: (
        tp.from_dataset(Squares()).sharding_filter(4).shuffle(scope="global").repeat().batch(9)
    ),
}  # fmt: skip

#: It does not.
UNCOUNTED: dict[str, Make] = {
    "iterable": lambda _: tp.from_iterable(count_61).shuffle(9).batch(4),
    "iterable, sharded": lambda _: tp.from_iterable(count_61).skip(2).sharding_filter(4).shuffle(9).batch(4),
    "iterable, columns found": lambda _: (
        tp.from_iterable(objects).map_batches(numbered, format="numpy").sharding_filter(4).batch(4)
    ),
    "sampler": lambda _: tp.from_dataset(Squares(), EverySeventh()).sharding_filter(4).batch(3),
    "batch sampler": lambda _: (
        tp.from_dataset(Squares(), batch_sampler=Fours()).sharding_filter(2).collate()
    ),
    "filter": lambda _: sharded().filter(odd).batch(4),
    "filter before": lambda _: (
        rows().filter(pc.bit_wise_and(pc.field("x"), pa.scalar(3, pa.int64())) != 1)
        .sharding_filter(4).shuffle(9).batch(4)
    ),
    "filter batches": lambda _: sharded().batch(4).filter(long),
    "filter, ragged": lambda _: sharded(tail="uneven").filter(odd, version="1").batch(2),
    "filter, cache": lambda _: rows().filter(odd).cache().sharding_filter(4).shuffle(9).batch(4),
    "filter, repeat": lambda _: sharded().filter(odd).repeat().batch(4),
    "filter, batch, repeat": lambda _: sharded().filter(odd).batch(4).repeat(),
    "take on the way": lambda _: rows().shuffle(20).filter(odd).take(40).batch(4),
    "sample": lambda _: sharded().sample(0.6).batch(4),
    "split": lambda _: (
        rows().split({"train": 0.7, "valid": 0.3}, key="text")["train"].sharding_filter(4).shuffle(9).batch(4)
    ),
    "flat_map": lambda _: sharded(4).flat_map(words).batch(9).collate(),
    "pack": lambda _: sharded(4).pack(12, column="tokens", buffer_size=8).batch(2).pad_collate(),
    "pack, first fit": lambda _: sharded().pack(6, method="first_fit", column="tokens", max_documents=2),
    "pack, concat": lambda _: sharded(4).pack(7, method="concat", column="tokens").batch(3),
    "pack, repeat": lambda _: sharded(4).pack(8, column="tokens", buffer_size=5).repeat().batch(2),
    "buckets": lambda _: sharded(4).bucket_by_length(3, column="tokens", buffer_size=10, num_buckets=3),
    "token budget": lambda _: (
        sharded(4).batch(max_tokens=24, max_rows=6, column="tokens").pad_collate()
    ),
    "mix": lambda _: (
        tp.mix({"a": part(0, 60), "b": part(50, 41)}, weights={"a": 0.6, "b": 0.4}, output_column="source")
        .sharding_filter(4).batch(3)
    ),
    "mix by tokens": lambda _: (
        tp.mix({"a": part(0, 60), "b": part(50, 41)}, weights={"a": 2, "b": 1}, weight_by="tokens",
               column="tokens")
        .sharding_filter(4).batch(3).pad_collate()
    ),
    "mix, repeat": lambda _: (
        tp.mix({"a": part(0, 40), "b": part(50, 14)}, weights={"a": 0.6, "b": 0.4}, stop="repeat")
        .sharding_filter(4).batch(2)
    ),
    "mix, pack": lambda _: (
        tp.mix({"a": part(0, 80).filter(odd), "b": part(30, 60)}, weights={"a": 1, "b": 1})
        .sharding_filter(4).pack(8, column="tokens", buffer_size=5).batch(2)
    ),
    "repeat twice, batch over spans": lambda _: sharded().repeat(2).batch(9),
}  # fmt: skip

#: Batch sizes that a run is saved with first, and goes on with.
CHANGED: dict[str, Callable[[int], tp.Pipeline]] = {
    "changed": lambda size: sharded().batch(size),
    "changed, file order": lambda size: (
        rows().sharding_filter(4, split="stride").batch(size).skip(1)
    ),
    "changed, batch, repeat": lambda size: sharded().batch(size).repeat(),
    "changed, repeat, batch": lambda size: sharded().repeat().batch(size),
    "changed, iterable": lambda size: tp.from_iterable(count_61).batch(size),
}
