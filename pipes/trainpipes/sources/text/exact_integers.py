"""Refuses integers that Arrow would round to float64: those from 2^63 on, and those beside fractions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.arrays import one_chunk, to_arrow, to_numpy
from trainpipes.engine.layout import IntArray

#: Up to here each integer is a float of its own.
LARGEST = float(1 << 53)
#: A long integer, which is no part of a fraction or of what has an exponent; and a cell that is one.
INTEGER = re.compile(rb"(?<![\d.])\d{16,}(?![\d.eE])")
CELL = re.compile(r"\s*[+-]?\d{16,}\s*")
NONE = np.empty(0, dtype=np.int64)


#: Of some rows, values of some columns as they are written.
Written = Callable[[list[str], IntArray], Iterable[tuple[str, Any]]]


def refuse_rounded(table: pa.Table, data: bytes, written: Written) -> None:
    found = {field.name: _large_floats(table.column(field.name)) for field in table.schema}
    large = {name: rows for name, rows in found.items() if len(rows)}
    if not large or not INTEGER.search(data):
        return
    for name, value in written(list(large), np.unique(np.concatenate(list(large.values())))):
        odd = _rounded(value, table.schema.field(name).type)
        if odd is not None:
            raise pa.ArrowInvalid(
                f"column {name!r} has the integer {odd}, which a column of floats would round; say its type "
                "by schema=, such as uint64, or float64 to have it rounded"
            )


def values_of_lines(
    lines: bytes, count: int, columns: list[str], rows: IntArray
) -> Iterator[tuple[str, Any]]:
    found = [line for line in lines.split(b"\n") if line.strip()]
    if len(found) == count:  # else it is not an object on each line, which is said elsewhere
        for line in filter(INTEGER.search, map(found.__getitem__, rows.tolist())):
            row = json.loads(line)
            yield from ((name, row.get(name)) for name in columns)


def values_of_cells(texts: pa.Table, rows: IntArray) -> Iterator[tuple[str, int]]:
    for name in texts.column_names:
        for cell in texts.column(name).take(to_arrow(rows)).to_pylist():
            if CELL.fullmatch(cell or ""):
                yield name, int(cell)


def _large_floats(column: Any) -> IntArray:
    """Rows with a float of 2^53 or more, positive or negative, int64."""
    kind, types = column.type, pa.types
    if types.is_floating(kind):
        ends = pc.min_max(column).as_py().values()
        if any(end is not None and abs(end) >= LARGEST for end in ends):
            return np.flatnonzero(np.abs(to_numpy(one_chunk(column.fill_null(0)))) >= LARGEST)
    if types.is_struct(kind):
        return np.concatenate([NONE, *map(_large_floats, column.flatten())])
    if types.is_list(kind):
        found = _large_floats(pc.list_flatten(column))
        return to_numpy(one_chunk(pc.list_parent_indices(column)))[found] if len(found) else NONE
    return NONE


def _rounded(value: Any, kind: pa.DataType) -> int | None:
    if pa.types.is_floating(kind):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return value if whole and float(str(value)) != value else None  # float(value) may overflow
    parts: list[tuple[Any, pa.DataType]] = []
    if pa.types.is_struct(kind) and isinstance(value, dict):
        parts = [(value.get(field.name), field.type) for field in kind]
    elif isinstance(value, list) and pa.types.is_list(kind):
        parts = [(item, kind.value_type) for item in value]
    found = (_rounded(part, own) for part, own in parts)
    return next((odd for odd in found if odd is not None), None)
