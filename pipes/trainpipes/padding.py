"""Rows of different lengths to rectangles.

Which cells of all rectangles are real follows from the rows' lengths alone, and those cells are, in
order, the rows' values: so nothing is done row by row. Each rectangle has memory of its own: it can
be kept without the others, and small pieces of memory are used again where one large piece would be
asked of the system anew every time, at several times the cost of filling it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainpipes.errors import ConfigError, DataError
from trainpipes.order import IntArray

__all__ = ["PadSide", "cut_rows", "pad_ragged", "pad_sequences", "real_cells", "widths_of"]

PadSide = Literal["pre", "post"]

Array = npt.NDArray[Any]
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


def real_cells(lengths: IntArray, widths: IntArray, padding: PadSide = "post") -> BoolArray:
    """Which cells hold a value, row after row.

    Args:
        lengths: of each row, int64 ``[rows]``, none more than its width.
        widths: cells of each row, int64 ``[rows]``.
        padding: the side that is filled up.

    Returns:
        bool ``[cells]``.

    >>> real_cells(np.array([1, 2]), np.array([3, 3])).reshape(2, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0]])
    """
    real, counts = _stretches(lengths, widths, padding)
    return np.repeat(real, counts)


def _stretches(lengths: IntArray, widths: IntArray, padding: PadSide) -> tuple[BoolArray, IntArray]:
    """Each row as two stretches of cells: whether they are real, and how many; ``[2 * rows]``."""
    counts = np.empty((len(lengths), 2), dtype=np.int64)
    first = 0 if padding == "post" else 1
    counts[:, first] = lengths
    counts[:, 1 - first] = widths - lengths
    real = np.zeros((len(lengths), 2), dtype=np.bool_)
    real[:, first] = True
    return real.reshape(-1), counts.reshape(-1)


def cut_rows(
    values: Array, lengths: IntArray, limit: int, truncating: PadSide = "post"
) -> tuple[Array, IntArray]:
    """Rows of at most ``limit`` values.

    Args:
        values: the rows, one after the other, ``[values, ...]``.
        lengths: of each row, int64 ``[rows]``.
        limit: the most values of a row.
        truncating: the side that is cut off.

    Returns:
        The values and lengths that stay.
    """
    kept = np.minimum(lengths, limit)
    if (kept == lengths).all():
        return values, lengths
    # What stays of a row is what it would fill, padded on the side that is cut.
    return values[real_cells(kept, lengths, truncating)], kept


def pad_ragged(
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
) -> list[tuple[Array, BoolArray]]:
    """Rows of different lengths as rectangles of several rows each.

    Args:
        values: the rows, one after the other, ``[values, ...]``.
        lengths: of each row, int64 ``[rows]``.
        bounds: first row of each rectangle and the end, int64 ``[rectangles + 1]``.
        value: what fills the other cells.
        dtype: of the rectangles.
        max_length: width L of all rectangles, where longer rows are cut; None for the length of
            the longest row in each.
        multiple: widths are rounded up to a multiple of this.
        padding: the side that is filled up.
        truncating: the side that is cut.

    Returns:
        For each rectangle its cells ``[B, L, ...]``, in memory of their own, and which of them are
        real, bool ``[B, L]``.
    """
    if max_length is not None:
        values, lengths = cut_rows(values, lengths, max_length, truncating)
    widths = widths_of(lengths, bounds, max_length, multiple)
    real, counts = _stretches(lengths, np.repeat(widths, np.diff(bounds)), padding)
    edges = bounds.tolist()
    ends = np.concatenate([[0], np.cumsum(lengths)])[bounds].tolist()
    rectangles = []
    for k, width in enumerate(widths.tolist()):
        start, stop = edges[k], edges[k + 1]
        filled = real[2 * start : 2 * stop].repeat(counts[2 * start : 2 * stop])
        cells = np.full((len(filled), *values.shape[1:]), value, dtype=dtype)
        cells[filled] = values[ends[k] : ends[k + 1]]
        shape = (stop - start, width)
        rectangles.append((cells.reshape(*shape, *values.shape[1:]), filled.reshape(shape)))
    return rectangles


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
