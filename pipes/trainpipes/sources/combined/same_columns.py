"""Rows of several sources that must have the same columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from trainpipes.columns.payload import Payload
from trainpipes.columns.tensor_rows import TensorRows

#: What rows are that are Python objects.
OBJECTS = "Python objects"


def columns_of(data: Payload) -> Any:
    """What rows of different sources must agree in: columns and their types, or names, dtypes and shapes
    of tensors. Of Python objects no more than that they are such."""
    if isinstance(data, pa.Table):
        return data.schema.remove_metadata()
    if isinstance(data, TensorRows):
        some = data.slice(0, 0).tensors
        return data.names, tuple((t.dtype, tuple(t.shape[1:])) for t in some)
    return OBJECTS


def difference(wanted: Any, found: Any, names_only: bool = False) -> tuple[str, str] | None:
    """In what two of ``columns_of`` differ, as either has it; None where they do not, but for the order
    of columns, and with ``names_only`` for their types.

    >>> one, two = pa.schema([("x", pa.int8())]), pa.schema([("x", pa.string())])
    >>> difference(one, two)
    ("column 'x' as int8", "column 'x' as string")
    """
    if not (isinstance(wanted, pa.Schema) and isinstance(found, pa.Schema)):
        return None if wanted == found else (said(wanted), said(found))
    if wanted.equals(found):
        return None
    for name in [*wanted.names, *found.names]:
        types: list[Any] = [
            schema.field(name).type if name in schema.names else None for schema in (wanted, found)
        ]
        lacks = types[0] is None or types[1] is None
        if lacks or not (names_only or types[0].equals(types[1])):
            one, other = [
                f"no column {name!r}" if kind is None else f"column {name!r} as {kind}"
                for kind in types
            ]
            return one, other
    return None


def in_columns(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """A table with columns of the same names as they are wanted: in that order, and in those types.

    Raises:
        pa.ArrowException: a value is not to be had in its type without a loss.
    """
    same = table.schema.remove_metadata().equals(wanted, check_metadata=True)
    return table if same else table.select(wanted.names).cast(wanted)


def said(kind: Any) -> str:
    """One of ``columns_of``, for messages."""
    if isinstance(kind, pa.Schema):
        return f"Arrow columns {', '.join(kind.names)}"
    if isinstance(kind, str):
        return kind
    names, shapes = kind
    return f"tensors {', '.join(f'{dtype}{list(shape)}' for dtype, shape in shapes)}" + (
        "" if names is None else f" named {', '.join(names)}"
    )
