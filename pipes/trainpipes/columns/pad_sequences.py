"""``pad_sequences``: sequences of different lengths as one array, as Keras makes it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from trainpipes._internal.checks import require
from trainpipes._internal.types import IntArray
from trainpipes.columns.arrays import Array
from trainpipes.columns.rectangles import RaggedRows
from trainpipes.errors import ConfigError, DataError, shown


def pad_sequences(
    sequences: Sequence[Any],
    maxlen: int | None = None,
    dtype: npt.DTypeLike = "int32",
    padding: str = "pre",
    truncating: str = "pre",
    value: Any = 0.0,
) -> Array:
    """Sequences of different lengths as one array, as Keras' function of this name.

    Args:
        sequences: B sequences of T values each, T differing, or of T arrays of one shape.
        maxlen: length of all; longer ones are cut. None for the longest.
        dtype: of the result; ``object`` for strings.
        padding: "pre" or "post", the side that is filled up.
        truncating: "pre" or "post", the side on which sequences are cut.
        value: what is filled in.

    Returns:
        ``[B, maxlen]``, or ``[B, maxlen, ...]``.

    Raises:
        ConfigError: an option is none of those above, or ``value`` does not go with ``dtype``.
        DataError: a sequence has no length, or its values another shape than the first's.

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
    rows = RaggedRows(
        values, np.cumsum(lengths) - lengths, lengths, value, dtype=dtype, max_length=maxlen,
        padding_side="left" if padding == "pre" else "right",
        truncation_side="left" if truncating == "pre" else "right",
    )  # fmt: skip
    return rows.rectangles(None, np.array([0, len(lengths)]))[0][0]


def _lengths(sequences: Sequence[Any]) -> IntArray:
    try:
        return np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    except TypeError:
        place, value = next((k, s) for k, s in enumerate(sequences) if not hasattr(s, "__len__"))
        raise DataError(
            f"sequences is a list of sequences, got {shown(value)} at position {place}, which has no length"
        ) from None


def _flat(sequences: Sequence[Any], count: int, dtype: npt.DTypeLike) -> Array:
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
