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
        if max_length is not None and int(lengths.max(initial=0)) > max_length:
            values, lengths = _cut(values, lengths, max_length, truncating)
        self._edges: list[int] = bounds.tolist()
        widths = widths_of(lengths, bounds, max_length, multiple)
        self._widths: list[int] = widths.tolist()
        self._cutter = _Cutter(
            padding, np.dtype(dtype), value, None if mask is None else np.dtype(mask)
        )
        self._values = self._cutter.ready(values)
        self._offsets = _offsets(lengths)

    def __len__(self) -> int:
        return len(self._widths)

    @property
    def nbytes(self) -> int:
        """Bytes of all rectangles and what says which cells are real."""
        rows = np.diff(self._edges)
        cells = int(rows @ np.array(self._widths, dtype=np.int64))
        inner = int(np.prod(self._values.shape[1:], dtype=np.int64))
        mask = 0 if self._cutter.mask is None else self._cutter.mask.itemsize
        return cells * (self._cutter.dtype.itemsize * inner + mask)

    @overload
    def __getitem__(self, k: int) -> Rectangle: ...
    @overload
    def __getitem__(self, k: slice) -> list[Rectangle]: ...
    def __getitem__(self, k: int | slice) -> Rectangle | list[Rectangle]:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        offsets = self._offsets[self._edges[k] : self._edges[k + 1] + 1]
        return self._cutter.cut(self._values, offsets, self._widths[k])


class _Cutter:
    """How a rectangle is cut out of values.

    Args:
        side: that is filled up.
        dtype: of the cells.
        value: what fills those that are not real.
        mask: dtype of what says which are; None if nobody asks.
    """

    def __init__(
        self, side: PadSide, dtype: np.dtype[Any], value: Any, mask: np.dtype[Any] | None
    ) -> None:
        self.side, self.dtype, self.value, self.mask = side, dtype, value, mask
        self._plain = _is_plain(dtype)
        self._bits = np.dtype(f"u{dtype.itemsize}") if self._plain else np.dtype(np.bool_)
        # What is blanked out with zeros becomes the value when some bits are turned over.
        self._flip = np.array(value, dtype).view(self._bits) if self._plain else None
        alike = mask is not None and mask.kind in "iu" and mask.itemsize == self._bits.itemsize
        self._mask_is_ones = alike

    def ready(self, values: Array) -> Array:
        """Values as ``cut`` takes them, ``[values, ...]``: as bits where they are plain."""
        values = np.ascontiguousarray(values, self.dtype)
        if not self._plain:
            return values
        return values.view(self._bits) ^ self._flip if self._flip else values.view(self._bits)

    def cut(self, values: Array, offsets: IntArray, width: int) -> Rectangle:
        """A rectangle of some rows.

        Args:
            values: that are ready.
            offsets: where each row starts among them, and the end, int64 ``[B + 1]``.
            width: L.
        """
        lengths = np.diff(offsets)
        ones = _ones(lengths, width, self.side, self._bits)
        cells = self._cells(values, offsets, width, ones)
        if self.mask is None:
            return cells, None
        if self._mask_is_ones:
            return cells, ones.view(self.mask)
        return cells, _ones(lengths, width, self.side, self.mask)

    def _cells(self, values: Array, offsets: IntArray, width: int, ones: Array) -> Array:
        inner = values.shape[1:]
        starts = offsets[1:] - width if self.side == "pre" else offsets[:-1]
        if not self._plain:
            filled = np.full((len(starts), width, *inner), self.value, self.dtype)
            filled[ones] = values[offsets[0] : offsets[-1]]
            return filled
        if not len(starts) or starts[0] < 0 or starts[-1] + width > len(values):
            cells = np.zeros((len(starts), width, *inner), values.dtype)
            cells[ones != 0] = values[offsets[0] : offsets[-1]]
        else:
            cells = _stretches(values, starts, width)
            cells *= ones if values.ndim == 1 else ones.reshape(*ones.shape, *(1,) * len(inner))
        if self._flip:
            cells ^= self._flip
        return cells.view(self.dtype)


def _ones(lengths: IntArray, width: int, side: PadSide, dtype: np.dtype[Any]) -> Array:
    """``[rows, width]``, as many ones in each row as its length says."""
    half = 1 << max(0, width - 1).bit_length()
    strip = _strip(half, side == "pre", dtype)
    return _stretches(strip, half - width + lengths if side == "pre" else half - lengths, width)


@lru_cache(maxsize=16)
def _strip(half: int, pre: bool, dtype: np.dtype[Any]) -> Array:
    """As many ones as zeros, the zeros first if what comes before rows is filled up; it stays in the
    processor's cache."""
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
