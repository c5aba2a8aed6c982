"""The rows of one epoch of a pipeline, in order, as tables whose cuts depend on the rows alone.

A pipeline that is resumed cuts its runs at other rows than one that ran through. Tables here begin and end at
the same rows in both cases, and have the same layout in memory, so that files made of them have the same
bytes. Used by one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import gathered
from trainpipes.columns.columns import table_of
from trainpipes.columns.run import Run
from trainpipes.engine.column_names import row_schema
from trainpipes.engine.layout import WindowKey
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.pool import Pool, default_threads
from trainpipes.engine.reading.open_windows import open_windows
from trainpipes.engine.shards.opener import ShardOpener
from trainpipes.engine.shards.shard_runs import PlacedRun, ShardRuns, say_where
from trainpipes.errors import ConfigError, SchemaError
from trainpipes.kinds.source import RowSource, RowStream
from trainpipes.kinds.stage import Stage, is_ours
from trainpipes.kinds.stage_kinds import RunStage

if TYPE_CHECKING:
    from trainpipes.pipeline import Pipeline

#: Rows that are looked at together, at first and at most, and the bytes that they are to have.
FIRST_ROWS, MOST_ROWS = 16, 1024
FEW_BYTES, MANY_BYTES = 256 << 10, 1 << 20


class AsColumns(RunStage):
    """Turns rows that are Python objects into columns of one schema, with text in UTF-8.

    Args:
        asker: the method that writes; the stage has its name.
    """

    needs_columns = True
    free = frozenset({"asker"})

    asker: str

    @property
    def name(self) -> str:
        return str(vars(self).get("asker", "write"))  # asked for before the options are there

    def process(self, run: Run) -> Run:
        if isinstance(run.block.data, pa.Table):
            run.block.data.validate(full=True)
        return run

    def __repr__(self) -> str:
        return f"{self.asker}()"


class EpochRows:
    """The rows of one epoch of a pipeline, without what deals them to ranks.

    Pickles before it is opened: who reads it elsewhere need not list files again.

    Args:
        pipeline: gives rows with columns; no batches.
        asker: who writes them, for messages.
        source: of the pipeline, where another has opened it.
        dealt: whether rows stay dealt to shards, of which ``open`` takes one.

    Raises:
        ConfigError: the pipeline batches or repeats.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        asker: str,
        source: RowSource | RowStream | None = None,
        dealt: bool = False,
    ) -> None:
        chain = pipeline._session.plan.chain
        finishing = [stage for stage in chain.after if stage.role == "finish"]
        in_the_way = chain.batch or chain.repeat or (finishing[0] if finishing else None)
        opener: Any = chain.stages[0]
        if in_the_way is None and (getattr(opener, "makes_batches", False) or chain.endless):
            in_the_way = opener
        if in_the_way is not None:
            raise ConfigError(
                f"{asker}() writes the rows of one epoch: call it before batch(), collate() and repeat(), "
                f"got {in_the_way}"
            )
        left = ("place",) if dealt else ("shard", "place")
        rows = [stage for stage in pipeline.stages if stage.role not in left]
        self._begin(asker, [*rows, AsColumns(asker)], source)

    def _begin(
        self, asker: str, stages: Sequence[Stage], source: RowSource | RowStream | None = None
    ) -> None:
        self.asker = asker
        self.plan = Plan.of([stage.fresh() for stage in stages], source)
        self._stages = stages
        self._pool: Pool | None = None
        self._runs: ShardRuns | None = None
        self._placed: PlacedRun | None = None
        self._table: pa.Table | None = None
        self._used = 0  # rows of the table
        self._schema: pa.Schema | None = None

    def __getstate__(self) -> dict[str, Any]:
        source = self.plan.inputs.source
        # One of the user's may hold what does not pickle; several put together open theirs again.
        goes = isinstance(source, RowSource) and is_ours(type(source)) and not source.joined_inputs
        return {
            "asker": self.asker,
            "stages": self._stages,
            "source": source if goes else None,
            "schemas": self.plan.inputs.schemas.known(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(state["asker"], state["stages"], state["source"])
        self.plan.inputs.schemas.adopt(state["schemas"])

    def know_columns(self) -> pa.Schema | None:
        """Find the columns of rows that are Python objects, so that all who read parts of them have the same;
        None where there is no row."""
        return row_schema(self.plan, self.asker)

    @property
    def count(self) -> int | None:
        """How many rows there are, where that is known."""
        return int(self.plan.counts.end(1)) if self.plan.counts.known else None

    def open(self, cursor: dict[str, Any] | None, epoch: int = 0, shard: int = 0) -> None:
        """Begin at a cursor, or at the first row of an epoch, or of a shard in it."""
        self._open(cursor, epoch, shard, None)

    def open_part(self, start: int, stop: int, epoch: int = 0) -> None:
        """Begin at a row, where positions follow by arithmetic (``plan.counted``), and read no further ahead
        than the window of row ``stop``. Whoever asks stops there."""
        last = self._cursor_at(max(start, stop - 1), epoch)
        key = WindowKey(last["epoch"], 0, last["window"])
        self._open(self._cursor_at(start, epoch), epoch, 0, key)

    def _open(
        self, cursor: dict[str, Any] | None, epoch: int, shard: int, last: WindowKey | None
    ) -> None:
        threads = default_threads()
        self._pool = Pool(threads) if threads and not self.plan.runs_user_code else None
        opener = ShardOpener(self.plan, open_windows(self.plan, self._pool, epoch, last))
        self._runs = ShardRuns(opener, shard, epoch, cursor)

    def close(self) -> None:
        """Let the threads go, and the rows that were read ahead."""
        self._runs = self._placed = self._table = None
        if self._pool is not None:
            self._pool.close()

    @property
    def cursor(self) -> dict[str, Any]:
        """The position after the rows taken so far, of JSON types."""
        placed = self._placed
        assert placed is not None
        return placed.cursor(placed.first + self._used)

    def cursor_at(self, row: int) -> dict[str, Any]:
        """The position before a row, where positions follow by arithmetic (``plan.counted``)."""
        return self._cursor_at(row, 0)

    def _cursor_at(self, row: int, epoch: int) -> dict[str, Any]:
        found = self.plan.counts.cursor_at(row, 0, epoch)
        del found["delivered"]
        return found

    def some(self) -> pa.Table | None:
        """The next rows as they come, however many; None where there are no more. Memory of other rows may
        lie between theirs."""
        if (self._table is None or self._used == len(self._table)) and not self._advance():
            return None
        assert self._table is not None
        found = self._table.slice(self._used)
        self._used = len(self._table)
        return found

    @property
    def schema(self) -> pa.Schema:
        """Of all tables; once there has been one."""
        assert self._schema is not None
        return self._schema

    def group(self, most: int, most_bytes: int | None) -> tuple[pa.Table, int] | None:
        """The next rows, and how many bytes they have; None where there are no more.

        Args:
            most: rows to stop after.
            most_bytes: bytes to stop after, about; None for any number.
        """
        parts: list[pa.RecordBatch] = []
        rows = size = 0
        step = FIRST_ROWS
        while rows < most and (most_bytes is None or size < most_bytes):
            part = self._take(min(step, most - rows))
            if part is None:
                break
            parts.append(part)
            rows += len(part)
            part_size = pa.ipc.get_record_batch_size(part)
            size += part_size
            if part_size < FEW_BYTES:
                step = min(2 * step, MOST_ROWS)
            elif part_size > MANY_BYTES:
                step = max(step // 2, 1)
        if not parts:
            return None
        return pa.Table.from_batches(parts, self._schema).combine_chunks(), size

    def _take(self, rows: int) -> pa.RecordBatch | None:
        """So many rows, or fewer at the end; None after the last."""
        parts = []
        while rows:
            if self._table is None or self._used == len(self._table):
                if not self._advance():
                    break
                continue
            part = self._table.slice(self._used, rows)
            parts.append(part)
            self._used += len(part)
            rows -= len(part)
        if not parts:
            return None
        table = pa.concat_tables(parts)
        return pa.RecordBatch.from_arrays(
            [compact(column) for column in table.columns], schema=self.schema
        )

    def _advance(self) -> bool:
        """Go on to the next run, if there is one."""
        assert self._runs is not None
        try:
            found = self._runs.next()
            if found is None:
                return False
            placed, run = found
            table = decoded(table_of(run.block.data, self.asker))
        except Exception as error:
            say_where(error, self.plan)
            raise
        table = table.slice(placed.first, placed.last - placed.first)
        schema = table.schema.remove_metadata()
        if self._schema is None:
            self._schema = schema
        elif not schema.equals(self._schema):
            raise SchemaError(
                f"{self.asker}(): rows must all have the same columns, got {_said(schema)} after "
                f"{_said(self._schema)}; bring them in line by map(), select() or map_batches()",
                stage=self.asker,
            )
        self._placed, self._table, self._used = placed, table.replace_schema_metadata(), 0
        return True


def _said(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def decoded(table: pa.Table) -> pa.Table:
    """Without dictionaries, of which a file has one for each column."""
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            column = table.column(number).cast(field.type.value_type)
            table = table.set_column(number, field.with_type(field.type.value_type), column)
    return table


def compact(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array that holds its rows and nothing besides: no bytes of other rows, nor any where a
    value is null."""
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
    return array if _is_plain(array) else gathered(array, np.arange(len(array), dtype=np.int64))


def _is_plain(array: pa.Array) -> bool:
    """Whether an array that ``concat_arrays`` made is known to hold nothing besides its rows."""
    if array.null_count or pa.types.is_boolean(array.type):
        return False
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _is_plain(array.values)
    return bool(not pa.types.is_nested(array.type) and not isinstance(array, pa.ExtensionArray))
