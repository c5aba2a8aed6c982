"""What torch's ``default_collate`` makes of rows, sooner.

Functions of what they are given: any thread may call them. Numbers of Python's and of Arrow's are stacked by
NumPy, a column at a time; ``default_collate`` itself does the rest, so that all is as it makes it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from trainpipes.columns.arrays import Array, dtype_of, one_chunk, to_numpy
from trainpipes.columns.fixed_lists import array_of, fixed_shape
from trainpipes.columns.lazy_batches import late_if_small

#: What ``default_collate`` makes of numbers of these types.
NUMBERS = {int: np.int64, float: np.float64, bool: np.bool_}
#: Of columns of numbers, those that Python's hold; of others ``to_pylist`` knows what they become.
WIDE = {
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"), np.int64),
    **dict.fromkeys(("float32", "float64"), np.float64),
    "bool": np.bool_,
}
#: The functions that torch comes with: users may put others in their place.
TORCHS_OWN = {
    kind: function
    for kind, function in default_collate_fn_map.items()
    if function.__module__ == default_collate.__module__
}


def stacked(rows: Any) -> Any:
    """What ``default_collate`` makes of the rows of a micro-batch, a list of them or a tuple.

    >>> stacked([{"a": 1, "b": 0.5}, {"a": 2, "b": 1.5}])
    {'a': tensor([1, 2]), 'b': tensor([0.5000, 1.5000], dtype=torch.float64)}
    """
    return _stacked(rows) if default_collate_fn_map == TORCHS_OWN else default_collate(rows)


def _stacked(rows: Any) -> Any:
    kinds = set(map(type, rows))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind in NUMBERS:
        try:
            return torch.from_numpy(np.array(rows, NUMBERS[kind]))
        except OverflowError:  # torch has a message of its own
            return default_collate(rows)
    if kind is dict:
        return {name: _stacked([row[name] for row in rows]) for name in rows[0]}
    if (
        kind is np.ndarray
        and get_worker_info() is None
        and len({_layout(row) for row in rows}) == 1
    ):
        # torch would have threads of its own stack large ones, which get in the way of ours.
        return (
            torch.from_numpy(np.stack(rows))
            if rows[0].dtype.kind in "biuf"
            else default_collate(rows)
        )
    if kind is tuple and len(set(map(len, rows))) == 1:
        return [_stacked(column) for column in zip(*rows, strict=True)]
    return default_collate(rows)


def _layout(row: Array) -> tuple[Any, ...]:
    return row.dtype, row.shape


def stacked_columns(table: pa.Table, edges: Sequence[int]) -> MutableSequence[Any]:
    """What ``default_collate`` makes of the rows of each micro-batch; small ones when they are taken.

    Args:
        table: the rows.
        edges: first row of each micro-batch, and the end.

    Raises:
        Exception: torch makes nothing of the rows of one, or there is a null.
    """
    columns = {field.name: _cells(table.column(n)) for n, field in enumerate(table.schema)}
    if len(columns) < table.num_columns:
        raise ValueError("two columns have the same name")
    cuts: dict[str, Callable[[int], Any]] = {}
    nbytes = 0
    for name, cells in columns.items():
        if isinstance(cells, list):
            cuts[name] = [stacked(cells[a:b]) for a, b in pairwise(edges)].__getitem__
        else:
            cuts[name] = _cutting(cells, edges)
            nbytes += cells.nbytes
    return late_if_small(
        lambda k: {name: cut(k) for name, cut in cuts.items()}, len(edges) - 1, nbytes
    )


def _cutting(values: Array, edges: Sequence[int]) -> Callable[[int], torch.Tensor]:
    return lambda k: torch.from_numpy(values[edges[k] : edges[k + 1]].copy())


def _cells(column: pa.ChunkedArray) -> Array | list[Any]:
    """The rows of a column: an array, where torch would stack them."""
    array = one_chunk(column)
    wide = None if array.null_count else WIDE.get(str(dtype_of(array.type)))
    if wide is not None:
        return to_numpy(array).astype(wide, copy=False)
    found = None if fixed_shape(array.type) is None else array_of(array)
    return list(array.to_pylist()) if found is None else found
