"""Tables whose cuts depend on the rows alone: files have the same bytes after a resume."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import gathered
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

    def some(self, most: int = 1 << 62) -> pa.Table | None:
        """The next rows, as they come, and so many at most."""
        while self._table is None or self.used == len(self._table):
            if not self._advance():
                return None
        found = self._table.slice(self.used, most)
        self.used += len(found)
        return found

    def _advance(self) -> bool:
        found = self.next_run()
        if found is None:
            return False
        table = decoded(table_of(found, self.caller))
        schema = table.schema.remove_metadata()
        self._schema = self._schema or schema
        check_columns(self._schema, schema, self.caller)
        self._table, self.used = table.replace_schema_metadata(), 0
        return True

    def group(self, most: int, most_bytes: int) -> tuple[pa.Table, int] | None:
        """The next rows, at most so many and of about so many bytes; and how many bytes they have."""
        parts: list[pa.RecordBatch] = []
        rows = size = 0
        step = FIRST_ROWS
        while rows < most and size < most_bytes and (part := self._take(min(step, most - rows))):
            parts.append(part)
            part_size = pa.ipc.get_record_batch_size(part)
            rows, size = rows + len(part), size + part_size
            if part_size < FEW_BYTES:
                step = min(2 * step, MOST_ROWS)
            elif part_size > MANY_BYTES:
                step = max(step // 2, 1)
        if not parts:
            return None
        return pa.Table.from_batches(parts, self._schema).combine_chunks(), size

    def _take(self, rows: int) -> pa.RecordBatch | None:
        parts = []
        while rows and (part := self.some(rows)) is not None:
            parts.append(part)
            rows -= len(part)
        if not parts:
            return None
        columns = [compact(column) for column in pa.concat_tables(parts).columns]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def check_columns(first: pa.Schema, found: pa.Schema, caller: str, where: str = "") -> None:
    if not found.equals(first):
        got, had = (", ".join(f"{f.name}: {f.type}" for f in schema) for schema in (found, first))
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


def compact(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array that holds its rows and nothing besides, nor any bytes where a value is null."""
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
    return array if _is_plain(array) else gathered(array, np.arange(len(array), dtype=np.int64))


def _is_plain(array: pa.Array) -> bool:
    """Whether an array that ``concat_arrays`` made is known to hold nothing besides its rows."""
    if array.null_count or pa.types.is_boolean(array.type):
        return False
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _is_plain(array.values)
    return bool(not pa.types.is_nested(array.type) and not isinstance(array, pa.ExtensionArray))
