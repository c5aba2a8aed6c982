"""What rows are made of, never changed: one of

- ``pyarrow.Table``: columns;
- ``TensorRows``: tensors with a common first dimension (``from_tensors``);
- ``list``: Python objects, one a row (``from_dataset``, or after a row function).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import IntArray
from trainpipes.columns.arrays import gathered, once_for_each, parts_of, to_arrow
from trainpipes.columns.joined import Joining
from trainpipes.columns.python_values import python_rows
from trainpipes.columns.tensor_rows import TensorRows

Payload: TypeAlias = "pa.Table | TensorRows | list[Any]"


def take_payload(data: Payload, index: IntArray) -> Payload:
    if isinstance(data, list):
        return [data[i] for i in index.tolist()]
    if isinstance(data, TensorRows):
        return data.take(index)
    return _take_rows(data, index)


def slice_payload(data: Payload, start: int, stop: int) -> Payload:
    if isinstance(data, list):
        return data[start:stop]
    if isinstance(data, TensorRows):
        return data.slice(start, stop)
    return data.slice(start, stop - start)


def payload_bytes(data: Payload) -> int:
    if isinstance(data, pa.Table):
        return _bytes_of_table(data)
    return 0 if isinstance(data, list) else int(data.nbytes)


@once_for_each
def _bytes_of_table(table: pa.Table) -> int:
    return int(table.nbytes)


def payload_row_bytes(data: Payload) -> float:
    """Bytes of a row, about: of Python objects, those of arrays, tensors and bytes in the first."""
    if not len(data):
        return 0.0
    return _object_bytes(data[0]) if isinstance(data, list) else payload_bytes(data) / len(data)


def _object_bytes(value: Any) -> float:
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_object_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_object_bytes, value[:1])) * len(value)
    return float(getattr(value, "nbytes", 0))


def payload_rows(data: Payload) -> list[Any]:
    if isinstance(data, list):
        return data
    return data.rows() if isinstance(data, TensorRows) else python_rows(data)


def join_payloads(parts: Iterable[Payload], rows: int | None = None) -> Payload:
    joined = _joined(parts, rows)
    return joined.table() if isinstance(joined, Joining) else joined


def join_in_order(
    parts: Iterable[Payload], rows: int, order_of: Callable[[int], IntArray | None]
) -> tuple[Payload, IntArray | None]:
    """The parts joined; and the order in which their rows lie, or None if they are as they came. Rows of
    many columns are put in order at once: batch by batch, each row would be far from the last in memory.
    """
    joined = _joined(parts, rows)
    if not isinstance(joined, Joining):
        return joined, None
    order = order_of(joined.rows) if joined.is_wide else None
    return joined.table(order), order


def _joined(parts: Iterable[Payload], rows: int | None) -> Payload | Joining:
    if rows is None:
        parts = list(parts)
        rows = sum(map(len, parts))
    coming = iter(parts)
    joining: Joining | None = None
    others: list[Payload] = []
    for part in coming:
        if not isinstance(part, pa.Table):
            others = [part, *coming]
            break
        joining = joining or Joining(rows)
        joining.add(part)
        del part
    if joining is not None:
        if not others:
            return joining
        others.insert(0, joining.table())
    tensors = [part for part in others if isinstance(part, TensorRows)]
    if len(tensors) == len(others):
        return tensors[0].joined(tensors[1:])
    return [row for part in others for row in payload_rows(part)]


def _take_rows(table: pa.Table, index: IntArray) -> pa.Table:
    try:
        return gathered(table, index)
    except pa.ArrowInvalid:  # chunks that together hold more than 32-bit offsets count
        columns = [_by_chunk(column, index) for column in table.columns]
        return pa.table(columns, schema=table.schema)


def _by_chunk(column: pa.ChunkedArray, index: IntArray) -> pa.Array:
    parts, back = parts_of(np.cumsum([0, *map(len, column.chunks)]), index)
    taken = pa.concat_arrays([column.chunk(n).take(to_arrow(places)) for n, places in parts])
    return taken if back is None else taken.take(to_arrow(back))
