"""Rows that are Python objects as Arrow columns of one schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from trainpipes._internal.text import shown
from trainpipes.columns.row_types import NoColumn, is_open, type_of, unite
from trainpipes.columns.value_column import column_of


class UnfitRow(Exception):
    def __init__(
        self, number: int, problem: str, column: str | None = None, found: pa.DataType | None = None
    ) -> None:
        super().__init__(problem)
        self.number, self.column, self.found = number, column, found


class SchemaFinder:
    """Finds the schema that some rows share.

    >>> finder = SchemaFinder()
    >>> finder.add([{"a": 1}, {"a": 2.5, "b": None}])
    >>> finder.open
    ['b']
    >>> finder.add([{"b": ["x"]}])
    >>> finder.schema.types
    [DataType(double), ListType(list<item: string>)]
    """

    def __init__(self) -> None:
        self._types: dict[str, pa.DataType] = {}
        self.rows = 0

    def add(self, rows: Sequence[Any]) -> None:
        for number, row in enumerate(rows):
            for name, value in columns_in(row, number).items():
                known = self._types.get(name, pa.null())
                try:
                    self._types[name] = unite(known, type_of(value))
                except NoColumn as error:
                    problem = f"has in {name!r} {error}: {shown(value, 60)}"
                    raise UnfitRow(number, problem, name) from None
            self.rows += 1

    @property
    def open(self) -> list[str]:
        """Columns whose type is not known yet."""
        return [name for name, kind in self._types.items() if is_open(kind)]

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(list(self._types.items()))


def columns_in(row: Any, number: int) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise UnfitRow(number, f"is no dict, got {type(row).__name__}")
    for name in row:
        if not isinstance(name, str):
            problem = f"has the key {shown(name, 60)}, and columns have strings for names"
            raise UnfitRow(number, problem)
    return row


def table_of_rows(rows: Sequence[Any], schema: pa.Schema, exact: bool = True) -> pa.Table:
    names = set(schema.names)
    try:
        for row in rows:
            if not isinstance(row, Mapping) or not row.keys() <= names:
                raise NoColumn
        arrays = [column_of([row.get(f.name) for row in rows], f.type, exact) for f in schema]
        return pa.Table.from_arrays(arrays, schema=schema)
    except NoColumn:
        for number, row in enumerate(rows):
            _check(row, number, schema, exact)
        raise


def _check(row: Any, number: int, schema: pa.Schema, exact: bool) -> None:
    for name, value in columns_in(row, number).items():
        if name not in schema.names:
            problem = f"has a column {name!r}, {shown(value, 60)}, which the schema has not"
            raise UnfitRow(number, problem, name, _found(pa.null(), value))
        kind = schema.field(name).type
        try:
            column_of([value], kind, exact)
        except NoColumn as error:
            said = f" ({error})" if str(error) else ""
            problem = f"has {name!r} = {shown(value, 60)}, and the column holds {kind}{said}"
            raise UnfitRow(number, problem, name, _found(kind, value)) from None


def _found(known: pa.DataType, value: Any) -> pa.DataType | None:
    try:
        return unite(known, type_of(value))
    except NoColumn:
        return None
