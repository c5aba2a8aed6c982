"""Rows by their numbers, of types that Arrow cannot gather too."""

from __future__ import annotations

from typing import TypeVar

import pyarrow as pa

from trainpipes.columns.arrays import to_arrow
from trainpipes.engine.layout import IntArray

T = TypeVar("T", pa.Table, pa.RecordBatch, pa.Array)


def gathered(rows: T, index: IntArray) -> T:
    """The rows at ``index``. Views of text and bytes, as Polars writes them, are gathered as text and bytes:
    Arrow has no ``take`` for them.

    Args:
        rows: a table, a record batch or an array.
        index: numbers of rows, int64, in any order, with repeats.

    Raises:
        pa.ArrowInvalid: chunks of a column hold more together than its offsets can count.
    """
    places = to_arrow(index)
    try:
        return rows.take(places)
    except pa.ArrowNotImplementedError:
        if isinstance(rows, pa.Array):
            return rows.cast(_without_views(rows.type)).take(places).cast(rows.type)
        plain = [field.with_type(_without_views(field.type)) for field in rows.schema]
        return rows.cast(pa.schema(plain)).take(places).cast(rows.schema)


def _without_views(kind: pa.DataType) -> pa.DataType:
    """A type for the same values whose rows Arrow can gather."""
    types = pa.types
    if types.is_list(kind):
        return pa.list_(_field(kind.value_field))
    if types.is_large_list(kind):
        return pa.large_list(_field(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(_field(kind.value_field), kind.list_size)
    if types.is_struct(kind):
        return pa.struct([_field(kind.field(n)) for n in range(kind.num_fields)])
    return {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(
        kind, kind
    )


def _field(field: pa.Field) -> pa.Field:
    return field.with_type(_without_views(field.type))
