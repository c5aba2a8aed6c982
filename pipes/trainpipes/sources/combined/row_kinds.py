"""Of what kind a pipeline's rows are: as far as that is known before any is read, and by its first row.

Pure functions, called by the thread that looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from trainpipes.columns.payload import Payload
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.planning.as_columns import gives_objects, known_columns
from trainpipes.engine.planning.chain import Inputs
from trainpipes.engine.planning.first_rows import first_rows
from trainpipes.errors import TrainpipesError
from trainpipes.kinds.source import RowSource
from trainpipes.kinds.stage import Stage, is_ours

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


#: Rows that can be read only once, of which no first one can be looked at.
ONCE = "once"


def is_python(inputs: Inputs) -> bool:
    """Whether it is known, without a look at any, that a pipeline's rows are Python objects."""
    stages = inputs.chain.stages
    return gives_objects(stages) and all(is_ours(type(stage)) for stage in stages)


def kind_of(inputs: Inputs, steps: Sequence[Stage], asker: str) -> Any:
    """Of what kind the rows are that come out of some stages: what ``columns_of`` tells, or ``ONCE``; None
    where there are none.

    Args:
        inputs: what the pipeline reads.
        steps: the stages.
        asker: who asks, for messages.
    """
    known = known_columns(inputs, steps)
    if known is not None:
        empty = isinstance(inputs.source, RowSource) and not inputs.blocks.rows
        return None if empty else known
    if is_python(inputs):
        return OBJECTS
    if inputs.chain.opener.read_once:
        return ONCE
    try:
        data = first_rows(inputs, steps, asker)
    except Exception as error:
        if isinstance(error, TrainpipesError) and not hasattr(error, "_trainpipes"):
            raise
        return None  # it is about a row, and raised when that is due
    return None if data is None else columns_of(data)


class Clash(Exception):
    """Two sources have a column of one name.

    Args:
        name: of the column.
        sources: numbers of the two.
    """

    def __init__(self, name: str, sources: tuple[int, int]) -> None:
        super().__init__(name)
        self.name = name
        self.sources = sources


class NoColumns(Exception):
    """Rows that cannot stand beside others, in words."""


def check_names(names: Sequence[Sequence[str]]) -> None:
    """Raise Clash unless all columns, listed for each source, have names of their own.

    >>> check_names([["x", "y"], ["z"]])
    """
    owner: dict[str, int] = {}
    for number, own in enumerate(names):
        for name in own:
            if owner.setdefault(name, number) != number:
                raise Clash(name, (owner[name], number))


def side_by_side(parts: Sequence[Payload]) -> Payload:
    """As many rows as each of the parts has, with the columns of all.

    Rows that are Python objects are dicts, or tuples, in all parts.

    Raises:
        Clash: two parts have a column of one name.
        NoColumns: the rows are of different kinds, or of one without columns.
    """
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, pa.Table) for part in parts):
        tables: Any = parts
        check_names([table.column_names for table in tables])
        fields = [field for table in tables for field in table.schema]
        columns = [column for table in tables for column in table.columns]
        return pa.table(columns, schema=pa.schema(fields))
    if all(isinstance(part, TensorRows) for part in parts):
        tensors: Any = parts
        return _tensors(tensors)
    if all(isinstance(part, list) for part in parts):
        rows: Any = parts
        return [_row(row) for row in zip(*rows, strict=True)]
    raise NoColumns("rows of different kinds")


def _tensors(parts: Sequence[TensorRows]) -> TensorRows:
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    names = [part.names for part in parts if part.names is not None]
    if not names:
        return TensorRows(tensors, None)
    if len(names) < len(parts):
        raise NoColumns("tensors with names beside tensors without")
    check_names(names)
    return TensorRows(tensors, tuple(name for own in names for name in own))


def _row(rows: Sequence[Any]) -> Any:
    """One row of those of all sources."""
    if all(isinstance(row, tuple) for row in rows):
        return tuple(value for row in rows for value in row)
    if not all(isinstance(row, Mapping) for row in rows):
        odd = next(row for row in rows if not isinstance(row, Mapping))
        raise NoColumns(f"a row that is no dict, but a {type(odd).__name__}")
    found = {name: value for row in rows for name, value in row.items()}
    if len(found) < sum(map(len, rows)):
        check_names([list(row) for row in rows])
    return found
