"""Rows of several sources that must have the same columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from trainpipes.runtime.rows.payload import Payload
from trainpipes.runtime.rows.tensor_rows import TensorRows

__all__ = ["columns_of", "difference", "in_columns", "said"]


def columns_of(data: Payload) -> Any:
    """What rows of different sources must agree in: columns and their types, or names, dtypes and shapes
    of tensors. Of Python objects no more than that they are such."""
    if isinstance(data, pa.Table):
        return data.schema.remove_metadata()
    if isinstance(data, TensorRows):
        some = data.slice(0, 0).tensors
        return data.names, tuple((t.dtype, tuple(t.shape[1:])) for t in some)
    return "Python objects"


def difference(wanted: Any, found: Any) -> tuple[str, str] | None:
    """In what two of ``columns_of`` differ, as either has it; None where they do not, but for the order
    of columns.

    >>> one, two = pa.schema([("x", pa.int8())]), pa.schema([("x", pa.string())])
    >>> difference(one, two)
    ("column 'x' as int8", "column 'x' as string")
    """
    if not (isinstance(wanted, pa.Schema) and isinstance(found, pa.Schema)):
        return None if wanted == found else (said(wanted), said(found))
    if wanted.equals(found):
        return None
    for name in [*wanted.names, *found.names]:
        types = [
            schema.field(name).type if name in schema.names else None for schema in (wanted, found)
        ]
        if types[0] is None or types[1] is None or not types[0].equals(types[1]):
            one, other = [
                f"no column {name!r}" if kind is None else f"column {name!r} as {kind}"
                for kind in types
            ]
            return one, other
    return None


def in_columns(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """A table whose columns differ at most in their order, and in what stands in their types for the names of
    values, as they are wanted."""
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
