"""Rows of different lengths to rectangles, those of several batches copied at once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.arrays import Array, apart
from trainpipes.columns.byte_views import INLINE, STEP, VIEW, buffers_of, joined_views, views_of
from trainpipes.engine.layout import IntArray

Side = Literal["right", "left"]

#: Most bytes of rows that are padded together.
AT_ONCE = 8 << 20

Rectangle = tuple[Array, "Array | None"]


class RaggedRows:
    """Rows of different lengths, and how rectangles are made of them.

    Args:
        starts: where each row starts in ``values``, int64 ``[rows]``.
        max_length: width L of all rectangles; None for each one's longest row.
        multiple: widths are rounded up to a multiple of this.
        mask: dtype of the mask of real cells; None for none.

    >>> rows = RaggedRows(
    ...     np.array([1, 2, 3]), np.array([0, 1]), np.array([1, 2]), 0, dtype=np.int64, mask=np.bool_
    ... )
    >>> cells, real = rows.rectangles(None, np.array([0, 2]))[0]
    >>> cells
    array([[1, 0],
           [2, 3]])
    """

    def __init__(
        self, values: Array, starts: IntArray, lengths: IntArray, value: Any, *,
        dtype: npt.DTypeLike, max_length: int | None = None, multiple: int = 1,
        padding_side: Side = "right", truncation_side: Side = "right",
        mask: npt.DTypeLike | None = None,
    ) -> None:  # fmt: skip
        if max_length is not None and int(lengths.max(initial=0)) > max_length:
            kept = np.minimum(lengths, max_length)
            starts = starts + (lengths - kept) if truncation_side == "left" else starts
            lengths = kept
        self.max_length, self.multiple = max_length, multiple
        self.side = padding_side
        self.value = np.array(value, dtype)
        self.dtype = self.value.dtype
        self.mask = None if mask is None else np.dtype(mask)
        self.lengths = lengths
        values = np.ascontiguousarray(values)
        self._kind, self._inner = values.dtype, values.shape[1:]
        self.unit = self._kind.itemsize * int(np.prod(self._inner, dtype=np.int64))
        own = _stored(self.value, self._kind)
        #: Whether the type of the values has none for the pads.
        self.pads_later = own is None
        widest = max_length or int(lengths.max(initial=0))
        widest = -(-widest // multiple) * multiple
        pads = np.full((widest, *self._inner), 0 if own is None else own, self._kind)
        rows, filler = (array.reshape(-1).view(np.uint8) for array in (values, pads))
        self._starts, self._bytes = starts * self.unit, (rows, filler)
        self._is_huge = len(filler) > STEP
        if not self._is_huge:
            self._rows = views_of(rows, self._starts, lengths * self.unit)
            self._buffers = [*buffers_of(rows), pa.py_buffer(filler)]
            # Those that stand in their view, and others; the size is filled in.
            sizes = np.array([min(INLINE, len(filler)), len(filler)])
            self._pads = views_of(filler, np.zeros(2, np.int64), sizes, len(self._buffers) - 1)

    @property
    def average_bytes(self) -> float:
        mask = 0 if self.mask is None else self.mask.itemsize
        length = self.max_length or 2 * float(self.lengths.mean() if len(self.lengths) else 0)
        return length * (self.dtype.itemsize * int(np.prod(self._inner, dtype=np.int64)) + mask)

    def rectangles(self, index: IntArray | None, bounds: IntArray) -> Rectangles:
        return Rectangles(self, index, bounds)

    def padded(self, index: IntArray | None, lengths: IntArray, widths: IntArray) -> Array:
        """Rows of these lengths, filled up to ``widths``, one after the other."""
        which: Any = slice(None) if index is None else index
        sizes = (widths - lengths) * self.unit
        nbytes = int(widths.sum()) * self.unit
        at = int(self.side == "left")  # of a row; the other one is that of its pads
        if self._is_huge:
            content = self._row_by_row(self._starts[which], lengths * self.unit, sizes)
        else:
            views = np.empty((len(lengths), 2), VIEW)
            views[:, at] = self._rows[which]
            views[:, 1 - at] = self._pads[(sizes > INLINE).view(np.int8)]
            views["size"][:, 1 - at] = sizes
            content = joined_views(views, self._buffers, nbytes)
        cells = nbytes // self.unit if self.unit else int(widths.sum())
        return content.view(self._kind).reshape(cells, *self._inner)

    def _row_by_row(self, starts: IntArray, sizes: IntArray, pads: IntArray) -> Array:
        rows, filler = self._bytes
        parts = [np.empty(0, np.uint8)]
        for start, size, pad in zip(starts.tolist(), sizes.tolist(), pads.tolist(), strict=True):
            both = rows[start : start + size], filler[:pad]
            parts += both[::-1] if self.side == "left" else both
        return np.concatenate(parts)


def _stored(value: Array, kind: np.dtype[Any]) -> Array | None:
    """A value in the type of the rows, if it becomes just that when cells get their own type."""
    if value.dtype.kind not in "biuf" or kind.kind not in "biuf":
        return None
    with np.errstate(all="ignore"):
        stored = value.astype(kind)
        return stored if stored.astype(value.dtype).tobytes() == value.tobytes() else None


class Rectangles:
    """Ragged rows as rectangles: cells ``[B, L, ...]`` in their own memory, and a mask ``[B, L]``, 1 for
    real cells. Rows are copied together, unless pads make them large, and get their type when a rectangle
    is asked for.
    """

    def __init__(self, rows: RaggedRows, index: IntArray | None, bounds: IntArray) -> None:
        self._lengths = lengths = rows.lengths if index is None else rows.lengths[index]
        self._edges: list[int] = bounds.tolist()
        widths, sizes = widths_of(lengths, bounds, rows.max_length, rows.multiple), np.diff(bounds)
        self._widths: list[int] = widths.tolist()
        self._ends: list[int] = np.cumsum(widths * sizes).tolist()
        self._dtype, self._mask, self._side = rows.dtype, rows.mask, rows.side
        self._value = rows.value if rows.pads_later else None
        self._later: tuple[RaggedRows, IntArray] | None = None
        self._cells: Array | None = None
        if self._ends and self._ends[-1] * rows.unit > AT_ONCE:
            self._later = rows, np.arange(len(lengths)) if index is None else index
        else:  # without the rows, which may be those of a whole window
            self._cells = rows.padded(index, lengths, np.repeat(widths, sizes))

    def __len__(self) -> int:
        return len(self._widths)

    def __getitem__(self, k: int) -> Rectangle:
        start, stop, width = self._edges[k], self._edges[k + 1], self._widths[k]
        end, lengths = self._ends[k], self._lengths[start:stop]
        if self._later is not None:
            rows, index = self._later
            found = rows.padded(index[start:stop], lengths, np.full(stop - start, width))
        else:
            assert self._cells is not None
            found = self._cells[end - width * (stop - start) : end]
        cells = found.reshape(stop - start, width, *found.shape[1:]).astype(self._dtype)
        if self._value is not None:
            cells[_ones(lengths, width, self._side, np.dtype(np.bool_)) == 0] = self._value
        mask = self._mask
        return cells, None if mask is None else _ones(lengths, width, self._side, mask)


def widths_of(
    lengths: IntArray, bounds: IntArray, max_length: int | None = None, multiple: int = 1
) -> IntArray:
    widths = np.zeros(len(bounds) - 1, dtype=np.int64)
    if max_length is not None:
        widths[:] = max_length
    else:
        some = np.diff(bounds) > 0
        if some.any():
            widths[some] = np.maximum.reduceat(lengths, bounds[:-1][some])
    return widths if multiple == 1 else -(-widths // multiple) * multiple


def _ones(lengths: IntArray, width: int, side: Side, dtype: np.dtype[Any]) -> Array:
    """``[rows, width]``, as many ones in each row as its length says."""
    view, half = _strips(width, side == "left", dtype)
    found: Array = view[half - width + lengths if side == "left" else half - lengths]
    return found


@lru_cache(maxsize=4096)
def _strips(width: int, pre: bool, dtype: np.dtype[Any]) -> tuple[Array, int]:
    half = 1 << max(0, width - 1).bit_length()
    return _stretches(_strip(half, pre, dtype), width), half


@lru_cache(maxsize=16)
def _strip(half: int, pre: bool, dtype: np.dtype[Any]) -> Array:
    """As many ones as zeros, the zeros first if rows are filled up in front."""
    strip = np.zeros(2 * half, dtype)
    strip[slice(half, None) if pre else slice(half)] = 1
    return strip


def _stretches(values: Array, width: int) -> Array:
    shape = max(0, len(values) - width + 1), width
    return np.ndarray(shape, values.dtype, values.data, 0, values.strides * 2)


def cut_rows(values: Array, offsets: Any, length: int, side: Side) -> tuple[Array, IntArray]:
    """Rows cut to ``length`` values at their starts ("left") or ends ("right"), and their lengths.

    >>> cut_rows(np.array([1, 2, 3, 4]), np.array([0, 1, 4]), 2, "left")
    (array([1, 3, 4]), array([1, 2]))
    """
    unit = values.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))
    edges = np.asarray(offsets).astype(np.int64) * unit
    data = pa.py_buffer(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    buffers = [None, pa.py_buffer(edges), data]
    strings = pa.Array.from_buffers(pa.large_binary(), len(edges) - 1, buffers)
    from_end = side == "left" and length * unit
    cut = (-length * unit,) if from_end else (0, length * unit)
    content, edges = apart(pc.binary_slice(strings, *cut))
    return content.view(values.dtype).reshape(-1, *values.shape[1:]), np.diff(edges) // unit
