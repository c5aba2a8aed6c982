"""Rows of different lengths to rectangles: cut out of all values at once, ends blanked; and sequences, as
Keras makes them (``pad_sequences``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.checks import IntArray, require, whole_number, wrong
from trainpipes.columns.arrays import Array, apart
from trainpipes.columns.types import as_array
from trainpipes.errors import ConfigError, DataError, shown

Side = Literal["right", "left"]

Rectangle = tuple[Array, "Array | None"]

#: Cells of a row, at least, that is copied by itself, as those of sound are.
WIDE = 8192
#: Kinds and sizes of numbers of which rectangles are cut as plain bits.
PLAIN = {f"{kind}{size}" for kind in "iufb" for size in (1, 2, 4, 8)}


class RaggedRows:
    """Rows of different lengths, and how rectangles are made of them.

    Args:
        starts: where each row starts in ``values``, int64 ``[rows]``.
        max_length: width L of all rectangles; None for the longest row of each.
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
            cut = np.minimum(lengths, max_length)
            starts = starts + (lengths - cut) if truncation_side == "left" else starts
            lengths = cut
        self.values = np.ascontiguousarray(values)
        self.starts, self.lengths = starts, lengths
        self.max_length, self.multiple = max_length, multiple
        self.side = padding_side
        self.value, self.dtype = value, np.dtype(dtype)
        self.mask = None if mask is None else np.dtype(mask)
        self.inner: tuple[int, ...] = self.values.shape[1:]
        #: Whether rectangles are cut as stretches, whose ends are blanked out.
        self.plain = _is_plain(self.dtype) and _is_plain(self.values.dtype) and not np.ndim(value)
        # Multiplied by 0 or 1 cells are exact as integers; floats are taken as such.
        kind = self.dtype if self.dtype.kind in "iu" else f"u{self.dtype.itemsize}"
        self.bits = np.dtype(kind) if self.plain else np.dtype(np.bool_)
        # What is blanked out with zeros becomes the value when some bits are turned over.
        self.flip = np.array(value, self.dtype).view(self.bits) if self.plain else None
        self._views: dict[int, Array] = {}

    @property
    def average_bytes(self) -> float:
        inner = int(np.prod(self.inner, dtype=np.int64))
        mask = 0 if self.mask is None else self.mask.itemsize
        length = self.max_length or 2 * float(self.lengths.mean() if len(self.lengths) else 0)
        return length * (self.dtype.itemsize * inner + mask)

    def rectangles(self, index: IntArray | None, bounds: IntArray) -> Rectangles:
        return Rectangles(self, index, bounds)

    def stretches(self, width: int) -> Array:
        view = self._views.get(width)
        if view is None:
            view = self._views[width] = _stretches(self.values, width)
        return view


class Rectangles:
    """Ragged rows as rectangles, made when asked for: cells ``[B, L, ...]`` in their own memory,
    and a mask ``[B, L]``, 1 for real cells.
    """

    def __init__(self, rows: RaggedRows, index: IntArray | None, bounds: IntArray) -> None:
        self._rows = rows
        starts = rows.starts if index is None else rows.starts[index]
        self._lengths = lengths = rows.lengths if index is None else rows.lengths[index]
        self._edges: list[int] = bounds.tolist()
        widths = widths_of(lengths, bounds, rows.max_length, rows.multiple)
        self._widths: list[int] = widths.tolist()
        if rows.side == "left":
            starts = starts + lengths - np.repeat(widths, np.diff(bounds))
        self._starts = starts
        # Of these a stretch would begin or end beside the values.
        last = len(rows.values) - int(widths.max(initial=0))
        outside = np.flatnonzero(starts < 0 if rows.side == "left" else starts > last)
        self._outside = set((np.searchsorted(bounds, outside, side="right") - 1).tolist())

    def __len__(self) -> int:
        return len(self._widths)

    def __getitem__(self, k: int) -> Rectangle:
        rows, width = self._rows, self._widths[k]
        start, stop = self._edges[k], self._edges[k + 1]
        lengths = self._lengths[start:stop]
        if width >= WIDE:
            return self._copied(start, stop, width)
        if not rows.plain or k in self._outside or start == stop:
            return self._row_by_row(start, stop, width)
        ones = _ones(lengths, width, rows.side, rows.bits)
        cells = rows.stretches(width)[self._starts[start:stop]]
        if rows.inner:
            cells = cells.reshape(stop - start, width, *rows.inner)
        if cells.dtype != rows.dtype:
            cells = cells.astype(rows.dtype)
        self._blank(cells, ones)
        return cells, self._mask(ones, lengths, width)

    def _blank(self, cells: Array, ones: Array) -> None:
        rows = self._rows
        bits = cells if cells.dtype == rows.bits else cells.view(rows.bits)
        if rows.inner:
            ones = ones.reshape(*ones.shape, *(1,) * len(rows.inner))
        if rows.flip:
            bits ^= rows.flip
            bits *= ones
            bits ^= rows.flip
        else:
            bits *= ones

    def _mask(self, ones: Array, lengths: IntArray, width: int) -> Array | None:
        mask = self._rows.mask
        if mask is None or mask == ones.dtype:
            return None if mask is None else ones
        return _ones(lengths, width, self._rows.side, mask)

    def _copied(self, start: int, stop: int, width: int) -> Rectangle:
        """Each row by itself, in a single pass over the cells."""
        rows, lengths = self._rows, self._lengths[start:stop]
        cells = np.empty((len(lengths), width, *rows.inner), rows.dtype)
        each = zip(cells, self._starts[start:stop].tolist(), lengths.tolist(), strict=True)
        for row, first, length in each:
            before = width - length if rows.side == "left" else 0
            row[:before] = row[before + length :] = rows.value
            row[before : before + length] = rows.values[first + before : first + before + length]
        mask = None if rows.mask is None else _ones(lengths, width, rows.side, rows.mask)
        return cells, mask

    def _row_by_row(self, start: int, stop: int, width: int) -> Rectangle:
        rows, lengths = self._rows, self._lengths[start:stop]
        pre = rows.side == "left"
        firsts = self._starts[start:stop] + (width - lengths if pre else 0)
        ones = _ones(lengths, width, rows.side, np.dtype(np.bool_))
        cells = np.full((len(lengths), width, *rows.inner), rows.value, rows.dtype)
        each = zip(firsts.tolist(), lengths.tolist(), strict=True)
        some = [rows.values[first : first + length] for first, length in each]
        cells[ones] = np.concatenate(some) if some else rows.values[:0]
        return cells, self._mask(ones, lengths, width)


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
    mask: Array = view[half - width + lengths if side == "left" else half - lengths]
    return mask


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
    size, unit = values.itemsize, values.strides[0]
    shape: tuple[int, ...] = (max(0, len(values) - width + 1), width)
    strides: tuple[int, ...] = (unit, unit)
    if values.ndim > 1:  # each row is copied as a whole
        shape, strides = (shape[0], width * (unit // size)), (unit, size)
    return np.ndarray(shape, values.dtype, values.data, 0, strides)


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return f"{dtype.kind}{dtype.itemsize}" in PLAIN


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


#: What NumPy raises for values that a dtype does not hold.
UNFIT = (ValueError, TypeError, OverflowError, FloatingPointError)


def pad_sequences(
    sequences: Sequence[Any],
    maxlen: int | None = None,
    dtype: npt.DTypeLike = "int32",
    padding: str = "pre",
    truncating: str = "pre",
    value: Any = 0.0,
) -> Array:
    """Sequences of different lengths as an array, as Keras' function of this name.

    Args:
        sequences: B sequences of T values each, T differing, or of T arrays of the same shape.
        maxlen: length of all; longer ones are cut. None for the longest.
        dtype: of the result; ``object`` for strings.
        padding: "pre" or "post", the side that is filled up.
        truncating: "pre" or "post", the side on which sequences are cut.
        value: to fill in.

    Returns:
        ``[B, maxlen]``, or ``[B, maxlen, ...]``.

    Raises:
        ConfigError: an option is none of those above, or ``value`` does not go with ``dtype``.
        DataError: a sequence has no length, its values another shape than the first's, or ``dtype`` does
            not hold one of them (fractions of floats are cut off).

    >>> pad_sequences([[1], [2, 3], [4, 5, 6]])
    array([[0, 0, 1],
           [0, 2, 3],
           [4, 5, 6]], dtype=int32)
    """
    for option, side in (("padding", padding), ("truncating", truncating)):
        require(side in ("pre", "post"), option, '"pre" or "post"', side)
    if not hasattr(sequences, "__len__"):
        raise DataError(
            f"sequences is a list of sequences, got {type(sequences).__name__}, which has no "
            "length; make a list() of it"
        )
    if not isinstance(sequences, list | tuple):  # others may have labels in place of numbers
        sequences = list(sequences)
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        raise wrong("dtype", 'a dtype of NumPy, such as "int64"', dtype) from None
    if isinstance(value, str) and dtype != np.dtype(object) and dtype.kind != "U":
        raise ConfigError(
            f"value {value!r} is a string, which dtype {dtype} cannot hold; for strings of any length pass "
            "dtype=object"
        )
    _check_value(value, dtype)
    if maxlen is not None:
        maxlen = whole_number(maxlen, 0, "maxlen")
    lengths = _lengths(sequences)
    if maxlen is None:
        if not len(lengths):
            raise DataError("no sequences to take the longest of, got none; pass maxlen")
        maxlen = int(lengths.max())
    values = _flat(sequences, int(lengths.sum()), dtype)
    rows = RaggedRows(
        values, np.cumsum(lengths) - lengths, lengths, value, dtype=dtype, max_length=maxlen,
        padding_side="left" if padding == "pre" else "right",
        truncation_side="left" if truncating == "pre" else "right",
    )  # fmt: skip
    return rows.rectangles(None, np.array([0, len(lengths)]))[0][0]


def _check_value(value: Any, dtype: np.dtype[Any]) -> None:
    try:
        found = _cast(np.asarray(value), dtype)
        held = dtype.kind not in "iu" or bool(np.all(found == value))
    except UNFIT:
        held = False
    require(held, "value", f"one that {dtype} holds", value)


def _lengths(sequences: Sequence[Any]) -> IntArray:
    try:
        return np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    except TypeError:
        place, value = next((k, s) for k, s in enumerate(sequences) if not _has_length(s))
        raise DataError(
            f"sequences is a list of sequences, got {shown(value)} at position {place}, which has no length"
        ) from None


def _has_length(value: Any) -> bool:
    try:
        return len(value) >= 0
    except TypeError:
        return False


def _flat(sequences: Sequence[Any], count: int, dtype: npt.DTypeLike) -> Array:
    filled = [k for k, s in enumerate(sequences) if len(s)]
    if not filled:
        return np.empty(0, dtype=dtype)
    first = _array(sequences[filled[0]], filled[0], None)
    wanted = np.dtype(dtype)
    plain = all(type(s) is list or type(s) is tuple for s in sequences)
    if plain and first.ndim == 1 and wanted.kind in "iufb" and wanted != np.uint64:
        wide = (
            np.int64 if wanted.kind in "iu" else wanted
        )  # NumPy's own integers wrap around in others
        with suppress(
            *UNFIT
        ):  # values of several shapes, or that do not fit, which the slower way names
            values = np.fromiter(chain.from_iterable(sequences), dtype=wide, count=count)
            return _cast(values, wanted)
    arrays = []
    for k in filled:
        # Numbers are cast as a whole: to look whether they fit takes longer for each than the rest.
        arrays.append(_array(sequences[k], k, None if wanted.kind in "iufb" else wanted))
        if arrays[-1].shape[1:] != first.shape[1:]:
            raise DataError(
                f"all values have the shape of the first, {first.shape[1:]}, got "
                f"{arrays[-1].shape[1:]} in the sequence at position {k}"
            )
    if all(array.dtype == arrays[0].dtype for array in arrays):
        with suppress(*UNFIT):
            return _cast(np.concatenate(arrays), wanted)
    return np.concatenate(
        [_array(array, k, wanted) for k, array in zip(filled, arrays, strict=True)]
    )


def _array(sequence: Any, place: int, dtype: np.dtype[Any] | None) -> Array:
    try:
        array: Array = as_array(sequence)
        if dtype is None or dtype.kind not in "iufb":
            array = np.asarray(array, dtype=dtype)
        else:
            array = _cast(np.asarray(array), dtype)
        if not array.ndim:
            raise TypeError("it is a single value")
        return array
    except UNFIT as error:
        kind = "" if dtype is None else f" of {dtype}"
        raise DataError(
            f"the sequence at position {place} makes no array{kind}: {error}"
        ) from error


def _cast(array: Array, dtype: np.dtype[Any]) -> Array:
    """An array in another dtype; raises one of ``UNFIT`` for what it has no number for."""
    if array.dtype.kind in "iu" and dtype.kind in "iu" and not np.can_cast(array.dtype, dtype):
        bounds = np.iinfo(dtype)
        for value in (array.min(), array.max()) if array.size else ():
            if not bounds.min <= value <= bounds.max:
                raise OverflowError(f"{value} is not within {bounds.min} to {bounds.max}")
    with np.errstate(invalid="raise"):
        return array.astype(dtype, copy=False)
