"""A small pipeline for each public stage, with that stage at each place where it can stand.

Tests of resuming and of elasticity go through all of them, and fail for a stage that is not here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch.utils.data import SubsetRandomSampler

import trainpipes as tp
from trainpipes import Pipeline
from trainpipes.runtime.stage import Stage

Make = Callable[[Path], Pipeline]


@cache
def files(folder: Path) -> str:
    """Three Parquet files of 97 rows in uneven row groups, one of them without rows."""
    rng = np.random.default_rng(7)
    start = 0
    for number, groups in enumerate([(13, 1, 0, 20), (0,), (30, 33)]):
        path = folder / f"part-{number}.parquet"
        with pq.ParquetWriter(path, schema()) as writer:
            for rows in groups:
                ids = range(start, start + rows)
                ragged = [rng.integers(0, 9, int(rng.integers(0, 6))).tolist() for _ in ids]
                texts = [f"row {i} " + "and more " * (i % 4) for i in ids]
                columns = {
                    "x": ids,
                    "text": texts,
                    "answer": [f"a{i}" for i in ids],
                    "tokens": ragged,
                }
                writer.write_table(pa.table(columns, schema=schema()))
                start += rows
    return str(folder / "*.parquet")


def schema() -> pa.Schema:
    return pa.schema(
        [
            ("x", pa.int64()),
            ("text", pa.string()),
            ("answer", pa.string()),
            ("tokens", pa.list_(pa.int32())),
        ]
    )


def rows(folder: Path) -> Pipeline:
    return tp.list_files(files(folder)).read_parquet()


def sharded(folder: Path, shards: int = 12, buffer: int = 9) -> Pipeline:
    return rows(folder).sharding_filter(shards).shuffle(buffer, seed=3)


class Squares:
    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


SQUARES = Squares()
SAMPLER = SubsetRandomSampler(range(5, 40))


def count_61() -> Iterator[int]:
    return iter(range(61))


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "x": row["x"] * 2}


def odd(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 2)


def negative(columns: dict[str, Any]) -> dict[str, Any]:
    return {"x": -columns["x"]}


def first_of(batch: list[Any]) -> Any:
    return batch[0]


def some(batch: list[Any]) -> bool:
    return len(batch[0]["text"]) > 9


PAIRS = {"text": "input_ids", "answer": "target_ids"}

#: Pipelines that end. The name says which stage it is for.
FINITE: dict[str, Make] = {
    "list_files": lambda f: (
        tp.list_files(sorted(map(str, Path(files(f)).parent.iterdir()))).sharding_filter(4).shuffle(seed=1)
    ),
    "list_files / read": lambda f: tp.list_files(files(f)).shuffle(seed=1).read_parquet().batch(8),
    "read_parquet": lambda f: rows(f).batch(5),
    "read_parquet / columns": lambda f: rows(f).sharding_filter(4).select("x").batch(4).collate(),
    "from_arrow": lambda f: tp.from_arrow(pa.table({"x": range(50)})).sharding_filter(4).batch(3).collate(),
    "from_dataset": lambda f: tp.from_dataset(SQUARES).sharding_filter(4).shuffle(7).batch(4).collate(),
    "from_dataset / sampler": lambda f: (
        tp.from_dataset(SQUARES, SAMPLER).sharding_filter(4).batch(3)
    ),
    "from_tensors": lambda f: (
        tp.from_tensors(x=np.arange(60.0), y=np.arange(120).reshape(60, 2))
        .sharding_filter(4).shuffle(7).batch(4).collate()
    ),
    "from_iterable": lambda f: tp.from_iterable(count_61).shuffle(9).batch(4),
    "from_iterable / sharded": lambda f: (
        tp.from_iterable(count_61).skip(2).take(50).sharding_filter(4).shuffle(9).batch(4)
    ),
    "sharding_filter": lambda f: rows(f).sharding_filter(24).batch(2),
    "sharding_filter / stride": lambda f: rows(f).sharding_filter(6, split="stride").batch(4),
    "shuffle": lambda f: rows(f).shuffle(20).batch(4),
    "shuffle / rows": lambda f: sharded(f, buffer=4),
    "shuffle / one span": lambda f: sharded(f, buffer=97).batch(4),
    "map": lambda f: sharded(f).map(double).batch(4).map(first_of),
    "map_batches": lambda f: sharded(f).map_batches(negative, format="numpy").batch(4).collate(),
    "filter": lambda f: sharded(f).filter(odd).batch(4),
    "filter / before": lambda f: (
        rows(f).filter(pc.field("x") > 20)
        .sharding_filter(4).shuffle(9).batch(4)
    ),
    "filter / batches": lambda f: sharded(f).batch(4).filter(some),
    "select": lambda f: sharded(f).select("x", "answer").batch(4),
    "rename": lambda f: sharded(f).rename({"x": "y"}).batch(4),
    "tokenize": lambda f: sharded(f).tokenize("bytes", PAIRS, max_length=16, eos=True).batch(4).pad_collate(),
    "tokenize / joined": lambda f: (
        sharded(f).tokenize("bytes", ["text", "answer"], labels="answer").batch(4).pad_collate()
    ),
    "batch": lambda f: sharded(f).batch(7),
    "batch / drop_last": lambda f: sharded(f).batch(7, drop_last=True),
    "pad_collate": lambda f: sharded(f).batch(4).pad_collate(pad_to_multiple_of=4),
    "collate": lambda f: sharded(f).select("x").batch(4).collate(),
    "collate / arrow": lambda f: sharded(f).batch(4).collate(format="arrow"),
    "repeat": lambda f: sharded(f).batch(8).repeat(2),
    "repeat / rows": lambda f: rows(f).shuffle(9).repeat(2).batch(8),
    "take": lambda f: rows(f).take(40).sharding_filter(4).shuffle(9).batch(4),
    "take / batches": lambda f: sharded(f).batch(4).skip(3).take(15),
    "take / on the way": lambda f: rows(f).shuffle(20).filter(odd).take(30).batch(4),
    "skip": lambda f: rows(f).skip(11).sharding_filter(4).shuffle(9).batch(4),
    "skip / on the way": lambda f: rows(f).filter(odd).skip(7).batch(4),
    "pin": lambda f: sharded(f).select("x").batch(4).collate().pin(),
}  # fmt: skip

#: Pipelines without an end.
ENDLESS: dict[str, Make] = {
    "repeat / batches": lambda f: sharded(f).batch(8).repeat(),
    "repeat / across": lambda f: sharded(f).repeat().batch(8),
    "repeat / filtered": lambda f: sharded(f, 4).filter(odd).repeat().batch(4),
    "repeat / filtered batches": lambda f: sharded(f, 4).filter(odd).batch(4).repeat(),
    "take / across": lambda f: rows(f).shuffle(20).take(30).repeat().batch(4),
    "skip / across": lambda f: rows(f).filter(odd).skip(30).repeat().batch(4),
    "repeat / part": lambda f: sharded(f).batch(4).skip(2).take(11).repeat(),
}


def public_stages() -> set[str]:
    """Names of all stages that a pipeline can have, as its methods and the starting functions."""
    import pkgutil
    from importlib import import_module

    found = set()
    for package in ("stages", "sources"):
        path = Path(tp.__file__).parent / package
        for module in pkgutil.iter_modules([str(path)], f"trainpipes.{package}."):
            exported = import_module(module.name)
            for name in exported.__all__:
                value = getattr(exported, name)
                if inspect.isclass(value) and issubclass(value, Stage) and value is not Stage:
                    found.add(value(**needed(value)).name)
    return found


def needed(stage: type[Stage]) -> dict[str, Any]:
    """Options without which a stage cannot be made."""
    return {
        "ListFiles": {"urls": "x"}, "FromArrow": {"table": pa.table({"x": [1]})},
        "FromDataset": {"dataset": [1]}, "FromTensors": {"tensors": ([1],)},
        "FromIterable": {"factory": list}, "Map": {"fn": len}, "MapBatches": {"fn": len},
        "Filter": {"predicate": len}, "Select": {"columns": ["x"]}, "Rename": {"names": {"x": "y"}},
        "Tokenize": {"tokenizer": "bytes"},
    }.get(stage.__name__, {})  # fmt: skip
