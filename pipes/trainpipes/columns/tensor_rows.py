"""Rows of several tensors that share their first dimension, single-threaded copies of rows, and items that
are made when somebody takes them.

torch divides a copy among threads, whose waking costs more than the copy where others work. Large copies
reuse memory, up to 64 MiB, since touching new memory is slower than copying.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from trainpipes._internal import activity
from trainpipes._internal.checks import IntArray
from trainpipes.columns.arrays import Array

#: Bytes of an item up to which it is made when it is taken.
LATE_BYTES = 1 << 19


def late_if_small(make: Callable[[int], Any], count: int, nbytes: float) -> MutableSequence[Any]:
    """Items of so many bytes together; small ones are made by whoever takes them."""
    items = LazyBatches(activity.within(make) if activity.is_on else make, count)
    return items if nbytes <= count * LATE_BYTES else list(items)


class LazyBatches(MutableSequence[Any]):
    """Like a list whose items are made when first asked for, and let go when set to None.

    Not locked: threads that ask at once may each make an item; a single item stays.
    """

    def __init__(self, make: Callable[[int], Any], count: int) -> None:
        self._make = make
        self._items: list[Any] = [None] * count
        self._gone = [False] * count

    def among(self, places: Sequence[int], count: int) -> LazyBatches:
        """The same items at these places of ``count``; there are no others."""
        place_of = {k: place for place, k in enumerate(places)}
        return LazyBatches(lambda k: self._make(place_of[k]), count)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        item = self._items[k]
        if item is None:
            item = self._make(k)
            if not self._gone[k]:
                self._items[k] = item
        return item

    def __setitem__(self, k: Any, item: Any) -> None:
        self._gone[k] = item is None
        self._items[k] = item

    def __delitem__(self, k: Any) -> None:
        raise TypeError("the items of a run are not taken out")

    def insert(self, k: int, item: Any) -> None:
        raise TypeError("nothing is put between the items of a run")


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


def foreign_dtype(values: Any) -> torch.dtype | None:
    """The dtype that all tensors of a list have, if NumPy does not have it."""
    dtypes = {getattr(v, "dtype", None) for v in values} if isinstance(values, list) else set()
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= FOREIGN else None


def copied(tensor: torch.Tensor) -> torch.Tensor:
    if not is_plain(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    values = tensor.numpy()
    room = room_for(values.shape, values.dtype)
    room[...] = values
    return torch.from_numpy(room)


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
    room = room_for((len(index), *values.shape[1:]), values.dtype)
    if not values.flags.c_contiguous:  # which NumPy would copy whole
        step = max(1, PART // row_bytes)
        for first in range(0, len(index), step):
            room[first : first + step] = values[index[first : first + step]]
        return room
    if high - low == len(index) and (np.diff(index) == 1).all():
        room[...] = values[low:high]
    else:
        # Other modes write to a buffer first.
        np.take(values, index, axis=0, out=room, mode="clip")
    return room


def room_for(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array to fill, whose memory nobody else holds while it lives."""
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


@dataclass(frozen=True)
class TensorRows:
    """Rows of several tensors that share their first dimension."""

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...] | None

    def __len__(self) -> int:
        return int(self.tensors[0].shape[0])

    def take(self, index: IntArray) -> TensorRows:
        return TensorRows(tuple(gathered(t, index) for t in self.tensors), self.names)

    def slice(self, start: int, stop: int) -> TensorRows:
        return TensorRows(tuple(t[start:stop] for t in self.tensors), self.names)

    def joined(self, others: Sequence[TensorRows]) -> TensorRows:
        """These rows and those of the others."""
        columns = zip(*(part.tensors for part in (self, *others)), strict=True)
        return TensorRows(tuple(torch.cat(column) for column in columns), self.names)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def part(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """The tensors of rows ``start`` to ``stop``, in memory without other rows."""
        return tuple(_part(tensor, start, stop) for tensor in self.tensors)

    def batch(self, start: int, stop: int) -> Any:
        """What ``default_collate`` makes of rows ``start`` to ``stop``."""
        parts = self.part(start, stop)
        return list(parts) if self.names is None else dict(zip(self.names, parts, strict=True))

    def rows(self) -> list[Any]:
        columns = zip(*self.tensors, strict=True)
        if self.names is None:
            return list(columns)
        return [dict(zip(self.names, row, strict=True)) for row in columns]


def _part(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Some rows: a copy, unless they are all in the tensor's memory."""
    if stop - start == len(tensor) and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return copied(tensor[start:stop])


def batches_of(parts: Iterable[tuple[TensorRows, Sequence[int]]]) -> MutableSequence[Any]:
    """Batches of rows, cut at their edges; none are copied together."""
    nbytes = 0
    cuts: list[tuple[TensorRows, int, int]] = []
    for rows, edges in parts:
        nbytes += rows.nbytes
        cuts += [(rows, start, stop) for start, stop in pairwise(edges)]

    def make(k: int) -> Any:
        rows, start, stop = cuts[k]
        return rows.batch(start, stop)

    return late_if_small(make, len(cuts), nbytes)
