"""What ``repack`` is to write, computed in memory, row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes.order.permutation import Permutation


def key_of(value: Any) -> Any:
    """A value as it is compared: NaN is NaN, and no bool is a number."""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, list):
        return tuple(key_of(inner) for inner in value)
    if isinstance(value, dict):
        return tuple((name, key_of(inner)) for name, inner in value.items())
    return (type(value).__name__, value)


def expected(
    rows: list[dict[str, Any]], *, shuffle: bool = False, seed: int = 0
) -> list[dict[str, Any]]:
    """The rows that are to come out, in their order."""
    if shuffle:
        order = Permutation(len(rows), seed, "repack")(np.arange(len(rows)))
        found: list[Any] = [None] * len(rows)
        for row, place in zip(rows, order.tolist(), strict=True):
            found[place] = row
        rows = found
    return rows


def read(files: Any) -> list[dict[str, Any]]:
    return pa.concat_tables([pq.read_table(path) for path in files]).to_pylist()


def same(found: list[Any], wanted: list[Any]) -> bool:
    return [key_of(row) for row in found] == [key_of(row) for row in wanted]
