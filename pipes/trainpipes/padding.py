"""Rows of different lengths to rectangles.

Rows may lie anywhere in an array of values: those of a rectangle are gathered and filled up in one go,
as stretches of the width of several rectangles, of which the ends are painted over. So the work is done in
few large steps, for which NumPy lets go of the interpreter's lock: padded one by one, two threads
are slower than one. Each rectangle has memory of its own, and can be kept without the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainpipes.errors import ConfigError, DataError
from trainpipes.order import IntArray

__all__ = ["PadSide", "pad_ragged", "pad_sequences", "widths_of"]

PadSide = Literal["pre", "post"]

Array = npt.NDArray[Any]

#: Cells that are made as one, at most, and how many times those that are asked for.
MOST_CELLS, MOST_WASTE = 1 << 18, 1.5
BoolArray = npt.NDArray[np.bool_]


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


def pad_ragged(
    values: Array,
    lengths: IntArray,
    bounds: IntArray,
    value: Any,
    starts: IntArray | None = None,
    *,
    dtype: npt.DTypeLike,
    max_length: int | None = None,
    multiple: int = 1,
    padding: PadSide = "post",
    truncating: PadSide = "post",
    mask: npt.DTypeLike = np.bool_,
) -> list[tuple[Array, Array]]:
    """Rows of different lengths as rectangles of several rows each.

    Args:
        values: the rows' values, ``[values, ...]``.
        lengths: of each row, int64 ``[rows]``.
        bounds: first row of each rectangle and the end, int64 ``[rectangles + 1]``.
        value: what fills the other cells.
        starts: of each row in ``values``, int64 ``[rows]``; None where the rows lie one after the other.
        dtype: of the rectangles.
        max_length: width L of all rectangles, where longer rows are cut; None for the length of
            the longest row in each.
        multiple: widths are rounded up to a multiple of this.
        padding: the side that is filled up.
        truncating: the side that is cut.
        mask: dtype of what says which cells are real.

    Returns:
        For each rectangle its cells ``[B, L, ...]``, in memory of their own, and 1 for those that are
        real, 0 for others, ``[B, L]``.
    """
    if starts is None:
        starts = np.cumsum(lengths) - lengths
    if max_length is not None:
        kept = np.minimum(lengths, max_length)
        if truncating == "pre":
            starts = starts + (lengths - kept)
        lengths = kept
    widths = widths_of(lengths, bounds, max_length, multiple)
    if padding == "pre":
        starts = starts + lengths
    short = lengths.astype(np.int32)[:, None]
    rectangles = []
    edges, each = bounds.tolist(), widths.tolist()
    for first, last in _groups(edges, each):
        widest = max(each[first:last])
        rows = slice(edges[first], edges[last])
        places = np.arange(widest, dtype=np.int32)
        if padding == "pre":
            real = places >= widest - short[rows]
            cells = _stretches(values, starts[rows] - widest, widest)
        else:
            real = places < short[rows]
            cells = _stretches(values, starts[rows], widest)
        cells = _painted(cells, real, value, np.dtype(dtype))
        for k in range(first, last):
            rows = slice(edges[k] - edges[first], edges[k + 1] - edges[first])
            columns = slice(widest - each[k], None) if padding == "pre" else slice(each[k])
            rectangles.append(
                (
                    cells[rows, columns].astype(dtype, order="C"),
                    real[rows, columns].astype(mask, order="C"),
                )
            )
    return rectangles


def _groups(edges: list[int], widths: list[int]) -> Iterator[tuple[int, int]]:
    """Rectangles that are made as one, by numbers ``[first, last)``: few large operations cost threads
    less than many small ones, but all get the width of the widest, and should fit a processor's cache."""
    first = widest = cells = 0
    for k, width in enumerate(widths):
        rows = edges[k + 1] - edges[k]
        widest = max(widest, width)
        wide = (edges[k + 1] - edges[first]) * widest
        cells += rows * width
        if k > first and (wide > MOST_CELLS or wide > MOST_WASTE * cells):
            yield first, k
            first, widest, cells = k, width, rows * width
    if widths:
        yield first, len(widths)


def _painted(cells: Array, real: BoolArray, value: Any, dtype: np.dtype[Any]) -> Array:
    """Cells with ``value`` in all that are not real."""
    if cells.dtype.kind in "iu" and cells.ndim == 2 and dtype.kind in "iu":
        limits = np.iinfo(cells.dtype)
        if limits.min <= value <= limits.max:
            # Three passes without a branch are faster than one with. What overflows comes back.
            number = cells.dtype.type(value)
            cells -= number
            cells *= real
            cells += number
            return cells
    cells = cells.astype(dtype)
    cells[~real] = value
    return cells


def _stretches(values: Array, starts: IntArray, width: int) -> Array:
    """``width`` values from each of ``starts`` on, ``[rows, width, ...]``, as a copy; anything at places that
    are not in ``values``."""
    last = len(values) - width
    if last < 0 or not _is_plain(values):
        return _one_by_one(values, starts, width)
    # All stretches of that width, overlapping, as rows of a view: each is then copied as a whole.
    size = values.itemsize
    view: Array = np.ndarray((last + 1, width), values.dtype, values.data, 0, (size, size))
    found: Array = view[np.clip(starts, 0, last)]
    outside = np.flatnonzero((starts < 0) | (starts > last))
    if len(outside):
        found[outside] = _one_by_one(values, starts[outside], width)
    return found


def _one_by_one(values: Array, starts: IntArray, width: int) -> Array:
    if not len(values):
        return np.zeros((len(starts), width, *values.shape[1:]), values.dtype)
    places = starts[:, None] + np.arange(width)
    found: Array = values[np.clip(places, 0, len(values) - 1)]
    return found


def _is_plain(values: Array) -> bool:
    return values.ndim == 1 and values.flags.c_contiguous and not values.dtype.hasobject


def pad_sequences(
    sequences: Sequence[Any],
    maxlen: int | None = None,
    dtype: npt.DTypeLike = "int32",
    padding: str = "pre",
    truncating: str = "pre",
    value: Any = 0.0,
) -> Array:
    """Sequences of different lengths as one array: a drop-in for Keras' function of this name.

    Args:
        sequences: B sequences of T values each, T differing, or of T arrays of one shape.
        maxlen: length of all; longer ones are cut. None for that of the longest.
        dtype: of the result; ``object`` for strings.
        padding: "pre" or "post", the side that is filled up.
        truncating: "pre" or "post", the side on which sequences are cut.
        value: what is filled in.

    Returns:
        ``[B, maxlen]``, or ``[B, maxlen, ...]``.

    Raises:
        ConfigError: an option is not one of those above, or ``value`` does not go with ``dtype``.
        DataError: a sequence has no length, or its values another shape than those of the first.

    >>> pad_sequences([[1], [2, 3], [4, 5, 6]])
    array([[0, 0, 1],
           [0, 2, 3],
           [4, 5, 6]], dtype=int32)
    >>> pad_sequences([[1], [2, 3], [4, 5, 6]], maxlen=2, padding="post", value=-1)
    array([[ 1, -1],
           [ 2,  3],
           [ 5,  6]], dtype=int32)
    """
    if padding not in ("pre", "post"):
        raise ConfigError(f'padding is "pre" or "post", got {padding!r}')
    if truncating not in ("pre", "post"):
        raise ConfigError(f'truncating is "pre" or "post", got {truncating!r}')
    if not hasattr(sequences, "__len__"):
        raise DataError(
            f"sequences is a list of sequences, got {type(sequences).__name__}, which has no "
            "length; make a list() of it"
        )
    is_text = np.issubdtype(np.dtype(dtype), np.str_)
    if isinstance(value, str) and np.dtype(dtype) != np.dtype(object) and not is_text:
        raise ConfigError(
            f"value {value!r} is a string, which dtype {np.dtype(dtype)} cannot hold; for strings "
            "of any length pass dtype=object"
        )
    lengths = _lengths(sequences)
    if maxlen is None:
        if not len(lengths):
            raise DataError("no sequences to take the longest of, got none; pass maxlen")
        maxlen = int(lengths.max())
    values = _flat(sequences, int(lengths.sum()), dtype)
    ((cells, _),) = pad_ragged(
        values,
        lengths,
        np.array([0, len(lengths)]),
        value,
        dtype=dtype,
        max_length=maxlen,
        padding=_side(padding),
        truncating=_side(truncating),
    )
    return cells


def _side(text: str) -> PadSide:
    return "pre" if text == "pre" else "post"


def _lengths(sequences: Sequence[Any]) -> IntArray:
    try:
        return np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    except TypeError:
        place, found = next((k, s) for k, s in enumerate(sequences) if not hasattr(s, "__len__"))
        raise DataError(
            f"sequences is a list of sequences, got {found!r} at position {place}, which has no length"
        ) from None


def _flat(sequences: Sequence[Any], count: int, dtype: npt.DTypeLike) -> Array:
    """All values, ``[count, ...]``."""
    filled = [k for k, s in enumerate(sequences) if len(s)]
    if not filled:
        return np.empty(0, dtype=dtype)
    first = _array(sequences, filled[0], None)
    plain = all(type(s) is list or type(s) is tuple for s in sequences)
    if plain and first.ndim == 1 and np.dtype(dtype).kind in "iufb":
        try:
            return np.fromiter(chain.from_iterable(sequences), dtype=dtype, count=count)
        except (TypeError, ValueError):
            pass  # values of several shapes, which the slower way names
    arrays = []
    for k in filled:
        arrays.append(_array(sequences, k, dtype))
        if arrays[-1].shape[1:] != first.shape[1:]:
            raise DataError(
                f"all values have the shape of the first, {first.shape[1:]}, got "
                f"{arrays[-1].shape[1:]} in the sequence at position {k}"
            )
    return np.concatenate(arrays)


def _array(sequences: Sequence[Any], k: int, dtype: npt.DTypeLike | None) -> Array:
    try:
        return np.asarray(sequences[k], dtype=dtype)
    except ValueError as error:
        raise DataError(f"the sequence at position {k} makes no array: {error}") from error
