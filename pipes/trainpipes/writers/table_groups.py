"""Tables whose cuts depend on the rows alone: files have the same bytes after a resume."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import dtype_of, gathered
from trainpipes.columns.columns import table_of
from trainpipes.columns.payload import Payload
from trainpipes.errors import SchemaError

#: Rows that are looked at together, at first and at most, and the bytes that they are to have.
FIRST_ROWS, MOST_ROWS = 16, 1024
FEW_BYTES, MANY_BYTES = 256 << 10, 1 << 20


class TableGroups:
    """Rows of tables that come one after the other, cut by rows and bytes."""

    caller: str
    used = 0
    _table: pa.Table | None = None
    _schema: pa.Schema | None = None

    def next_run(self) -> Payload | None:
        raise NotImplementedError

    @property
    def schema(self) -> pa.Schema:
        assert self._schema is not None
        return self._schema

    def close(self) -> None:
        self._table = None

    def has_rows(self) -> bool:
        while self._table is None or self.used == len(self._table):
            if not self._advance():
                return False
        return True

    def some(self, most: int = 1 << 62) -> pa.Table | None:
        """The next rows, as they come, and so many at most."""
        if not self.has_rows() or self._table is None:
            return None
        rows = self._table.slice(self.used, most)
        self.used += len(rows)
        return rows

    def _advance(self) -> bool:
        run = self.next_run()
        if run is None:
            return False
        table = decoded(table_of(run, self.caller))
        schema = table.schema.remove_metadata()
        self._schema = self._schema or schema
        check_columns(self._schema, schema, self.caller)
        self._table, self.used = table.replace_schema_metadata(), 0
        return True

    def group(self, most: int, most_bytes: int) -> tuple[pa.Table, int] | None:
        """The next rows, at most so many and of about so many bytes; and how many bytes they have."""
        parts: list[pa.Table] = []  # of each table one: rows of the same are not copied
        rows = size = 0
        step, table, start = FIRST_ROWS, self._table, self.used
        while rows < most and size < most_bytes:
            looked_at: list[pa.Table] = []
            left = min(step, most - rows)
            while left and (some := self.some(left)) is not None:
                looked_at.append(some)
                left -= len(some)
                if self._table is not table:
                    if table is not None:
                        parts.append(table.slice(start))
                    table, start = self._table, 0
            if not looked_at:
                break
            part_size = self._size(looked_at)
            rows, size = rows + sum(map(len, looked_at)), size + part_size
            if part_size < FEW_BYTES:
                step = min(2 * step, MOST_ROWS)
            elif part_size > MANY_BYTES:
                step = max(step // 2, 1)
        if table is None or not rows:
            return None
        last = table.slice(start, rows - sum(map(len, parts)))
        return pa.concat_tables([*parts, last]), size

    def _size(self, tables: list[pa.Table]) -> int:
        """Bytes of rows, as these alone say."""
        widths = [*map(_width, self.schema.types)]
        size = sum(map(len, tables)) * sum(filter(None, widths))
        if odd := [number for number, width in enumerate(widths) if width is None]:
            [batch] = compact(pa.concat_tables([some.select(odd) for some in tables])).to_batches()
            size += int(pa.ipc.get_record_batch_size(batch))
        return size


def _width(kind: pa.DataType) -> int | None:
    """Bytes of a number, or of an array of numbers; None of other values."""
    count = 1
    while pa.types.is_fixed_size_list(kind):
        kind, count = kind.value_type, count * kind.list_size
    dtype = dtype_of(kind)
    return None if dtype is None else count * dtype.itemsize


def check_columns(first: pa.Schema, schema_of: pa.Schema, caller: str, where: str = "") -> None:
    if not schema_of.equals(first):
        got, had = (
            ", ".join(f"{f.name}: {f.type}" for f in schema) for schema in (schema_of, first)
        )
        raise SchemaError(
            f"{caller}(): rows must all have the same columns, got {got}{where} after {had}; bring them in "
            "line by map(), select() or map_batches()",
            stage=caller,
        )


def decoded(table: pa.Table) -> pa.Table:
    """Without dictionaries, of which a file has one for each column."""
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            column = table.column(number).cast(field.type.value_type)
            table = table.set_column(number, field.with_type(field.type.value_type), column)
    return table


def compact(table: pa.Table) -> pa.Table:
    """A copy of rows that holds nothing besides, nor any bytes where a value is null."""
    columns = []
    for column in table.columns:
        array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
        plain = _is_plain(array)
        columns.append(array if plain else gathered(array, np.arange(len(array), dtype=np.int64)))
    return pa.Table.from_arrays(columns, schema=table.schema)


def _is_plain(array: pa.Array) -> bool:
    """Whether an array that ``concat_arrays`` made is known to hold nothing besides its rows."""
    if array.null_count or pa.types.is_boolean(array.type):
        return False
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _is_plain(array.values)
    return bool(not pa.types.is_nested(array.type) and not isinstance(array, pa.ExtensionArray))
