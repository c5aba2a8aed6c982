"""The columns of a table as they stand in its files: by name or number, renamed, narrower, missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import to_arrow
from trainpipes.interfaces.source import Place
from trainpipes.sources.files.formats import cast_to

#: Where Arrow and Delta keep a field's number, and Delta the name that files have.
IN_FILE = b"PARQUET:field_id"
IN_DELTA = b"delta.columnMapping.id"
PHYSICAL = b"delta.columnMapping.physicalName"


@dataclass(frozen=True)
class TableFields:
    """The fields of a version of a table, with numbers and names of files as metadata.

    Args:
        schema: all columns.
        by_number: whether files' fields are known by their numbers, where they have numbers.
    """

    schema: pa.Schema
    by_number: bool = False

    def place(self, field: pa.Field, fields: Sequence[pa.Field]) -> int | None:
        """Where a field of the table stands among those of a file; None if the file lacks it."""
        return next((n for n, stored in enumerate(fields) if self._is(field, stored)), None)

    def _is(self, field: pa.Field, stored: pa.Field) -> bool:
        about, number = field.metadata or {}, (stored.metadata or {}).get(IN_FILE)
        known = about.get(IN_FILE, about.get(IN_DELTA)) if self.by_number else None
        if known is not None and number is not None:
            return bool(known == number)
        names = about.get(PHYSICAL, field.name.encode()).decode().split("\0")
        return stored.name in names

    def paths(self, wanted: pa.Field, field: pa.Field, stored: pa.Field, path: str) -> list[str]:
        """What of a file's column must be read for a column, or those of its fields that are wanted."""
        inner: list[str] = []
        if pa.types.is_struct(wanted.type):
            for child, whole, part in self._parts(wanted.type, field.type, stored.type):
                if part is not None:
                    inner += self.paths(child, whole, part, f"{path}.{part.name}")
        return inner or [path]

    def _parts(self, wanted: Any, whole: Any, stored: Any) -> list[tuple[Any, Any, Any]]:
        """For each wanted field of a struct: itself, the table's, and the file's."""
        fields = fields_of(stored)
        parts = []
        for child in fields_of(wanted):
            place = self.place(whole.field(child.name), fields)
            parts.append((child, whole.field(child.name), None if place is None else fields[place]))
        return parts

    def named(self, fields: Sequence[pa.Field], table: Sequence[pa.Field]) -> list[pa.Field]:
        """A file's fields by the table's names; those that it does not have by names of no column."""
        renamed = []
        for stored in fields:
            field = next((each for each in table if self._is(each, stored)), None)
            kind = stored.type
            if field is not None and pa.types.is_struct(kind) and pa.types.is_struct(field.type):
                kind = pa.struct(self.named(fields_of(kind), fields_of(field.type)))
            renamed.append(pa.field(f"\0{stored.name}" if field is None else field.name, kind))
        return renamed

    def conformed(
        self, column: pa.Array, wanted: pa.Field, field: pa.Field, place: Callable[[], Place]
    ) -> pa.Array:
        """A file's column as the table has it."""
        kind, whole = wanted.type, field.type
        if not _has_struct(kind):
            return cast_to(column, wanted, place)
        if column.offset:  # offsets and validity begin with the array then
            column = column.take(to_arrow(np.arange(len(column))))
        nulls = column.is_null() if column.null_count else None
        if pa.types.is_struct(kind):
            children = []
            for child, inner_field, part in self._parts(kind, whole, column.type):
                if part is None:
                    children.append(pa.nulls(len(column), child.type))
                else:
                    inner = column.field(column.type.get_field_index(part.name))
                    children.append(self.conformed(inner, child, inner_field, place))
            return pa.StructArray.from_arrays(children, fields=fields_of(kind), mask=nulls)
        if pa.types.is_map(kind):
            keys = self.conformed(column.keys, kind.key_field, whole.key_field, place)
            items = self.conformed(column.items, kind.item_field, whole.item_field, place)
            return pa.MapArray.from_arrays(column.offsets, keys, items, kind, mask=nulls)
        values = self.conformed(column.values, kind.value_field, whole.value_field, place)
        lists = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
        column = column if column.type.id == kind.id else column.cast(kind)
        return lists.from_arrays(column.offsets, values, type=kind, mask=nulls)


def fields_of(kind: pa.DataType | pa.Schema) -> list[pa.Field]:
    count = len(kind) if isinstance(kind, pa.Schema) else kind.num_fields
    return [kind.field(n) for n in range(count)]


def _has_struct(kind: pa.DataType) -> bool:
    inner = (_has_struct(kind.field(n).type) for n in range(kind.num_fields))
    return bool(pa.types.is_struct(kind)) or any(inner)
