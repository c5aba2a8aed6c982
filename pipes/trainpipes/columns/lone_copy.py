"""Copies of rows that the calling thread makes alone.

torch divides a copy among its own threads, whose waking costs more than the copy when other threads are at
work. Large copies go to memory that earlier ones have given back, since touching new memory first takes
longer than the copy itself. Up to 64 MiB stay.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from typing import Any

import numpy as np
import torch

from trainpipes.columns.arrays import Array
from trainpipes.engine.layout import IntArray

#: Bytes of a copy from which memory is used again, and of all that is kept for that.
LARGE, KEPT = 1 << 20, 64 << 20
#: Bytes that are copied twice while they are in the processor's cache.
PART = 1 << 17

#: Numbers that NumPy does not have.
FOREIGN = {torch.bfloat16} | {
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.itemsize == 1 and dtype.is_floating_point
}


def copied(tensor: torch.Tensor) -> torch.Tensor:
    if not is_plain(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    values = tensor.numpy()
    found = _room(values.shape, values.dtype)
    found[...] = values
    return torch.from_numpy(found)


def gathered(tensor: torch.Tensor, index: IntArray) -> torch.Tensor:
    if not is_plain(tensor):
        return tensor.index_select(0, torch.from_numpy(np.ascontiguousarray(index)))
    return torch.from_numpy(rows_of(tensor.numpy(), index))


def rows_of(values: Array, index: IntArray) -> Array:
    row_bytes = values[:1].nbytes
    if len(index) * row_bytes < LARGE:
        return values[index]
    low, high = int(index.min()), int(index.max()) + 1
    if low < 0 or high > len(values):
        return values[index]
    found = _room((len(index), *values.shape[1:]), values.dtype)
    if not values.flags.c_contiguous:  # which NumPy would copy whole
        step = max(1, PART // row_bytes)
        for first in range(0, len(index), step):
            found[first : first + step] = values[index[first : first + step]]
        return found
    if high - low == len(index) and (np.diff(index) == 1).all():
        found[...] = values[low:high]
    else:
        np.take(
            values, index, axis=0, out=found, mode="clip"
        )  # other modes write to a buffer first
    return found


def _room(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array to be filled; nobody else holds its memory while something made of it is alive."""
    nbytes = math.prod(shape) * dtype.itemsize
    # The lock is held by another thread that looks, or was when this process was forked.
    if not LARGE <= nbytes <= KEPT // 2 or not _lock.acquire(blocking=False):
        return np.empty(shape, dtype)
    try:
        step = 1 << (nbytes.bit_length() - 4)  # runs of about the same size share memory
        room = -(-nbytes // step) * step
        free = [
            place
            for place in range(len(_kept))
            if _kept[place].nbytes == room and sys.getrefcount(_kept[place]) == UNHELD
        ]
        while not free and _kept and sum(held.nbytes for held in _kept) + room > KEPT:
            _kept.popleft()
        if not free:
            _kept.append(np.empty(room, np.uint8))
        return _kept[free[0] if free else -1][:nbytes].view(dtype).reshape(shape)
    finally:
        _lock.release()


def is_plain(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.requires_grad:
        return False
    return not tensor.dtype.is_complex and tensor.dtype not in FOREIGN


_kept: deque[Array] = deque()
_lock = threading.Lock()
#: References to an array in ``_kept`` that nobody else has: its own and that of ``getrefcount``.
UNHELD = 2
