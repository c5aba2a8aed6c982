"""Makes the output files: one for each input file, of a large one several, cut between its row groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import one_chunk, to_numpy
from trainpipes.columns.block import Block
from trainpipes.columns.columns import table_of
from trainpipes.engine.layout import IntArray
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import DataError
from trainpipes.kinds.blame import say_where
from trainpipes.kinds.source import LooksAhead, Reader, read_rows
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import put_through
from trainpipes.prepare.tokenize.cut import CALLER, files_of, open_plan
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.output_folder import FileInfo
from trainpipes.storage.writers.epoch_rows import check_columns, compact, decoded
from trainpipes.storage.writers.write import FileWriter

#: Rows and bytes of a piece, at most: a tokenizer's own objects take some 50 times what the text does.
PIECE_ROWS, PIECE_BYTES = 8192, 1 << 19
#: How much more or less than an average row one of a block is taken to have, at most.
MOST_UNEVEN = 16.0
#: Rows that the columns are taken from.
FIRST_ROWS = 16


@dataclass(frozen=True)
class Task:
    """One output file: blocks ``first`` to ``stop`` of an input file, named below the folder that was asked
    for.
    """

    name: str
    source: str
    source_name: str
    first: int
    stop: int
    rows: int

    def __str__(self) -> str:
        return f"{self.name} of {self.source}"


def tasks_of(plan: Plan, suffix: str, bytes_per_file: int) -> list[Task]:
    source, blocks = files_of(plan), plan.inputs.blocks
    count = len(source.files)
    edges = np.searchsorted(source.file_of_block, np.arange(count + 1)).tolist()
    sizes = _sizes(plan)
    parts = [
        (file, first, stop)
        for file in range(count)
        for first, stop in _parts(sizes, edges[file], edges[file + 1], bytes_per_file)
    ]
    names, short = source.files.names, source.files.relative_names()
    width = max(5, len(str(len(parts) - 1)))
    return [
        Task(
            f"part-{number:0{width}d}{suffix}", str(names[file]), str(short[file]), first, stop,
            int(blocks.lengths[first:stop].sum()),
        )
        for number, (file, first, stop) in enumerate(parts)
    ]  # fmt: skip


def _sizes(plan: Plan) -> IntArray:
    source, blocks = files_of(plan), plan.inputs.blocks
    if source.block_bytes is None:
        return (blocks.lengths * (source.row_bytes or 1.0)).astype(np.int64)
    share = blocks.lengths / np.maximum(1, source.lengths)
    return (source.block_bytes * share).astype(np.int64)


def _parts(sizes: IntArray, first: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """A file's blocks in even parts, at most ``most`` bytes unless one block has more."""
    whole = int(sizes[first:stop].sum())
    count = -(-whole // most)
    if count <= 1:
        yield first, stop
        return
    ends = np.cumsum(sizes[first:stop])
    begin = first
    for part in range(1, count + 1):
        found = int(np.searchsorted(ends, part * whole / count)) + 1
        end = stop if part == count else min(first + found, stop)
        if end > begin:
            yield begin, end
            begin = end


class BareFile:
    """Nothing but the documents' ids in order, native numbers of one type, as nanoGPT's ``train.bin``."""

    def __init__(self, dtype: str, file: OutputFile, schema: pa.Schema) -> None:
        self.columns = {field.name: str(field.type) for field in schema}
        self._file, self._dtype = file, np.dtype(dtype)

    def write(self, group: pa.Table, first_row: int) -> None:
        ids = to_numpy(one_chunk(group.column("input_ids")).flatten())
        bounds = np.iinfo(self._dtype)
        if len(ids) and not bounds.min <= ids.min() <= ids.max() <= bounds.max:
            odd = int(ids.min() if ids.min() < bounds.min else ids.max())
            raise DataError(
                f'tokenize(format="bin", dtype="{self._dtype}"): there is a token {odd}, which that type '
                'cannot hold; give dtype="uint32"'
            )
        if len(ids):
            self._file.write(np.ascontiguousarray(ids.astype(self._dtype)).data)

    def close(self) -> None:
        """Nothing follows the last id."""


class Maker:
    def __init__(
        self,
        stages: Sequence[Stage],
        source: Any,
        schemas: dict[str, pa.Schema | None],
        open_file: Callable[[OutputFile, pa.Schema], FileWriter],
        schema: pa.Schema,
        ids: list[str],
    ) -> None:
        self._plan = plan = open_plan([stage.fresh() for stage in stages], source)
        plan.inputs.schemas.adopt(schemas)
        self._open_file, self._schema, self._ids = open_file, schema, ids
        self._before = partial(put_through, plan.chain.steps)
        self._source = files_of(plan)
        total = max(1, int(self._source.lengths.sum()))
        sizes = self._source.block_bytes
        self._average = float(sizes.sum()) / total if sizes is not None else 0.0

    def make(self, task: Task, file: OutputFile) -> FileInfo:
        rows = tokens = 0
        with (
            closing(self._source.reader()) as reader,
            closing(self._open_file(file, self._schema)) as writer,
        ):
            if isinstance(reader, LooksAhead):
                reader.expect(range(task.first, task.stop))
            for block in range(task.first, task.stop):
                # A row group for each block of the input, which may have no rows.
                parts = [pa.Table.from_batches([], self._schema)]
                for table, read in self._pieces(reader, block, task):
                    parts.append(table)
                    tokens += self._count(table)
                    file.advance(read)
                group = pa.concat_tables(parts)
                writer.write(group, rows)
                rows += len(group)
        notes = {"tokens": tokens, "source": task.source_name}
        return FileInfo(rows, writer.columns, notes=notes)

    def _pieces(self, reader: Reader, block: int, task: Task) -> Iterator[tuple[pa.Table, int]]:
        blocks = self._plan.inputs.blocks
        begin = int(blocks.begins[block])
        stop, step = begin + int(blocks.lengths[block]), self._rows(block)
        while begin < stop:
            end = min(begin + step, stop)
            table = rows_of(self._plan, self._before, reader, block, begin, end)
            check_columns(self._schema, table.schema, "tokenize", f" in {task.source}")
            yield table, end - begin
            begin = end

    def _rows(self, block: int) -> int:
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
    """What the stages make of rows of a block, as a table of these alone."""
    inputs = plan.inputs
    ids = int(inputs.blocks.firsts[block]) + np.arange(begin, end, dtype=np.int64)
    try:
        data = read_rows(inputs.listed, reader, block, begin, end)
        table = decoded(table_of(before(Block(data, ids, epoch=0)).data, CALLER))
    except Exception as error:
        say_where(error, plan)
        raise
    schema = table.schema.remove_metadata()
    columns = [compact(column) for column in table.columns]
    return pa.Table.from_arrays(columns, schema=schema)


def first_rows(plan: Plan) -> pa.Table:
    blocks, source = plan.inputs.blocks, files_of(plan)
    there = np.flatnonzero(blocks.lengths)
    if not len(there):
        raise DataError(
            f"{CALLER}: {plan.chain.opener} has no rows, and nothing is written: check which files are named"
        )
    block = int(there[0])
    begin = int(blocks.begins[block])
    with closing(source.reader()) as reader:
        end = begin + min(FIRST_ROWS, int(blocks.lengths[block]))
        return rows_of(plan, partial(put_through, plan.chain.steps), reader, block, begin, end)


def make(task: Task, file: OutputFile, maker: Maker) -> FileInfo:
    return maker.make(task, file)
