"""The rows of an epoch of a pipeline, in order, from any place, and the tables that they are cut into; and
``MapDataset``: rows that fit in memory, indexed, shared by all processes of a machine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from operator import index
from typing import Any, overload

import numpy as np
import pyarrow as pa
from torch.utils.data import Dataset

from trainpipes._internal.checks import IntArray
from trainpipes._internal.pool import Pool, default_threads
from trainpipes.columns import arrays
from trainpipes.columns.arrays import dtype_of, gathered, take_rows
from trainpipes.columns.block import Block, naming_bad_values
from trainpipes.columns.columns import table_of
from trainpipes.columns.payload import Payload, slice_payload
from trainpipes.columns.run import Cursors, Run
from trainpipes.engine.iterating.iteration_state import plan_of
from trainpipes.engine.planning.chain import RowMixture
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.record import Record
from trainpipes.engine.shards.lane import Lane
from trainpipes.engine.shards.shard_rows import Shards, open_windows
from trainpipes.errors import ConfigError, MissingFilesError, SchemaError, UnreadableError, shown
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.read_columns import say_where
from trainpipes.interfaces.source import Place, RowSource
from trainpipes.interfaces.stage import Stage, is_ours
from trainpipes.order.layout import WindowKey

log = logging.getLogger("trainpipes")

#: Rows that are looked at together, at first and at most, and the bytes that they are to have.
FIRST_ROWS, MOST_ROWS = 16, 1024
FEW_BYTES, MANY_BYTES = 256 << 10, 1 << 20


class TableGroups:
    """Rows of consecutive tables, cut by rows and bytes."""

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

    def next_row(self) -> pa.Table:
        """A row that ``has_rows`` has found, and that stays; none where there are only columns."""
        assert self._table is not None
        return self._table.slice(self.used, 1)

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
        parts: list[pa.Table] = []  # a part of each table: rows of the same are not copied
        rows = size = 0
        step, table, start = FIRST_ROWS, self._table, self.used
        long = max(most_bytes, 4 * MANY_BYTES)
        while rows < most and size < most_bytes:
            looked_at: list[pa.Table] = []
            left, held, row_sizes = min(step, most - rows), 0, list[int]()
            while left and (some := self.some(left)) is not None:
                looked_at.append(some)
                left, held = left - len(some), held + some.nbytes
                if held > long // 2:  # the group may end within the rows looked at
                    beyond = self._beyond(looked_at, row_sizes, long)
                    if beyond is not None:
                        self.used, left = self.used - beyond, 0
                        looked_at[-1] = some.slice(0, len(some) - beyond)
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

    def _beyond(self, tables: list[pa.Table], row_sizes: list[int], most_bytes: int) -> int | None:
        """How many rows of the last table come after the one with which all have more than so many bytes;
        None if they have not. ``row_sizes`` are of the first rows, and become those of all.
        """
        rows = [table.slice(row, 1) for table in tables for row in range(len(table))]
        row_sizes += [self._size([row]) for row in rows[len(row_sizes) :]]
        ends = np.cumsum(row_sizes)
        after = int(np.count_nonzero(ends > most_bytes))
        return min(after, len(tables[-1])) - 1 if after else None

    def _size(self, tables: list[pa.Table]) -> int:
        """Bytes of rows, as these alone say."""
        widths = [*map(_width, self.schema.types)]
        size = sum(map(len, tables)) * sum(filter(None, widths))
        if odd := [number for number, width in enumerate(widths) if width is None]:
            for part in compacts(pa.concat_tables([some.select(odd) for some in tables])):
                size += sum(map(pa.ipc.get_record_batch_size, part.to_batches()))
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
    """Without dictionaries, of which a file has a single one for each column."""
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            column = arrays.decoded(table.column(number)).cast(field.type.value_type)
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


def compacts(table: pa.Table) -> Iterator[pa.Table]:
    """``compact``, in parts where the rows' text passes the 2 GiB that an array holds."""
    try:
        yield compact(table)
    except pa.ArrowInvalid:
        half = len(table) // 2
        if not half:
            raise
        yield from compacts(table.slice(0, half))
        yield from compacts(table.slice(half))


def _is_plain(array: pa.Array) -> bool:
    """Whether an array that ``concat_arrays`` made is known to hold nothing besides its rows."""
    if array.null_count or pa.types.is_boolean(array.type):
        return False
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _is_plain(array.values)
    return bool(not pa.types.is_nested(array.type) and not isinstance(array, pa.ExtensionArray))


class WrittenColumns(kinds.RunStage, takes="columns"):
    """The last stage of rows that are written: below it the plan makes columns of a single schema, whose text
    it checks.
    """

    free = frozenset({"caller", "ragged"})

    caller: str
    ragged: Collection[str] | None = None

    @property
    def name(self) -> str:
        return str(vars(self).get("caller", "write"))  # asked for before the options are there

    def _traits(self) -> dict[str, Any]:
        return {"ragged": self.ragged}

    def process(self, run: Run) -> Run:
        if isinstance(run.block.data, pa.Table):
            run.block.data.validate(full=True)
        return run

    def __repr__(self) -> str:
        return f"{self.caller}()"


class EpochRows(TableGroups):
    """The rows of an epoch of a pipeline. A copy reads by itself; it pickles. ``ragged``: see
    ``SchemaFinder``.
    """

    def __init__(
        self,
        pipeline: Record,
        caller: str,
        dealt: bool = False,
        ragged: Collection[str] | None = None,
    ) -> None:
        chain = plan_of(pipeline).chain
        finishing = kinds.first_of(chain.after, kinds.FinishingStage)
        opener = chain.stages[0]
        itself = opener if opener.traits.makes_batches or chain.endless else None
        if in_the_way := chain.batch or chain.repeat or finishing or itself:
            raise ConfigError(
                f"{caller}() writes the rows of one epoch: call it before batch(), collate() and repeat(), "
                f"got {in_the_way}"
            )
        left: Any = kinds.DeviceStage if dealt else kinds.ShardStage | kinds.DeviceStage
        rows = kinds.without(pipeline.stages, left)
        self._begin([*rows, WrittenColumns(caller, ragged)], caller, None)

    def _begin(self, stages: list[Stage], caller: str, source: Any) -> None:
        self.caller, self._stages = caller, stages
        self.plan = Plan.of([stage._fresh() for stage in stages], source)
        self._pool: Pool | None = None
        self._lane: Lane | None = None
        self._made: tuple[Cursors, int] | None = None  # of the run at hand, and its first row
        self._is_said = False

    def __reduce__(self) -> Any:
        source = self.plan.inputs.source
        schemas = self.plan.inputs.schemas.known()
        return _copy, (
            self._stages,
            self.caller,
            source if _goes(self.plan.inputs) else None,
            schemas,
        )

    def know_columns(self) -> pa.Schema | None:
        """Find the columns before any but the first rows are read."""
        return self.plan.types.of_rows(self.caller)

    @property
    def count(self) -> int | None:
        return int(self.plan.counts.end(1)) if self.plan.counts.known else None

    def open(
        self,
        cursor: dict[str, Any] | None = None,
        row: int = 0,
        epoch: int = 0,
        shard: int = 0,
        last: WindowKey | None = None,
    ) -> None:
        """Begin at a cursor, or at the first row of an epoch or of a shard in it, and read no further ahead
        than the last window, if given; ``row`` is the first row's number.
        """
        self.close()
        if cursor is None and row:
            cursor = self._cursor_at(row, epoch)
        threads = default_threads()
        self._pool = Pool(threads) if threads and not self.plan.runs_user_code else None
        shards = Shards(self.plan, open_windows(self.plan, self._pool, epoch, last))
        self._lane = Lane(shards, shard, epoch, cursor)

    def open_part(self, start: int, stop: int, epoch: int = 0) -> None:
        """Begin at a row, where positions follow by arithmetic (``plan.counted``), for those before
        ``stop``."""
        last = self._cursor_at(max(start, stop - 1), epoch)
        self.open(None, start, epoch, 0, WindowKey(last["epoch"], 0, last["window"]))

    def tables(self, start: int, stop: int, epoch: int = 0) -> Iterator[pa.Table]:
        """Rows from ``start`` to before ``stop``, as they come, where positions follow by arithmetic."""
        self.open_part(start, stop, epoch)
        with closing(self):
            while start < stop and (table := self.some(stop - start)) is not None:
                start += len(table)
                yield table
                del table  # before the next rows are read

    def close(self) -> None:
        super().close()
        self._lane = self._made = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def cursor(self) -> dict[str, Any]:
        assert self._made is not None
        cursors, first = self._made
        return cursors.state(first + self.used)

    def _cursor_at(self, row: int, epoch: int) -> dict[str, Any]:
        cursor = self.plan.counts.cursor_at(row, 0, epoch)
        del cursor["delivered"]
        return cursor

    def next_run(self) -> Payload | None:
        assert self._lane is not None
        try:
            upcoming = self._lane.next_run()
        except Exception as error:
            say_where(error, self.plan.inputs.place_of)
            raise
        if upcoming is None:
            self._say_counts()
            return None
        run, first, last = upcoming
        self._made = run.cursors, first
        return slice_payload(run.block.data, first, last)

    def _say_counts(self) -> None:
        """Log once, at the end of all rows, how many the stages have left out."""
        if self._is_said or self.plan.chain.num_shards > 1:
            return
        self._is_said = True
        for tally in self.plan.tallies:
            tally.end()
            if tally.warns and (said := str(tally)):
                log.warning("%s(): %s: %s", self.caller, str(tally.stage), said)


def _goes(inputs: Inputs) -> bool:
    """Whether a source goes to other processes, which else open it again: a user's may not pickle."""
    source = inputs.source
    known = isinstance(source, RowSource | RowMixture) and is_ours(type(source))
    return known and all(map(_goes, inputs.parts))


def _copy(stages: list[Stage], caller: str, source: Any, schemas: dict[str, Any]) -> EpochRows:
    rows = EpochRows.__new__(EpochRows)
    rows._begin(stages, caller, source)
    rows.plan.inputs.schemas.adopt(schemas)
    return rows


class MapDataset(Dataset[dict[str, Any]]):
    """Rows of an Arrow file, memory-mapped: processes that read it share a single copy in memory. A row is a
    dict of Python values.

    Args:
        path: an Arrow IPC file.

    Raises:
        MissingFilesError: the file is gone.
        UnreadableError: it is no Arrow file, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._table = os.fspath(path), None

    @property
    def table(self) -> pa.Table:
        """The rows as a table that lies in the file."""
        if self._table is None:
            again = "make it again by to_map_dataset(path)"
            try:
                with pa.memory_map(self.path) as source:
                    self._table = pa.ipc.open_file(source).read_all()
            except FileNotFoundError as error:
                raise MissingFilesError(
                    f"{self.path}: the rows of this data set were there, and are gone; {again}",
                    path=self.path,
                ) from error
            except (OSError, pa.ArrowException) as error:
                raise UnreadableError(
                    f"{self.path} is no Arrow file, or damaged: {error}; {again}", path=self.path
                ) from error
        return self._table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int]) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice | Sequence[int]) -> Any:
        if isinstance(index, slice):
            return self.__getitems__(range(len(self))[index])
        if isinstance(index, list | tuple):
            return self.__getitems__(index)
        place = self._place(index)
        return self._rows(self.table.slice(place, 1), np.array([place]))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        places = np.array([self._place(index) for index in indices], np.int64)
        if not len(places):
            return []
        batches = self.table.to_batches()
        firsts = np.cumsum([0, *map(len, batches)])
        return self._rows(take_rows(lambda n, at: gathered(batches[n], at), firsts, places), places)

    def _rows(self, table: pa.Table, numbers: IntArray) -> list[dict[str, Any]]:
        block = Block(table, numbers)
        try:
            with naming_bad_values(block):
                return block.rows()
        except UnreadableError as error:
            say_where(error, lambda row: Place(self.path, row=row))
            raise

    def _place(self, number: Any) -> int:
        rows = len(self)
        try:
            if isinstance(number, bool):  # of a mask, which would give rows 1 and 0
                raise TypeError("a bool")
            place = index(number)
        except TypeError as error:
            rule = "a row's number, a slice, or a list of numbers"
            raise TypeError(f"{self}[...] takes {rule}, got {shown(number)}") from error
        if not -rows <= place < rows:
            raise IndexError(f"row {place} of {rows}")
        return place % rows

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_table": None}

    def __repr__(self) -> str:
        return f"MapDataset({self.path!r})"
