"""What a user gives to stages: functions of rows, of columns, of batches and of files.

Draws are keyed by a function's module and name: neither may change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "x": row["x"] * 2}


def plus(number: int) -> int:
    return number + 1000


def swap(pair: Any) -> Any:
    return pair[1], pair[0]


def as_row(number: int) -> dict[str, Any]:
    return {"x": number, "tokens": list(range(number % 6))}


def jitter(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**row, "noise": rng.random(), "more": int(rng.integers(1000))}


def jitter_batch(batch: Any, rng: np.random.Generator) -> Any:
    return batch, float(rng.random())


def odd(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 2)


def third(number: int) -> bool:
    return number % 3 != 0


def later(path: str) -> bool:
    return not path.endswith("03.parquet")


def words(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each word, none for some."""
    return ({"x": row["x"], "word": word} for word in row["text"].split() if row["x"] % 7)


def twice(number: int) -> list[int]:
    return [number, -number][: number % 3]


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    said = [("user", row["text"]), ("assistant", row["answer"])]
    return {"x": row["x"], "messages": [{"role": who, "content": what} for who, what in said]}


def negative(columns: dict[str, Any]) -> dict[str, Any]:
    return {"x": -columns["x"]}


def lengths(columns: dict[str, Any]) -> dict[str, Any]:
    return {"length": np.array([len(tokens) for tokens in columns["tokens"]], dtype=np.int64)}


def upper(rows: pa.Table) -> dict[str, Any]:
    return {"loud": pc.utf8_upper(rows["text"])}


def outer(columns: dict[str, Any]) -> dict[str, Any]:
    x = torch.as_tensor(columns["x"])
    return {"outer": torch.stack([x, x + 1, x * 2], 1).to(torch.float32)}


def first_of(batch: list[Any]) -> Any:
    return batch[0]


def counted(batch: Any) -> Any:
    return len(batch), batch


def some_batches(batch: list[Any]) -> bool:
    return len(str(batch[0])) % 4 != 0


def longest(rows: list[Any]) -> Any:
    return max(len(str(row)) for row in rows), rows[0]


def total(columns: Any) -> Any:
    return {name: len(columns[name]) for name in sorted(columns)}


def arrow_names(rows: Any) -> Any:
    return rows.num_rows, rows.schema.names


def codes(texts: list[str]) -> list[list[int]]:
    return [list(map(ord, text)) for text in texts]


class Jitter:
    """Draws from torch's global generator, as transforms of torchvision do."""

    def __repr__(self) -> str:
        return "Jitter()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Jitter)

    def __hash__(self) -> int:
        return hash(Jitter)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image * torch.rand(3, 1, 1) % 200 + torch.randint(9, ())).to(torch.uint8)


def blocks_of(file: BinaryIO, block: int) -> Iterator[pa.Table]:
    """One row for each block."""
    content = file.read().decode()
    yield pa.table({"x": [len(content) * 10 + block], "text": [content]})


def count_blocks(file: BinaryIO) -> list[int]:
    return [1, 1]


def all_of(file: BinaryIO) -> pa.Table:
    """The rows of a file that is not counted before."""
    lines = file.read().decode().split("\n")
    return pa.table({"x": [len(line) for line in lines], "text": lines})


@dataclass(frozen=True)
class TargetIds:
    """What a batch for an encoder-decoder was called, and padded with."""

    pad: int

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        names = {"attention_mask": "input_mask", "labels": "target_ids"}
        named = {names.get(name, name): value for name, value in batch.items()}
        targets = named["target_ids"]
        return {**named, "target_ids": targets.masked_fill(targets == -100, self.pad)}
