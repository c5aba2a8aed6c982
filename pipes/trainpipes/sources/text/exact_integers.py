"""Integers that a column of floats would round: refused where the column's type was found, not given.

Arrow takes integers from 2^63 on, and those beside fractions, for float64: ids that differ may become
equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.arrays import one_chunk, to_arrow, to_numpy
from trainpipes.engine.layout import IntArray

#: Up to here each integer is a float of its own.
LARGEST = float(1 << 53)
#: A long integer, which is no part of a fraction or of what has an exponent.
INTEGER = re.compile(rb"(?<![\d.])\d{16,}(?![\d.eE])")
NONE = np.empty(0, dtype=np.int64)
CELL = re.compile(r"\s*([+-]?\d{16,})\s*")


def refuse_rounded_values(table: pa.Table, lines: bytes) -> None:
    """Raise where JSON has an integer that a float column does not hold.

    Args:
        table: the rows.
        lines: what they were parsed from, an object on each line.

    Raises:
        pyarrow.ArrowInvalid: it has; names the column and the integer.
    """
    large = {f.name: _large_floats(table.column(f.name)) for f in table.schema}
    large = {name: rows for name, rows in large.items() if len(rows)}
    if not large or not INTEGER.search(lines):
        return
    written = [line for line in lines.split(b"\n") if line.strip()]
    if len(written) != len(table):
        return  # not an object on each line, which is said elsewhere
    for number in np.unique(np.concatenate(list(large.values()))).tolist():
        if INTEGER.search(written[number]):
            row = json.loads(written[number])
            for name in large:
                _refuse(name, _rounded(row.get(name), table.schema.field(name).type))


def refuse_rounded_cells(
    table: pa.Table, data: bytes, as_text: Callable[[list[str]], pa.Table]
) -> None:
    """The same of CSV.

    Args:
        table: the rows.
        data: what they were parsed from.
        as_text: gives some of their columns as they are written.
    """
    large = {f.name: _large_floats(table.column(f.name)) for f in table.schema}
    large = {name: rows for name, rows in large.items() if len(rows)}
    if not large or not INTEGER.search(data):
        return
    texts = as_text(list(large))
    for name, rows in large.items():
        for cell in texts.column(name).take(to_arrow(rows)).to_pylist():
            written = CELL.fullmatch(cell or "")
            if written:
                _refuse(name, _rounded(int(written[1]), table.schema.field(name).type))


def _refuse(name: str, odd: int | None) -> None:
    if odd is not None:
        raise pa.ArrowInvalid(
            f"column {name!r} has the integer {odd}, which a column of floats would round; say its type by "
            "schema=, such as uint64, or float64 to have it rounded"
        )


def _large_floats(column: Any) -> IntArray:
    """The rows of a column that hold a float of 2^53 or more, or of that below zero, int64."""
    kind = column.type
    types = pa.types
    if types.is_floating(kind):
        ends = pc.min_max(column).as_py()
        if not any(end is not None and abs(end) >= LARGEST for end in ends.values()):
            return NONE
        values = to_numpy(one_chunk(column.fill_null(0)))
        return np.flatnonzero(np.abs(values) >= LARGEST)
    if types.is_struct(kind):
        return np.concatenate([NONE, *map(_large_floats, column.flatten())])
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        found = _large_floats(pc.list_flatten(column))
        return to_numpy(one_chunk(pc.list_parent_indices(column)))[found] if len(found) else NONE
    return NONE


def _rounded(value: Any, kind: pa.DataType) -> int | None:
    """An integer within a value that its type would round; None if there is none."""
    types = pa.types
    if types.is_floating(kind):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return value if whole and _as_float(value) != value else None
    parts: list[tuple[Any, pa.DataType]] = []
    if types.is_struct(kind) and isinstance(value, dict):
        parts = [(value.get(field.name), field.type) for field in kind]
    elif isinstance(value, list) and hasattr(kind, "value_type"):
        parts = [(item, kind.value_type) for item in value]
    found = (_rounded(part, own) for part, own in parts)
    return next((odd for odd in found if odd is not None), None)


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")
