"""Columns of a table as numbers and as categories, or an error that says why not."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes import DataError, SchemaError

__all__ = ["categories_of", "is_category", "is_number", "numbers_of"]


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this type is one of numbers where nothing is said: bools are categories."""
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


def is_category(kind: pa.DataType) -> bool:
    """Whether a column of this type is one of categories where nothing is said."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_boolean(kind) or _is_text(kind))


def numbers_of(table: pa.Table, name: str) -> npt.NDArray[np.float64]:
    """A column as float64 ``[rows]``: NaN where it is null or NaN.

    Raises:
        DataError: a number is infinite.
        SchemaError: it holds something else.
    """
    column = _column(table, name)
    kind = column.type
    if not (is_number(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)):
        raise SchemaError(
            f"numeric column {name!r} must hold numbers, got {kind}: name it in categorical, or make "
            "numbers of it by map()"
        )
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    found: npt.NDArray[np.float64]
    found = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if np.isinf(found).any():
        raise DataError(
            f"numeric column {name!r} holds {found[np.isinf(found)][0]}, which cannot be scaled: "
            "put null or a number there by map(), or leave such rows out with filter()"
        )
    return found


def categories_of(table: pa.Table, name: str) -> Any:
    """A column as an Arrow array of texts or of int64, null where it is missing.

    Raises:
        DataError: a number is not whole.
        SchemaError: it holds something else.
    """
    column = _column(table, name)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if _is_text(kind):
        return column.cast(pa.large_string())
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind):
        column = column.cast(pa.uint8()) if pa.types.is_boolean(kind) else column
        try:
            return column.cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise DataError(
                f"categorical column {name!r} holds integers of more than 63 bits ({error}): make texts of "
                "them by map()"
            ) from error
    if pa.types.is_floating(kind):  # as pandas writes integers of which some are missing
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column)
        whole = pc.equal(pc.round(column), column)
        if pc.all(pc.fill_null(pc.and_(whole, pc.is_finite(column)), True)).as_py():
            return column.cast(pa.int64())
        raise DataError(
            f"categorical column {name!r} holds numbers that are not whole: name it in numeric, or make "
            "texts of it by map()"
        )
    raise SchemaError(
        f"categorical column {name!r} must hold texts, integers or bools, got {kind}: make texts of it by "
        "map(), or leave it out"
    )


def _column(table: pa.Table, name: str) -> Any:
    column = table.column(name).combine_chunks()
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _is_text(kind: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_string(kind) or is_.is_large_string(kind) or is_.is_string_view(kind))
