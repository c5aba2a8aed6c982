"""Pipelines of every kind of end, for ranks that run them side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

import trainpipes as tp

__all__ = ["PIPELINES", "RAGGED", "long_filtered"]

SHARDS = 12


def sharded(folder: Path, **options: Any) -> tp.Pipeline:
    rows = tp.list_files(str(folder / "*.parquet")).read_parquet()
    return rows.sharding_filter(SHARDS, **options).shuffle(9, seed=3)


def two_of_three(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 3)


def text(pipe: tp.Pipeline) -> tp.Pipeline:
    return pipe.tokenize("bytes", concat=["text", "answer"], labels="answer")


#: Epochs of 49, about 37, 13 and 17 batches, some without an end.
PIPELINES: dict[str, Callable[[Path], tp.Pipeline]] = {
    "fixed": lambda f: text(sharded(f)).batch(2).pad_collate(),
    "filtered": lambda f: text(sharded(f).filter(two_of_three)).batch(2).pad_collate(),
    "repeat_after": lambda f: text(sharded(f)).batch(8).pad_collate().repeat(),
    "repeat_before": lambda f: text(sharded(f)).repeat().batch(6).pad_collate(),
    "repeat_filtered": lambda f: (
        text(sharded(f, split="stride").filter(two_of_three)).repeat().batch(3).pad_collate()
    ),
    "repeat_twice": lambda f: text(sharded(f)).batch(10).pad_collate().repeat(2),
    "ragged": lambda f: text(sharded(f, tail="uneven")).batch(1).pad_collate().repeat(2),
}
#: Run for one pass only, of 194, to an end at different steps.
RAGGED = "ragged"


def long_filtered() -> tp.Pipeline:
    """An epoch of some 330 batches, whose number is known only at its end."""
    table = pa.table({"x": list(range(2000))})
    dealt = tp.from_arrow(table).sharding_filter(SHARDS).shuffle(50, seed=5)
    return dealt.filter(two_of_three).batch(4)
