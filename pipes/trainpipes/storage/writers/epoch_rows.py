"""The rows of one epoch as tables whose cuts depend on the rows alone: files have the same bytes after a
resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import gathered
from trainpipes.columns.columns import table_of
from trainpipes.columns.run import Run
from trainpipes.engine.planning.as_columns import row_schema
from trainpipes.errors import SchemaError
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.storage.writers.epoch_runs import EpochRuns

if TYPE_CHECKING:
    from trainpipes.pipeline import Pipeline

#: Rows that are looked at together, at first and at most, and the bytes that they are to have.
FIRST_ROWS, MOST_ROWS = 16, 1024
FEW_BYTES, MANY_BYTES = 256 << 10, 1 << 20


class AsColumns(RunStage):
    """Turns rows that are Python objects into columns of one schema, with text in UTF-8."""

    needs_columns = True
    free = frozenset({"caller"})

    caller: str

    @property
    def name(self) -> str:
        return str(vars(self).get("caller", "write"))  # asked for before the options are there

    def process(self, run: Run) -> Run:
        if isinstance(run.block.data, pa.Table):
            run.block.data.validate(full=True)
        return run

    def __repr__(self) -> str:
        return f"{self.caller}()"


class EpochRows(EpochRuns):
    _table: pa.Table | None = None
    _schema: pa.Schema | None = None

    def __init__(self, pipeline: Pipeline, caller: str, dealt: bool = False) -> None:
        super().__init__(pipeline, caller, [AsColumns(caller)], dealt)

    def close(self) -> None:
        self._table = None
        super().close()

    def know_columns(self) -> pa.Schema | None:
        return row_schema(self.plan.inputs, self.caller)

    def tables(self, start: int, stop: int, epoch: int = 0) -> Iterator[pa.Table]:
        """Rows from one to before another, as they come, where positions follow by arithmetic."""
        self.open_part(start, stop, epoch)
        with closing(self):
            while start < stop and (table := self.some(stop - start)) is not None:
                start += len(table)
                yield table
                del table  # before the next rows are read

    def some(self, most: int = 1 << 62) -> pa.Table | None:
        """The next rows, as they come, and so many at most."""
        while self._table is None or self.used == len(self._table):
            if not self._advance():
                return None
        found = self._table.slice(self.used, most)
        self.used += len(found)
        return found

    @property
    def schema(self) -> pa.Schema:
        assert self._schema is not None
        return self._schema

    def group(self, most: int, most_bytes: int) -> tuple[pa.Table, int] | None:
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

    def _advance(self) -> bool:
        found = self.next_run()
        if found is None:
            return False
        table = decoded(table_of(found, self.caller))
        schema = table.schema.remove_metadata()
        self._schema = self._schema or schema
        check_columns(self._schema, schema, self.caller)
        self._table = table.replace_schema_metadata()
        return True


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
