"""Rows that a Python function made as Arrow columns, if they come back from these as they were."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes.errors import SchemaError
from trainpipes.runtime.rows.block import Block, Payload

__all__ = ["arrow_rows", "join_tables"]

WAY_OUT = (
    "return dicts with the same keys and types in all rows, of numbers, text, bytes, lists and arrays, or "
    "put cache() before this stage"
)


def arrow_rows(rows: Block, asker: str) -> pa.Table:
    """The rows as a table. Arrays and tensors become lists of their dtype, tuples lists.

    Args:
        rows: the rows.
        asker: who made them, for messages.

    Raises:
        SchemaError: they are no dicts of the same keys, or a value would come back as another one.
    """
    data: Payload = rows.data
    if isinstance(data, pa.Table):
        return data
    found = rows.rows()
    if not found:
        return pa.table({})
    try:
        return _table(found)
    except _UnfitError as error:
        failed = SchemaError(
            f"cache() keeps rows as Arrow columns, and {asker} gave a row that {error}: {WAY_OUT}",
            stage=asker,
        )
        failed._trainpipes = asker, int(rows.ids[error.number])  # type: ignore[attr-defined]
        raise failed from error.__cause__


class _UnfitError(Exception):
    """What is wrong with a row."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(what)
        self.number = number


def _table(rows: Sequence[Any]) -> pa.Table:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise _UnfitError(number, f"is a {type(row).__name__}")
        if row.keys() != rows[0].keys():
            raise _UnfitError(number, f"has the keys {list(row)}, and another has {list(rows[0])}")
    names = list(rows[0])
    if not names or not all(isinstance(name, str) for name in names):
        raise _UnfitError(0, f"has the keys {names}")
    return pa.table({name: _column(name, [row[name] for row in rows]) for name in names})


def _column(name: str, values: list[Any]) -> pa.Array:
    ragged = _ragged(values)
    if ragged is not None:
        return ragged
    plain = [_plain(value) for value in values]
    try:
        column = pa.array(plain)
    except (pa.ArrowException, OverflowError) as error:
        raise _UnfitError(
            _first_odd(plain), f"has in {name!r} what makes no column ({error})"
        ) from error
    mixed = "float" in str(column.type) or "double" in str(column.type)
    for number, (given, back) in enumerate(zip(plain, column.to_pylist(), strict=True)):
        if (mixed or given != back) and not _same(given, back):
            raise _UnfitError(
                number, f"has {name!r} = {given!r:.60}, which would come back as {back!r:.60}"
            )
    return column


def _first_odd(values: Sequence[Any]) -> int:
    """The first value that makes no column with those before it."""
    low, high = 0, len(values)  # values up to low do, those up to high do not
    while high - low > 1:
        middle = (low + high) // 2
        try:
            pa.array(values[:middle])
            low = middle
        except (pa.ArrowException, OverflowError):
            high = middle
    return low


def _ragged(values: Sequence[Any]) -> pa.Array | None:
    """Arrays of one dimension and one dtype as a column of lists of that dtype."""
    if not all(isinstance(value, np.ndarray | torch.Tensor) for value in values):
        return None
    arrays = [v.detach().cpu().numpy() if isinstance(v, torch.Tensor) else v for v in values]
    kinds = {(array.dtype, array.ndim) for array in arrays}
    if len(kinds) > 1 or arrays[0].ndim != 1 or arrays[0].dtype.kind not in "iuf":
        return None
    offsets = np.cumsum([0, *map(len, arrays)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.concatenate(arrays)))


def _plain(value: Any) -> Any:
    """A value of Python's own types."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _same(given: Any, back: Any) -> bool:
    if isinstance(given, float) and isinstance(back, float):
        return given == back or (math.isnan(given) and math.isnan(back))
    if isinstance(given, bool | int | float):
        return type(given) is type(back) and bool(given == back)
    if isinstance(given, list) and isinstance(back, list):
        return len(given) == len(back) and all(map(_same, given, back))
    if isinstance(given, dict) and isinstance(back, dict):
        return given.keys() == back.keys() and all(_same(given[k], back[k]) for k in given)
    return bool(given == back)


def join_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """All rows one after the other, each column in one piece; types that differ are widened, as of a
    column in which all that a function returned was None."""
    filled = [table for table in tables if table.num_columns] or list(tables[:1])
    same = all(table.schema.equals(filled[0].schema) for table in filled)
    joined = pa.concat_tables(filled, promote_options="none" if same else "permissive")
    return joined.combine_chunks()
