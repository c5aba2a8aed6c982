"""What ``repack`` is to write, computed in memory, row by row."""

from __future__ import annotations

import math
from operator import itemgetter
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


def sort_key(value: Any) -> tuple[int, Any]:
    if value is None:
        return 2, 0
    return (1, 0) if isinstance(value, float) and math.isnan(value) else (0, value)


def expected(
    rows: list[dict[str, Any]],
    *,
    shuffle: bool = False,
    seed: int = 0,
    sort: list[str] | None = None,
    descending: bool = False,
    drop_duplicates: bool | list[str] = False,
) -> list[dict[str, Any]]:
    """The rows that are to come out, in their order."""
    if drop_duplicates:
        seen, kept = set(), []
        for row in rows:
            names = row if drop_duplicates is True else drop_duplicates
            key = tuple(key_of(row[name]) for name in names)
            if key not in seen:
                seen.add(key)
                kept.append(row)
        rows = kept
    for name in reversed(sort or ()):
        values = [row for row in rows if sort_key(row[name])[0] == 0]
        values.sort(key=itemgetter(name), reverse=descending)  # equal ones stay as they were
        odd = [[r for r in rows if sort_key(r[name])[0] == place] for place in (1, 2)]
        rows = [*values, *odd[0], *odd[1]]
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
