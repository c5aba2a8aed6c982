from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from trainpipes.columns.payload import Payload
from trainpipes.columns.row_types import NoColumn
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.planning.as_columns import gives_objects, known_columns
from trainpipes.engine.planning.first_rows import first_rows
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.errors import SchemaError, TrainpipesError
from trainpipes.kinds.source import RowSource
from trainpipes.kinds.stage import Stage, is_ours

#: What rows are that are Python objects.
OBJECTS = "Python objects"


def columns_of(data: Payload) -> Any:
    """What rows of different sources must agree in: columns and types, or tensors' dtypes and shapes."""
    if isinstance(data, pa.Table):
        return data.schema.remove_metadata()
    if isinstance(data, TensorRows):
        some = data.slice(0, 0).tensors
        return data.names, tuple((t.dtype, tuple(t.shape[1:])) for t in some)
    return OBJECTS


def difference(wanted: Any, found: Any, names_only: bool = False) -> tuple[str, str] | None:
    """How two of ``columns_of`` differ, beyond the order (and, with ``names_only``, types); else None."""
    if not (isinstance(wanted, pa.Schema) and isinstance(found, pa.Schema)):
        return None if wanted == found else (said(wanted), said(found))
    if wanted.equals(found):
        return None
    for name in [*wanted.names, *found.names]:
        one, other = (s.field(name).type if name in s.names else None for s in (wanted, found))
        if one is None or other is None or not (names_only or one.equals(other)):
            return _typed(name, one), _typed(name, other)
    return None


def _typed(name: str, kind: pa.DataType | None) -> str:
    return f"no column {name!r}" if kind is None else f"column {name!r} as {kind}"


def in_columns(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    same = table.schema.remove_metadata().equals(wanted, check_metadata=True)
    return table if same else table.select(wanted.names).cast(wanted)


def said(kind: Any) -> str:
    if isinstance(kind, pa.Schema):
        return f"Arrow columns {', '.join(kind.names)}"
    if isinstance(kind, str):
        return kind
    names, shapes = kind
    return f"tensors {', '.join(f'{dtype}{list(shape)}' for dtype, shape in shapes)}" + (
        "" if names is None else f" named {', '.join(names)}"
    )


#: Rows that can be read only once, of which no first one can be looked at.
ONCE = "once"


def is_python(inputs: Inputs) -> bool:
    stages = inputs.chain.stages
    return gives_objects(stages) and all(is_ours(type(stage)) for stage in stages)


def kind_of(inputs: Inputs, steps: Sequence[Stage], caller: str) -> Any:
    """The kind of the rows after some stages: ``columns_of``, ``ONCE``, or None for no rows."""
    known = known_columns(inputs, steps)
    if known is not None:
        empty = isinstance(inputs.source, RowSource) and not inputs.blocks.rows
        return None if empty else known
    if is_python(inputs):
        return OBJECTS
    if inputs.chain.opener.read_once:
        return ONCE
    try:
        data = first_rows(inputs, steps, caller)
    except Exception as error:
        if isinstance(error, TrainpipesError) and not hasattr(error, "_trainpipes"):
            raise
        return None  # it is about a row, and raised when that is due
    return None if data is None else columns_of(data)


def united(
    schemas: Mapping[Any, pa.Schema],
    unlike: Callable[[Any, str, Any, str], SchemaError],
    wider: Callable[[pa.Field, pa.Field], pa.Field],
) -> pa.Schema:
    (first, schema), *others = schemas.items()
    fields = {field.name: (field, first) for field in schema}
    for name, own in others:
        odd = difference(schema, own, names_only=True)
        if odd is not None:
            raise unlike(name, odd[1], first, odd[0])
        for field in own:
            known, whose = fields[field.name]
            try:
                fields[field.name] = wider(known, field), whose
            except NoColumn:
                has, other = (f"column {f.name!r} as {f.type}" for f in (field, known))
                raise unlike(name, has, whose, other) from None
    return pa.schema([field for field, _ in fields.values()])
