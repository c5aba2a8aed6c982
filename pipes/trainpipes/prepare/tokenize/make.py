"""Makes one output file: what a task says, of a plan that is open in this process.

A block of the input is read and put through the stages piece by piece. What a piece has depends on the block
alone, so that the bytes of a file are the same wherever and whenever it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import one_chunk
from trainpipes.columns.block import Block
from trainpipes.columns.columns import table_of
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.shards.shard_runs import say_where
from trainpipes.errors import DataError, SchemaError, TrainpipesError
from trainpipes.kinds.source import LooksAhead, Reader, read_rows
from trainpipes.kinds.stage_kinds import put_through
from trainpipes.prepare.tokenize.cut import ASKER, files_of
from trainpipes.prepare.tokenize.formats import Form
from trainpipes.prepare.tokenize.tasks import Task
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.writers.epoch_rows import compact, decoded

#: Rows and bytes of a piece, at most: a tokenizer's own objects take some 50 times what the text does.
PIECE_ROWS, PIECE_BYTES = 8192, 1 << 19
#: How much more or less than an average row one of a block is taken to have, at most.
MOST_UNEVEN = 16.0
#: Rows that the columns are told from.
FIRST_ROWS = 16


@dataclass(frozen=True)
class Made:
    """A file that is written.

    Attributes:
        rows: in it.
        read: that it was made of.
        tokens: in all columns of ids.
        bytes: of the file.
        crc32: of these.
    """

    rows: int
    read: int
    tokens: int
    bytes: int
    crc32: str


class Maker:
    """Makes files of one plan; one a process.

    Args:
        plan: what is done ahead.
        form: the format.
        schema: of all rows.
        ids: columns of token ids, which are counted.
    """

    def __init__(self, plan: Plan, form: Form, schema: pa.Schema, ids: list[str]) -> None:
        self._plan = plan
        self._form = form
        self._schema = schema
        self._ids = ids
        self._before = partial(put_through, plan.chain.steps)
        source = files_of(plan)
        self._source = source
        total = max(1, int(source.lengths.sum()))
        sizes = source.block_bytes
        self._average = float(sizes.sum()) / total if sizes is not None else 0.0

    def make(self, task: Task, path: Path, tell: Callable[[int], None]) -> Made:
        """Write the file of a task, and flush it to the disk.

        Args:
            task: which.
            path: where to.
            tell: is called with rows read, every now and then.

        Raises:
            TrainpipesError: a row cannot be read or tokenized; says which file and row.
            ConfigError: the file cannot be written.
        """
        file = OutputFile(path, "tokenize")
        try:
            writer = self._form.open(file, self._schema)
            try:
                rows = tokens = 0
                reader = self._source.reader()
                try:
                    if isinstance(reader, LooksAhead):
                        reader.expect(range(task.first, task.stop))
                    for block in range(task.first, task.stop):
                        for table, read in self._pieces(reader, block, task):
                            writer.write(table)
                            count = self._count(table)
                            rows, tokens = rows + len(table), tokens + count
                            tell(read)
                        writer.end_group(self._schema)
                finally:
                    reader.close()
                writer.close()
            except BaseException:
                with suppress(Exception):
                    writer.close()
                raise
            file.sync()
        finally:
            file.close()
        return Made(rows, task.rows, tokens, file.size, f"{file.check:08x}")

    def _pieces(self, reader: Reader, block: int, task: Task) -> Iterator[tuple[pa.Table, int]]:
        """What the stages make of a block, and of how many rows each piece is."""
        blocks = self._plan.inputs.blocks
        begin = int(blocks.begins[block])
        stop, step = begin + int(blocks.lengths[block]), self._rows(block)
        while begin < stop:
            end = min(begin + step, stop)
            table = rows_of(self._plan, self._before, reader, block, begin, end)
            if not table.schema.equals(self._schema):
                raise SchemaError(
                    f"{ASKER}: rows must all have the same columns, got {_said(table.schema)} in "
                    f"{task.source} and {_said(self._schema)} in the first rows; bring them in line by map() "
                    "or select()",
                    path=task.source,
                )
            yield table, end - begin
            begin = end

    def _rows(self, block: int) -> int:
        """Rows of a piece."""
        source = self._source
        row_bytes = source.row_bytes or 1024.0
        if source.block_bytes is not None and self._average:
            own = float(source.block_bytes[block]) / max(1, int(source.lengths[block]))
            row_bytes *= min(max(own / self._average, 1 / MOST_UNEVEN), MOST_UNEVEN)
        return int(min(PIECE_ROWS, max(1.0, PIECE_BYTES / row_bytes)))

    def _count(self, table: pa.Table) -> int:
        return sum(len(one_chunk(table.column(name)).flatten()) for name in self._ids)


def rows_of(
    plan: Plan, before: Callable[[Block], Block], reader: Reader, block: int, begin: int, end: int
) -> pa.Table:
    """What the stages make of rows of a block, as a table that holds them and nothing besides."""
    inputs = plan.inputs
    ids = int(inputs.blocks.firsts[block]) + np.arange(begin, end, dtype=np.int64)
    try:
        data = read_rows(inputs.listed, reader, block, begin, end)
        table = decoded(table_of(before(Block(data, ids, epoch=0)).data, ASKER))
    except Exception as error:
        say_where(error, plan)
        raise
    schema = table.schema.remove_metadata()
    columns = [compact(column) for column in table.columns]
    return pa.Table.from_arrays(columns, schema=schema)


def first_rows(plan: Plan) -> pa.Table:
    """What the stages make of the first rows: says which columns there are.

    Raises:
        DataError: there is no row.
        TrainpipesError: a stage fails on them.
    """
    blocks, source = plan.inputs.blocks, files_of(plan)
    there = np.flatnonzero(blocks.lengths)
    if not len(there):
        raise DataError(
            f"{ASKER}: {plan.chain.opener} has no rows, and nothing is written: check which files are named"
        )
    block = int(there[0])
    begin = int(blocks.begins[block])
    reader = source.reader()
    try:
        end = begin + min(FIRST_ROWS, int(blocks.lengths[block]))
        return rows_of(plan, partial(put_through, plan.chain.steps), reader, block, begin, end)
    finally:
        reader.close()


def named(error: BaseException, task: Task) -> BaseException:
    """An error that says of which file, where it does not yet."""
    said = f"while {task.name} was made of {task.source}"
    if isinstance(error, TrainpipesError):
        if error.path is None:
            error.path, error.message = task.source, f"{error.message} ({said})"
    elif not isinstance(error, KeyboardInterrupt | SystemExit):
        error.add_note(said)
    return error


def _said(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
