"""Chains of stages in any order, drawn: as tuples that print, shrink and build the pipeline they name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import trainpipes as tp

__all__ = ["Chain", "Stage", "build", "draw_chain", "row"]

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


SCHEMA = pa.schema(
    [("x", pa.int64()), ("p", pa.int64()), ("g", pa.int64()), ("s", pa.string()), ("ids", pa.list_(pa.int64()))]
)  # fmt: skip


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
        pipe = ADD[name](pipe, *given)
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


# Drawing


def draw_chain(draw: random.Random) -> Chain:
    """A chain of any of them, with an order that mostly fits."""
    return Drawing(draw).whole()


class Drawing:
    """Draws the parts of one chain; rows of different sources have different numbers."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._sources = self._mixed = 0

    def _odds(self, share: float) -> bool:
        return self._draw.random() < share

    def whole(self) -> Chain:
        draw = self._draw
        level = 2 if self._odds(0.35) else 1 if self._odds(0.3) else 0
        batches = draw.choice(["", "", "rows", "tensors"]) if level == 2 else ""
        self._shards = shards = draw.choice([1, 1, 1, 1, 1, 2, 3, 4, 6, draw.randint(2, 8), 12, 24])
        source, batched = self._source(level, batches), bool(batches)
        split = "stride" if self._odds(0.1) and source[0] not in ("mix", "iterable") else "spans"
        stages: list[Stage] = []
        if source[0] != "mix" and self._odds(0.2):
            stages += self._counting(60)
        stages += [] if batched else self._rows(source)
        if batched or self._odds(0.75):
            stages += self._batches(batches, stages)
        mixes_forever = source[0] == "mix" and dict(source[2])["stop"] == "repeat"
        if self._odds(0.35):
            # After take and skip, which do not count over epochs.
            first = max(
                (n + 1 for n, s in enumerate(stages) if s[0] in ("take", "skip")), default=0
            )
            times = None if mixes_forever else draw.choice([1, 2, 2, 3, None])
            stages.insert(draw.randint(first, len(stages)), ("repeat", times))
        if shards > 1 or self._odds(0.3):
            stages.insert(draw.randint(0, len(stages)), ("sharding_filter", shards, split))
        return Chain(source, tuple(stages))

    def _source(self, level: int, batches: str, deep: int = 0) -> Stage:
        """A source, which gives batches of some kind or rows."""
        draw = self._draw
        if level == 2:
            return self._mix(batches, deep)
        if level == 1:
            plain = [Chain(self._plain("arrow", "dataset", "parquet")) for _ in range(2)]
            chains = [Chain(c.source, tuple(self._counting(40) * self._odds(0.3))) for c in plain]
            return "concat", tuple(chains)
        return self._plain("arrow", "arrow", "dataset", "iterable", "parquet", "parquet")

    def _plain(self, *kinds: str) -> Stage:
        draw, first = self._draw, 1000 * self._sources
        self._sources += 1
        kind = draw.choice(kinds)
        if kind == "parquet":
            groups = tuple(draw.randint(0, 12) for _ in range(draw.randint(1, 3)))
            return kind, first, (*groups, draw.randint(24, 30))
        return kind, first, draw.choice([24, 40, draw.randint(24, 60)])

    def _mix(self, batches: str, deep: int) -> Stage:
        draw = self._draw
        chains = []
        for _ in range(draw.choice([1, 2, 2, 2, 3 - deep])):
            inner = deep < 1 and self._odds(0.2)
            source = self._source(2 if inner else int(self._odds(0.15)), batches, deep + 1)
            made = inner and batches
            stages = [] if made else self._rows(source, short=True, alike=True)
            if batches and not made:
                stages.append(("batch", draw.randint(1, 5), self._odds(0.2)))
                stages += (
                    [(draw.choice(["pad_collate", "collate"]),)] if batches == "tensors" else []
                )
            self._mixed += 1
            chains.append((f"s{self._mixed}", Chain(source, tuple(stages))))
        weights = {name: draw.choice([1, 1, 2, 3, 0.5]) for name, _ in chains}
        stops = ["all_exhausted", "all_exhausted", "first_exhausted", *["repeat"] * (not deep)]
        return "mix", tuple(chains), (("weights", weights), ("stop", draw.choice(stops)))

    def _counting(self, most: int) -> list[Stage]:
        draw = self._draw
        return draw.choice([[("take", draw.randint(24, 24 + most))], [("skip", draw.randint(0, 9))],
                            [("skip", draw.randint(0, 9)), ("take", draw.randint(24, 24 + most))]])  # fmt: skip

    def _rows(self, source: Stage, short: bool = False, alike: bool = False) -> list[Stage]:
        """Stages on rows. ``alike``: that leave the columns as they are."""
        draw = self._draw
        objects = source[0] in ("dataset", "iterable") or source[0] == "mix"
        stages: list[Stage] = []
        packed = False
        for _ in range(draw.choice([0, 1, 1, 2, 3] if short else [0, 1, 2, 2, 3, 4, 5])):
            kinds = ["shuffle", "shuffle", "filter", "flat_map", "deduplicate", "stateful"]
            if packed:
                kinds = ["shuffle"]
            elif not alike:
                kinds += ["map", "map rng", "select"]
                kinds += [] if objects else ["map_batches", "filter columns"]
            elif not objects:
                kinds += ["filter columns"]
            if self._shards == 1 and self._odds(0.3):
                kinds += ["take", "skip"]
            if not packed and not alike and self._odds(0.3):
                kinds = ["pack"]
            kind = draw.choice(kinds)
            if kind == "deduplicate" and ("select",) in stages:
                kind = "shuffle"
            if kind == "map_batches" and (kind,) in stages:
                kind = "filter columns"
            stages.append(self._stage(kind))
            packed = packed or kind == "pack"
            objects = objects or kind in ("map", "map rng", "flat_map", "stateful")
        return stages

    def _batches(self, made: str, below: list[Stage]) -> list[Stage]:
        draw = self._draw
        packed = any(stage[0] == "pack" for stage in below)
        column = "input_ids" if packed else "ids"
        kinds = ["batch", "batch", "batch", "batch", "batch tokens", "buckets"]
        stages = [] if made else [self._stage(draw.choice(kinds), column)]
        tensors = made == "tensors"
        for _ in range(draw.choice([0, 1, 1, 2, 3, 4])):
            kinds = ["shuffle", "shuffle", "batch", "map batch", "filter batch", "take", "skip"]
            if not tensors and not made and len(stages) == 1:
                kinds += ["pad_collate", "pad_collate", "collate"]
            if self._shards > 1 and self._odds(0.8):
                kinds = [kind for kind in kinds if kind not in ("take", "skip")]
            kind = draw.choice(kinds)
            stages.append(self._stage(kind, most=4))
            tensors = tensors or kind in ("pad_collate", "collate")
        return stages

    def _stage(self, kind: str, column: str = "ids", most: int = 9) -> Stage:
        draw = self._draw
        options: dict[str, Any] = {
            "filter": lambda: (draw.choice([2, 3, 5]),),
            "filter columns": lambda: (draw.choice([0, 2, 5]),),
            "deduplicate": lambda: draw.choice([("g",), ("x",), ("g", "s"), ("s", "p")]),
            "stateful": lambda: (draw.choice(["keeps back", "changes"]),),
            "shuffle": lambda: (draw.choice([1, 3, 5, 9, 20, 40, 100]), draw.randint(0, 9)),
            "take": lambda: (draw.choice([0, 1, 3, 7, 20, 50]),),
            "skip": lambda: (draw.choice([0, 1, 3, 7, 20]),),
            "pack": lambda: (
                draw.choice([4, 8, 16]), draw.choice(["best_fit", "first_fit", "concat"]), draw.choice([5, 20, 40])
            ),
            "batch": lambda: (draw.randint(1, most), self._odds(0.25)),
            "batch tokens": lambda: (draw.choice([6, 12, 30]), column),
            "buckets": lambda: (draw.randint(1, 6), self._odds(0.25), draw.choice([4, 12, 40]), column),
            "filter batch": lambda: (draw.choice([2, 3, 5]),),
        }  # fmt: skip
        return (kind, *options.get(kind, tuple)())
