"""Numbers in the dtype of their column: the same numbers, or an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainpipes.errors import DataError
from trainpipes.sources.memmap_format import Array, Column
from trainpipes.sources.memmap_rows import Ragged

__all__ = ["cast"]


def cast(rows: Ragged, column: Column, first_row: int, asked: bool) -> Array:
    """The values of some rows in the column's dtype.

    Args:
        rows: the values; of an even column, each row has one.
        column: says the dtype.
        first_row: number of the first of these rows.
        asked: whether the user named the dtype, so that floats may be narrowed.

    Raises:
        DataError: a value would be another one; says of which row.
    """
    values, dtype = rows.values, np.dtype(column.dtype).newbyteorder("<")
    if values.dtype == dtype or not values.size:
        return values.astype(dtype, copy=False)
    narrows = asked and dtype.kind == "f"
    if narrows or np.can_cast(values.dtype, dtype, "safe"):
        return values.astype(dtype)
    bad = _changed(values, dtype)
    if bad.any():
        place = int(np.argmax(bad.reshape(len(values), -1).any(axis=1)))
        row = first_row + int(np.searchsorted(np.cumsum(rows.lengths), place, side="right"))
        first_bad = values[place][bad[place]].flat[0] if values.ndim > 1 else values[place]
        raise DataError(
            f"write_memmap(): row {row}: column {column.name!r} is {column.dtype}, which cannot hold "
            f"{values.dtype} {first_bad}: pass dtype={{{column.name!r}: ...}} with one that can, or convert "
            "the values",
            row=row,
        )
    return values.astype(dtype)


def _changed(values: Array, dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    """Which values would be others in a dtype."""
    outside = np.zeros(values.shape, dtype=np.bool_)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        outside = ~((values >= bounds.min) & (values <= bounds.max))
        values = np.where(outside, 0, values)
    changed: npt.NDArray[np.bool_] = outside | (values.astype(dtype).astype(values.dtype) != values)
    return changed & (values == values) if dtype.kind == "f" else changed  # NaN stays NaN
