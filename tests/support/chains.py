"""Chains of stages as tuples, which print, and build the pipeline that they name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import trainpipes as tp

__all__ = ["Chain", "Stage", "build", "first_number", "marked", "pieces", "row", "tp_plain"]

#: A name and options.
Stage = tuple[Any, ...]


class Chain(NamedTuple):
    """A source and the stages above it."""

    source: Stage
    stages: tuple[Stage, ...] = ()

    @property
    def shards(self) -> int:
        return next((stage[1] for stage in self.stages if stage[0] == "sharding_filter"), 1)

    @property
    def endless(self) -> bool:
        if ("repeat", None) in self.stages:
            return True
        return self.source[0] == "mix" and dict(self.source[2])["stop"] == "repeat"


def row(x: int) -> dict[str, Any]:
    """Row ``x``: all else follows from that."""
    ids = [x + 1] * (x * 7 % 5 + (x % 3 > 0))
    return {"x": x, "p": 0, "g": x * x % 23, "s": "t" * (x % 4), "ids": ids}


class KeepsBack(tp.StatefulStage):
    """Each row comes two rows later."""

    state_every = 3

    def start(self) -> None:
        self.waiting: list[Any] = []

    def process(self, row: Any) -> Iterator[Any]:
        self.waiting = [*self.waiting, row]
        if len(self.waiting) > 2:
            first, *self.waiting = self.waiting
            yield first

    def finish(self) -> Iterator[Any]:
        yield from self.waiting

    def state_dict(self) -> Any:
        return [tp_plain(row) for row in self.waiting]

    def load_state_dict(self, state: Any) -> None:
        self.waiting = list(state)


class Changes(tp.StatefulStage):
    """Rows whose ``g`` is larger than that of the last row given, or far smaller."""

    state_every = 5

    def start(self) -> None:
        self.last = -1

    def process(self, row: Any) -> list[Any]:
        if self.last < row["g"] or row["g"] < self.last - 12:
            self.last = int(row["g"])
            return [row]
        return []

    def state_dict(self) -> Any:
        return {"last": self.last}

    def load_state_dict(self, state: Any) -> None:
        self.last = state["last"]


class Numbered(tp.StatefulStage):
    """Rows with the number of those before, in ``n``."""

    state_every = 4

    def start(self) -> None:
        self.count = 0

    def process(self, row: Any) -> Iterator[Any]:
        yield {**row, "n": self.count}
        self.count += 1

    def state_dict(self) -> Any:
        return (self.count,)

    def load_state_dict(self, state: Any) -> None:
        (self.count,) = state


STATEFUL = {"keeps back": KeepsBack, "changes": Changes, "numbered": Numbered}


def tp_plain(value: Any) -> Any:
    """A value of Python lists, dicts and numbers alone."""
    if isinstance(value, dict):
        return {key: tp_plain(one) for key, one in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    return [tp_plain(one) for one in value] if isinstance(value, list | tuple) else value


def marked(row: Any) -> Any:
    return {**row, "m": row["x"] * 3}


def with_a_draw(row: Any, rng: Any) -> Any:
    return {**row, "r": int(rng.integers(1000))}


def pieces(row: Any) -> list[Any]:
    return [{**row, "p": row["p"] * 10 + n + 1} for n in range(row["x"] % 4)]


def columns_marked(columns: pa.Table) -> pa.Table:
    return columns.append_column("m", pc.multiply(columns["x"], 3))


class Keeps:
    """A predicate on rows."""

    def __init__(self, modulus: int) -> None:
        self.modulus = modulus

    def __call__(self, row: Any) -> bool:
        return bool(row["x"] % self.modulus != 1)


def first_number(item: Any) -> int:
    """A number of an item of batches: that of its first row."""
    while isinstance(item, list):
        item = item[0]
    value = tp_plain(item["input_ids" if "input_ids" in item else "x"])
    while isinstance(value, list):
        value = value[0]
    return int(value)


class KeepsBatches:
    """A predicate on batches."""

    def __init__(self, modulus: int) -> None:
        self.modulus = modulus

    def __call__(self, batch: Any) -> bool:
        return first_number(batch) % self.modulus != 1


def whole(batch: Any) -> Any:
    return batch


class Rows:
    """Makes the rows of an iterable."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __call__(self) -> Iterator[dict[str, Any]]:
        return map(row, range(self.first, self.first + self.count))


SCHEMA = pa.Table.from_pylist([row(1)]).schema


def table(first: int, count: int) -> pa.Table:
    return pa.Table.from_pylist(list(Rows(first, count)()), SCHEMA)


def parquet(folder: Path, first: int, groups: tuple[int, ...]) -> str:
    """Row groups of these sizes, two in each file."""
    name = f"{first}-{'-'.join(map(str, groups))}"
    if not (folder / name).exists():
        (folder / name).mkdir()
        for number in range(0, len(groups), 2):
            with pq.ParquetWriter(folder / name / f"{number:03}.parquet", SCHEMA) as writer:
                for size in groups[number : number + 2]:
                    writer.write_table(table(first, size), row_group_size=max(1, size))
                    first += size
    return str(folder / name)


# Building


def source_of(source: Stage, folder: Path) -> tp.Pipeline:
    kind, *given = source
    if kind == "arrow":
        return tp.from_arrow(table(*given))
    if kind == "dataset":
        return tp.from_dataset(list(Rows(*given)()))
    if kind == "iterable":
        return tp.from_iterable(Rows(*given))
    if kind == "parquet":
        return tp.list_files(f"{parquet(folder, *given)}/*.parquet").read_parquet()
    if kind == "concat":
        return tp.concat(*(build(chain, folder) for chain in given[0]))
    sources, options = given
    return tp.mix({name: build(chain, folder) for name, chain in sources}, **dict(options))


def build(chain: Chain, folder: Path) -> tp.Pipeline:
    """The pipeline that a chain names."""
    pipe = source_of(chain.source, folder)
    for name, *given in chain.stages:
        pipe = pipe.cache(folder / "kept") if name == "cache" else ADD[name](pipe, *given)
    return pipe


ADD: dict[str, Any] = {
    "map": lambda p: p.map(marked),
    "map rng": lambda p: p.map(with_a_draw, rng=True),
    "map_batches": lambda p: p.map_batches(columns_marked),
    "filter": lambda p, k: p.filter(Keeps(k)),
    "filter columns": lambda p, k: p.filter(pc.field("g") > k),
    "flat_map": lambda p: p.flat_map(pieces),
    "deduplicate": lambda p, *columns: p.deduplicate(list(columns)),
    "stateful": lambda p, name: p.then(STATEFUL[name]()),
    "shuffle": lambda p, size, seed: p.shuffle(size, seed=seed),
    "shuffle all": lambda p, seed: p.shuffle(scope="global", seed=seed),
    "sample": lambda p, share, seed: p.sample(share, seed=seed),
    "select": lambda p: p.select(["x", "p", "g", "ids"]),
    "take": lambda p, n: p.take(n),
    "skip": lambda p, n: p.skip(n),
    "repeat": lambda p, n: p.repeat(n),
    "sharding_filter": lambda p, n, split: p.sharding_filter(n, split=split),
    "pack": lambda p, size, method, buffer: p.pack(
        size, method=method, column="ids", **({} if method == "concat" else {"buffer_size": buffer})
    ),
    "batch": lambda p, n, drop: p.batch(n, drop_last=drop),
    "batch tokens": lambda p, n, column: p.batch(max_tokens=n, column=column, overflow="alone"),
    "buckets": lambda p, n, drop, buffer, column: p.bucket_by_length(
        n, drop_last=drop, buffer_size=buffer, column=column, num_buckets=3
    ),
    "pad_collate": lambda p: p.pad_collate(),
    "collate": lambda p: p.collate(list),
    "map batch": lambda p: p.map(whole),
    "filter batch": lambda p, k: p.filter(KeepsBatches(k)),
}
