"""Rows of different lengths to rectangles.

A rectangle is cut out of all rows' values in one step, as stretches of its width, of which the ends are then
blanked out: nothing is done row by row. Each has memory of its own, and can be kept without the others; and
none is made before it is asked for, when what is written will be read at once, and the memory that the
one before gave back is still in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from trainpipes.byte_rows import cut_rows
from trainpipes.order import IntArray

__all__ = ["PadSide", "Rectangles", "widths_of"]

PadSide = Literal["pre", "post"]

Array = npt.NDArray[Any]
Rectangle = tuple[Array, "Array | None"]

#: Kinds and sizes of numbers of which rectangles are cut as plain bits.
PLAIN = {f"{kind}{size}" for kind in "iufb" for size in (1, 2, 4, 8)}


def widths_of(
    lengths: IntArray, bounds: IntArray, max_length: int | None = None, multiple: int = 1
) -> IntArray:
    """How wide each rectangle is.

    Args:
        lengths: of each row, int64 ``[rows]``.
        bounds: first row of each rectangle and the end, int64 ``[rectangles + 1]``.
        max_length: width of all; None for that of the longest row in each.
        multiple: widths are rounded up to a multiple of this.

    Returns:
        int64 ``[rectangles]``.
    """
    widths = np.zeros(len(bounds) - 1, dtype=np.int64)
    if max_length is not None:
        widths[:] = max_length
    else:
        some = np.diff(bounds) > 0
        if some.any():
            widths[some] = np.maximum.reduceat(lengths, bounds[:-1][some])
    return widths if multiple == 1 else -(-widths // multiple) * multiple


class Rectangles(Sequence[Rectangle]):
    """Rows of different lengths as rectangles of several rows each, made as they are asked for.

    Each is its cells ``[B, L, ...]``, in memory of their own, and 1 for those that are real, 0 for
    others, ``[B, L]``, or None where nobody asks.

    Args:
        values: the rows' values, one row after the other, ``[values, ...]``.
        lengths: of each row, int64 ``[rows]``.
        bounds: first row of each rectangle and the end, int64 ``[rectangles + 1]``.
        value: what fills the other cells.
        dtype: of the rectangles.
        max_length: width L of all rectangles, where longer rows are cut; None for the length of
            the longest row in each.
        multiple: widths are rounded up to a multiple of this.
        padding: the side that is filled up.
        truncating: the side that is cut.
        mask: dtype of what says which cells are real; None if nobody asks.

    >>> cells, real = Rectangles(
    ...     np.array([1, 2, 3]), np.array([1, 2]), np.array([0, 2]), 0, dtype=np.int64, mask=np.bool_
    ... )[0]
    >>> cells
    array([[1, 0],
           [2, 3]])
    """

    def __init__(
        self,
        values: Array,
        lengths: IntArray,
        bounds: IntArray,
        value: Any,
        *,
        dtype: npt.DTypeLike,
        max_length: int | None = None,
        multiple: int = 1,
        padding: PadSide = "post",
        truncating: PadSide = "post",
        mask: npt.DTypeLike | None = None,
    ) -> None:
        self._dtype = np.dtype(dtype)
        self._mask = None if mask is None else np.dtype(mask)
        self._side: PadSide = padding
        self._value = value
        if max_length is not None and int(lengths.max(initial=0)) > max_length:
            values, lengths = _cut(values, lengths, max_length, truncating)
        values = np.ascontiguousarray(values, self._dtype)
        self._plain = _is_plain(self._dtype)
        if self._plain:
            # In bits: what is blanked out with zeros becomes the value when some are turned over.
            bits = np.dtype(f"u{self._dtype.itemsize}")
            self._flip = np.array(value, self._dtype).view(bits)
            values = values.view(bits) ^ self._flip if self._flip else values.view(bits)
        self._values = values
        self._within = (1,) * (values.ndim - 1)
        self._lengths = lengths
        self._offsets = _offsets(lengths)
        self._edges: list[int] = bounds.tolist()
        widths = widths_of(lengths, bounds, max_length, multiple)
        self._widths: list[int] = widths.tolist()
        widest = int(widths.max(initial=0))
        self._ones = _Ones(widest, padding, values.dtype if self._plain else np.dtype(np.bool_))
        self._asked: _Ones | None = None
        if self._mask is not None:
            alike = self._mask.kind in "iu" and self._mask.itemsize == self._ones.dtype.itemsize
            self._asked = self._ones if alike else _Ones(widest, padding, self._mask)

    def __len__(self) -> int:
        return len(self._widths)

    @property
    def nbytes(self) -> int:
        """Bytes of all rectangles and what says which cells are real."""
        rows = np.diff(self._edges)
        cells = int(rows @ np.array(self._widths, dtype=np.int64))
        inner = int(np.prod(self._values.shape[1:], dtype=np.int64))
        mask = 0 if self._mask is None else self._mask.itemsize
        return cells * (self._dtype.itemsize * inner + mask)

    @overload
    def __getitem__(self, k: int) -> Rectangle: ...
    @overload
    def __getitem__(self, k: slice) -> list[Rectangle]: ...
    def __getitem__(self, k: int | slice) -> Rectangle | list[Rectangle]:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        first, last, width = self._edges[k], self._edges[k + 1], self._widths[k]
        lengths = self._lengths[first:last]
        ones = self._ones.rows(lengths, width)
        cells = self._cells(first, last, width, ones)
        if self._asked is None or self._mask is None:
            return cells, None
        if self._asked is self._ones:
            return cells, ones.view(self._mask)
        return cells, self._asked.rows(lengths, width)

    def _cells(self, first: int, last: int, width: int, ones: Array) -> Array:
        values = self._values
        if not self._plain:
            filled = np.full((last - first, width, *values.shape[1:]), self._value, self._dtype)
            filled[ones] = values[self._offsets[first] : self._offsets[last]]
            return filled
        starts = self._offsets[first:last]
        if self._side == "pre":
            starts = self._offsets[first + 1 : last + 1] - width
        if not len(starts) or starts[0] < 0 or starts[-1] + width > len(values):
            cells = np.zeros((last - first, width, *values.shape[1:]), values.dtype)
            cells[ones != 0] = values[self._offsets[first] : self._offsets[last]]
        else:
            cells = _stretches(values, starts, width)
            cells *= ones if values.ndim == 1 else ones.reshape(*ones.shape, *self._within)
        if self._flip:
            cells ^= self._flip
        return cells.view(self._dtype)


class _Ones:
    """Rows of ones and zeros, cut from one strip that stays in the processor's cache."""

    def __init__(self, widest: int, side: PadSide, dtype: np.dtype[Any]) -> None:
        self._pre, self.dtype = side == "pre", dtype
        self._widest = 1 << max(0, widest - 1).bit_length()
        self._strip = _strip(self._widest, self._pre, dtype)

    def rows(self, lengths: IntArray, width: int) -> Array:
        """``[rows, width]``, as many ones in each row as its length says."""
        if self._pre:
            return _stretches(self._strip, self._widest - width + lengths, width)
        return _stretches(self._strip, self._widest - lengths, width)


@lru_cache(maxsize=16)
def _strip(half: int, pre: bool, dtype: np.dtype[Any]) -> Array:
    """As many ones as zeros, the zeros first if what comes before rows is filled up."""
    strip = np.zeros(2 * half, dtype)
    strip[slice(half, None) if pre else slice(half)] = 1
    return strip


def _stretches(values: Array, starts: IntArray, width: int) -> Array:
    """``width`` values from each of ``starts`` on, ``[rows, width, ...]``, as a copy."""
    size, unit = values.itemsize, values.strides[0]
    shape: tuple[int, ...] = (len(values) - width + 1, width)
    strides: tuple[int, ...] = (unit, unit)
    if values.ndim > 1:  # each row is copied as a whole
        shape, strides = (shape[0], width * (unit // size)), (unit, size)
    # All stretches of that width, overlapping, as rows of a view.
    stretches: Array = np.ndarray(shape, values.dtype, values.data, 0, strides)
    found: Array = stretches[starts]
    return found if values.ndim == 1 else found.reshape(len(starts), width, *values.shape[1:])


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return f"{dtype.kind}{dtype.itemsize}" in PLAIN


def _offsets(lengths: IntArray) -> IntArray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _cut(
    values: Array, lengths: IntArray, max_length: int, side: PadSide
) -> tuple[Array, IntArray]:
    """Rows of ``max_length`` values at most."""
    offsets = _offsets(lengths)
    if _is_plain(values.dtype):
        return cut_rows(values, offsets, max_length, side)
    kept = np.minimum(lengths, max_length)
    first = offsets[1:] - kept if side == "pre" else offsets[:-1]
    places = np.arange(int(kept.sum())) + np.repeat(first - _offsets(kept)[:-1], kept)
    return values[places], kept
