"""Rows of several sources put side by side: row k of each is part of row k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from trainpipes.columns.payload import Payload
from trainpipes.columns.tensor_rows import TensorRows


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
