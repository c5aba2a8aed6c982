"""Rows of numbers as strings of bytes.

Arrow copies and cuts binary strings as a whole, several times as fast as NumPy gathers numbers.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.arrays import Array, apart
from trainpipes.engine.layout import IntArray


def cut_rows(
    values: Array, offsets: Any, length: int, side: Literal["left", "right"]
) -> tuple[Array, IntArray]:
    """Rows of ``length`` values at most, cut at their starts ("left") or ends ("right").

    >>> cut_rows(np.array([1, 2, 3, 4]), np.array([0, 1, 4]), 2, "left")
    (array([1, 3, 4]), array([1, 2]))
    """
    size = length * _unit(values)
    strings = _strings(values, offsets)
    from_end = side == "left" and size
    kept = pc.binary_slice(strings, -size) if from_end else pc.binary_slice(strings, 0, size)
    return _values(kept, values)


def _unit(values: Array) -> int:
    """Bytes of one of ``values``."""
    return values.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))


def _strings(values: Array, offsets: Any) -> Any:
    edges = np.asarray(offsets).astype(np.int64) * _unit(values)
    data = pa.py_buffer(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    buffers = [None, pa.py_buffer(edges), data]
    return pa.Array.from_buffers(pa.large_binary(), len(edges) - 1, buffers)


def _values(strings: Any, like: Array) -> tuple[Array, IntArray]:
    """The values of rows that lie one after the other, and the rows' lengths."""
    content, edges = apart(strings)
    return content.view(like.dtype).reshape(-1, *like.shape[1:]), np.diff(edges) // _unit(like)
