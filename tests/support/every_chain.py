"""Chains as people write them who come from other libraries, and what plain Python over lists gives.

Each name begins with the library that writes it so: torchdata's pipes and nodes, Hugging Face datasets,
Grain, MosaicML streaming, webdataset.
"""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain as joined
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

import trainpipes as tp
from plain_stages import chunks, deduplicated, fitting

__all__ = ["CHAINS", "Everyday"]

COUNT = 61
ROWS: list[dict[str, Any]] = [
    {"x": n, "label": n % 3, "text": "ab " * (n % 5), "ids": [n + 1] * (n * 7 % 6 + 1)}
    for n in range(COUNT)
]
TABLE = pa.Table.from_pylist(ROWS)
Rows = list[dict[str, Any]]


class Everyday(NamedTuple):
    """A chain and what it gives.

    Args:
        make: the pipeline, over files in a folder where it reads some.
        plain: what an epoch gives.
        seen: what both are compared by: the items, in this order or another, or the rows in them.
    """

    make: Callable[[Path], tp.Pipeline]
    plain: Callable[[], list[Any]]
    seen: Callable[[list[Any]], Any] = list


def any_order(items: list[Any]) -> list[str]:
    return sorted(map(str, items))


def rows_in(items: list[Any]) -> list[str]:
    """The rows of batches, also of lists of them, in any order."""
    return any_order([row for item in items for row in _rows_in(item)])


def _rows_in(item: Any) -> list[Any]:
    if isinstance(item, list):
        return [row for one in item for row in _rows_in(one)]
    if isinstance(item, dict) and isinstance(item.get("x"), list):
        return [{"x": x} for x in item["x"]]
    return [item]


def tokens_in(items: list[Any]) -> list[int]:
    """The tokens of batches of packed rows, in any order."""
    return sorted(token for batch in items for row in batch for token in row["input_ids"] if token)


def rows() -> tp.Pipeline:
    return tp.from_arrow(TABLE)


def from_parquet(folder: Path) -> tp.Pipeline:
    return tp.list_files(parquet(folder)).read_parquet()


def from_tars(folder: Path) -> tp.Pipeline:
    return tp.list_files(shards(folder)).read_webdataset()


# What files hold


@cache
def parquet(folder: Path) -> str:
    for number, start in enumerate(range(0, COUNT, 25)):
        path = folder / "parquet" / f"{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(TABLE.slice(start, 25), path, row_group_size=10)
    return str(folder / "parquet" / "*.parquet")


@cache
def text_files(folder: Path) -> dict[str, str]:
    paths = {kind: str(folder / f"rows.{kind}") for kind in ("csv", "jsonl", "txt")}
    with open(paths["csv"], "w", newline="") as file:
        csv.writer(file).writerows([["x", "label"], *([r["x"], r["label"]] for r in ROWS)])
    Path(paths["jsonl"]).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path(paths["txt"]).write_text("".join(f"line {n}\n" for n in range(COUNT)))
    return paths


@cache
def shards(folder: Path) -> list[str]:
    found = []
    for shard in range(3):
        found.append(str(folder / f"{shard}.tar"))
        with tarfile.open(found[-1], "w") as archive:
            for n in range(shard, COUNT, 3):
                for kind, content in (("cls", str(n % 3)), ("txt", f"text {n}")):
                    member = tarfile.TarInfo(f"{n:04}.{kind}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content.encode()))
    return found


def in_shards() -> list[int]:
    return [n for shard in range(3) for n in range(shard, COUNT, 3)]


# What functions do


def square(n: int) -> int:
    return n * n


def odd(n: int) -> bool:
    return n % 2 == 1


def is_odd(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 2)


def longer(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "length": len(row["ids"])}


def words(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"x": row["x"], "word": word} for word in row["text"].split()]


def windows(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for start in range(0, len(row["ids"]), 2):
        yield {"x": row["x"], "ids": row["ids"][start : start + 2]}


def doubled(columns: pa.Table) -> dict[str, Any]:
    return {"twice": pc.multiply(columns["x"], 2)}


def totals(batch: list[dict[str, Any]]) -> dict[str, int]:
    return {"rows": len(batch), "total": sum(row["x"] for row in batch)}


def stacked(batch: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": torch.tensor([row["x"] for row in batch])}


def decoded(row: dict[str, Any]) -> tuple[str, int]:
    return row["txt"].decode(), int(row["cls"])


def counted() -> Iterator[int]:
    return iter(range(COUNT))


class Noisy:
    """A random augmentation."""

    def __call__(self, row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"x": row["x"], "kept": bool(rng.random() < 2)}


class Pairs(tp.StatefulStage):
    """Each row with the one before it."""

    state_every = 7

    def start(self) -> None:
        self.last: Any = None

    def process(self, row: dict[str, Any]) -> Iterator[Any]:
        if self.last is not None:
            yield [self.last, row["x"]]
        self.last = row["x"]

    def state_dict(self) -> Any:
        return self.last

    def load_state_dict(self, state: Any) -> None:
        self.last = state


class Sessions(tp.StatefulStage):
    """Neighbours of one label, as one list."""

    state_every = 5

    def start(self) -> None:
        self.waiting: list[Any] = []

    def process(self, row: dict[str, Any]) -> Iterator[Any]:
        if self.waiting and self.waiting[-1] // 4 != row["x"] // 4:
            yield self.waiting
            self.waiting = []
        self.waiting = [*self.waiting, row["x"]]

    def finish(self) -> Iterator[Any]:
        yield self.waiting

    def state_dict(self) -> Any:
        return self.waiting

    def load_state_dict(self, state: Any) -> None:
        self.waiting = list(state)


# What plain Python does


def columns(items: Rows, *names: str) -> Rows:
    return [{name: row[name] for name in names} for row in items]


def padded(batch: Rows, value: int = 0) -> dict[str, Any]:
    longest = max(len(row["ids"]) for row in batch)
    return {
        "ids": [row["ids"] + [value] * (longest - len(row["ids"])) for row in batch],
        "attention_mask": [[int(n < len(r["ids"])) for n in range(longest)] for r in batch],
    }


TOKENS = list(joined.from_iterable(row["ids"] for row in ROWS))
HALF = ROWS[:30], ROWS[30:60]


def halves() -> dict[str, tp.Pipeline]:
    return {"a": tp.from_arrow(TABLE.slice(0, 30)), "b": tp.from_arrow(TABLE.slice(30, 30))}


CHAINS: dict[str, Everyday] = {
    # torchdata: IterableWrapper, and functional forms of data pipes; nodes
    "torchdata: wrap, map, filter": Everyday(
        lambda _: tp.from_iterable(counted).map(square).filter(odd),
        lambda: [n * n for n in range(COUNT) if n % 2],
    ),
    "torchdata: shuffle, sharding_filter, batch": Everyday(
        lambda _: tp.from_dataset(range(COUNT)).shuffle(20).sharding_filter(4).batch(4).collate(list),
        lambda: list(range(COUNT)), rows_in,
    ),
    "torchdata: sharding_filter, map, batch": Everyday(
        lambda _: tp.from_dataset(range(60)).sharding_filter(4).map(square).batch(5, drop_last=True),
        lambda: [n * n for n in range(60)], rows_in,
    ),
    "torchdata: flatmap": Everyday(
        lambda _: rows().flat_map(words),
        lambda: [word for row in ROWS for word in words(row)],
    ),
    "torchdata: enumerate, header": Everyday(
        lambda _: rows().select("x").enumerate().take(7),
        lambda: [{"x": n, "index": n} for n in range(7)],
    ),
    "torchdata: zip": Everyday(
        lambda _: rows().select("x").zip(tp.from_tensors(y=np.arange(COUNT) * 2)),
        lambda: [{"x": n, "y": 2 * n} for n in range(COUNT)],
    ),
    "torchdata: concat": Everyday(
        lambda _: tp.concat(*halves().values()).select("x"), lambda: columns(ROWS[:60], "x")
    ),
    "torchdata: cycle": Everyday(
        lambda _: tp.from_dataset(range(10)).repeat(3), lambda: 3 * list(range(10))
    ),
    "torchdata: cycle, batch": Everyday(
        lambda _: tp.from_dataset(range(10)).repeat(3).batch(4), lambda: chunks(3 * list(range(10)), 4)
    ),
    "torchdata: batch, batch": Everyday(
        lambda _: tp.from_dataset(range(COUNT)).batch(4).batch(3),
        lambda: chunks(chunks(list(range(COUNT)), 4), 3),
    ),
    "torchdata: batch, shuffle": Everyday(
        lambda _: tp.from_dataset(range(COUNT)).batch(4).shuffle(10),
        lambda: chunks(list(range(COUNT)), 4), any_order,
    ),
    "torchdata: shuffle, shuffle": Everyday(
        lambda _: tp.from_iterable(counted).shuffle(8).shuffle(30).batch(7),
        lambda: list(range(COUNT)), rows_in,
    ),
    "torchdata: max_token_bucketize": Everyday(
        lambda _: rows().batch(max_tokens=24, column="ids"), lambda: fitting(ROWS, 24, "ids", True)
    ),
    "torchdata: bucketbatch": Everyday(
        lambda _: rows().shuffle(30).bucket_by_length(4, column="ids", buffer_size=20),
        lambda: ROWS, rows_in,
    ),
    "torchdata: batch, collate": Everyday(
        lambda _: rows().batch(8).collate(stacked),
        lambda: [{"x": [row["x"] for row in batch]} for batch in chunks(ROWS, 8)],
    ),
    "torchdata: groupby neighbours": Everyday(
        lambda _: rows().then(Sessions()), lambda: chunks(list(range(COUNT)), 4)
    ),
    "torchdata: parse_csv": Everyday(
        lambda folder: tp.list_files(text_files(folder)["csv"]).read_csv().filter(is_odd),
        lambda: columns([row for row in ROWS if is_odd(row)], "x", "label"),
    ),
    "torchdata: readlines": Everyday(
        lambda folder: tp.list_files(text_files(folder)["txt"]).read_text().batch(10),
        lambda: chunks([{"text": f"line {n}"} for n in range(COUNT)], 10),
    ),
    "torchdata: in_memory_cache": Everyday(
        lambda folder: rows().with_columns(doubled).cache(folder / "kept").select("x", "twice"),
        lambda: [{"x": n, "twice": 2 * n} for n in range(COUNT)],
    ),
    "torchdata nodes: ParallelMapper, Batcher": Everyday(
        lambda _: tp.from_dataset(range(COUNT)).map(square, num_workers=2).batch(6),
        lambda: chunks([n * n for n in range(COUNT)], 6),
    ),
    "torchdata nodes: MultiNodeWeightedSampler": Everyday(
        lambda _: tp.mix(
            halves(), weights={"a": 1, "b": 1}, stop="first_exhausted"
        ).select("x"),
        lambda: columns([row for pair in zip(*HALF, strict=True) for row in pair], "x"),
        lambda items: [sorted(row["x"] for row in items if row["x"] // 30 == half)[:29] for half in (0, 1)],
    ),
    # Hugging Face datasets
    "datasets: map batched, remove_columns": Everyday(
        lambda folder: from_parquet(folder).with_columns(doubled).drop_columns("text", "ids"),
        lambda: [{"x": n, "label": n % 3, "twice": 2 * n} for n in range(COUNT)],
    ),
    "datasets: rename_column, select_columns": Everyday(
        lambda _: rows().rename({"x": "n"}).select(["n", "label"]),
        lambda: [{"n": n, "label": n % 3} for n in range(COUNT)],
    ),
    "datasets: filter, shuffle, batch": Everyday(
        lambda folder: from_parquet(folder).filter(pc.field("label") > 0).shuffle(20).batch(4),
        lambda: [row for row in ROWS if row["label"]], rows_in,
    ),
    "datasets: skip, take": Everyday(
        lambda _: rows().skip(10).take(20), lambda: ROWS[10:30]
    ),
    "datasets: shuffle, skip, take": Everyday(
        lambda _: tp.from_dataset(range(COUNT)).shuffle(scope="global").batch(4).take(4),
        lambda: [[0] * 4] * 4, lambda items: [len(batch) for batch in items],
    ),
    "datasets: concatenate, shuffle": Everyday(
        lambda folder: tp.concat(rows(), tp.list_files(text_files(folder)["jsonl"]).read_json())
        .shuffle(30).batch(8),
        lambda: ROWS + ROWS, rows_in,
    ),
    "datasets: interleave, all_exhausted": Everyday(
        lambda _: tp.mix(halves()).batch(4),
        lambda: ROWS[:60], rows_in,
    ),
    "datasets: unique": Everyday(
        lambda _: rows().deduplicate("label"), lambda: deduplicated(ROWS, ["label"])
    ),
    "datasets: drop duplicates, shuffle": Everyday(
        lambda _: rows().sharding_filter(1).deduplicate("text").shuffle(3).batch(2),
        lambda: deduplicated(ROWS, ["text"]), rows_in,
    ),
    "datasets: with_format torch": Everyday(
        lambda _: rows().select("x", "label").batch(8).collate(format="torch"),
        lambda: [{"x": [r["x"] for r in b], "label": [r["label"] for r in b]} for b in chunks(ROWS, 8)],
    ),
    "datasets: group_texts": Everyday(
        lambda _: rows().pack(16, method="concat", column="ids").map(lambda row: list(row["input_ids"])),
        lambda: [one + [0] * (16 - len(one)) for one in chunks(TOKENS, 16)],
    ),
    "datasets: stride over long texts": Everyday(
        lambda _: rows().flat_map(windows).batch(8),
        lambda: chunks([window for row in ROWS for window in windows(row)], 8),
    ),
    "datasets: DataCollatorWithPadding": Everyday(
        lambda _: rows().select("ids").batch(8).pad_collate(mask={"ids": "attention_mask"}),
        lambda: [padded(batch) for batch in chunks(ROWS, 8)],
    ),
    # Grain
    "Grain: source, shuffle, map, batch": Everyday(
        lambda _: tp.from_dataset(range(60)).shuffle(scope="global").map(square).batch(6),
        lambda: [n * n for n in range(60)], rows_in,
    ),
    "Grain: random_map": Everyday(
        lambda _: rows().shuffle(9).map(Noisy(), rng=True),
        lambda: [{"x": n, "kept": True} for n in range(COUNT)], any_order,
    ),
    "Grain: mix of batches": Everyday(
        lambda _: tp.mix(
            {name: half.select("x").batch(5).collate(stacked) for name, half in halves().items()}
        ),
        lambda: [{"x": [r["x"] for r in b]} for b in chunks(ROWS[:60], 5)], any_order,
    ),
    "Grain: repeat, shuffle, batch": Everyday(
        lambda _: tp.from_dataset(range(20)).shuffle(20).repeat(3).batch(8),
        lambda: 3 * list(range(20)), rows_in,
    ),
    "Grain: FirstFitPack": Everyday(
        lambda _: rows().shuffle(20).pack(12, method="first_fit", column="ids").batch(2),
        lambda: [[{"input_ids": TOKENS}]], tokens_in,
    ),
    "Grain: WindowShuffle": Everyday(
        lambda _: rows().flat_map(words).shuffle(12),
        lambda: [word for row in ROWS for word in words(row)], any_order,
    ),
    # MosaicML streaming
    "streaming: streams by proportion": Everyday(
        lambda _: tp.mix(
            halves(), weights={"a": 2, "b": 1}, stop="repeat", output_column="stream"
        ).sharding_filter(6).batch(6).map(lambda batch: [row["stream"] for row in batch]).take(12),
        lambda: [["a", "b", "a"] * 2] * 12,
        lambda items: [len(items), *(round(sum(b.count(name) for b in items) / 12) for name in "ab")],
    ),
    "streaming: per_stream batches": Everyday(
        lambda _: tp.mix({name: half.shuffle(9).batch(6) for name, half in halves().items()})
        .sharding_filter(2).map(totals),
        lambda: list(map(totals, chunks(ROWS[:60], 6))), lambda items: sum(b["total"] for b in items),
    ),
    "streaming: device batches of microbatches": Everyday(
        lambda folder: from_parquet(folder).sharding_filter(2).shuffle(20)
        .select("x").batch(4).collate(stacked).batch(2),
        lambda: columns(ROWS, "x"), rows_in,
    ),
    "streaming: resumption over repeats": Everyday(
        lambda _: rows().sharding_filter(4).shuffle(15).batch(4).repeat(2),
        lambda: ROWS + ROWS, rows_in,
    ),
    # webdataset
    "webdataset: to_tuple, map, batched": Everyday(
        lambda folder: from_tars(folder).map(decoded).batch(5),
        lambda: chunks([[f"text {n}", n % 3] for n in in_shards()], 5),
    ),
    "webdataset: shardshuffle, shuffle, batched": Everyday(
        lambda folder: tp.list_files(shards(folder)).shuffle().read_webdataset().shuffle(20)
        .map(decoded).batch(8),
        lambda: [[f"text {n}", n % 3] for n in range(COUNT)], rows_in,
    ),
    "webdataset: select, slice": Everyday(
        lambda folder: from_tars(folder).filter(lambda row: row["cls"] != b"0")
        .map(decoded).take(12),
        lambda: [[f"text {n}", n % 3] for n in in_shards() if n % 3][:12],
    ),
    "webdataset: batched, shuffled, batched again": Everyday(
        lambda folder: from_tars(folder).map(decoded).batch(2).shuffle(8).batch(4),
        lambda: [chunks([[f"text {n}", n % 3] for n in in_shards()], 2)],
        lambda items: any_order([two for four in items for two in four]),
    ),
    "webdataset: pairs of neighbours": Everyday(
        lambda _: rows().then(Pairs()).batch(4),
        lambda: chunks([[n, n + 1] for n in range(COUNT - 1)], 4),
    ),
}  # fmt: skip
