"""Makes the output files: one for each input file, of a large one several, cut between its row groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise

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
from trainpipes.kinds.stage_kinds import put_through
from trainpipes.prepare.tokenize.cut import CALLER, files_of
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.output_folder import FileInfo
from trainpipes.storage.writers.table_groups import check_columns, compact, decoded
from trainpipes.storage.writers.write import FileWriter

#: Rows of the first piece, and from which columns are taken; rows and bytes of ids of any piece, at most: a
#: tokenizer's own objects take some 50 times what the text does.
FIRST_ROWS, PIECE_ROWS, PIECE_BYTES = 16, 8192, 1 << 20


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
    source, lengths = files_of(plan), plan.inputs.blocks.lengths
    if source.block_bytes is None:
        return (lengths * (source.row_bytes or 1.0)).astype(np.int64)
    return (source.block_bytes * (lengths / np.maximum(1, source.lengths))).astype(np.int64)


def _parts(sizes: IntArray, first: int, stop: int, most: int) -> list[tuple[int, int]]:
    """A file's blocks in even parts, at most ``most`` bytes unless one block has more."""
    ends = np.cumsum(sizes[first:stop])
    count = -(-int(ends[-1]) // most) if len(ends) else 0
    if count <= 1:
        return [(first, stop)]
    cuts = first + 1 + np.searchsorted(ends, ends[-1] * np.arange(1, count) / count)
    return list(pairwise(np.unique([first, *cuts, stop]).tolist()))


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


def make(
    open_file: Callable[[OutputFile, pa.Schema], FileWriter],
    schema: pa.Schema,
    ids: Sequence[str],
    task: Task,
    file: OutputFile,
    plan: Plan,
) -> FileInfo:
    rows = tokens = 0
    with closing(files_of(plan).reader()) as reader, closing(open_file(file, schema)) as writer:
        if isinstance(reader, LooksAhead):
            reader.expect(range(task.first, task.stop))
        for block in range(task.first, task.stop):
            # A row group for each block of the input, which may have no rows.
            parts = [pa.Table.from_batches([], schema)]
            for table, read in _pieces(plan, reader, block):
                check_columns(schema, table.schema, "tokenize", f" in {task.source}")
                parts.append(table)
                tokens += sum(len(one_chunk(table.column(name)).flatten()) for name in ids)
                file.advance(read)
            group = pa.concat_tables(parts)
            writer.write(group, rows)
            rows += len(group)
    return FileInfo(rows, writer.columns, notes={"tokens": tokens, "source": task.source_name})


def _pieces(plan: Plan, reader: Reader, block: int) -> Iterator[tuple[pa.Table, int]]:
    """A block's rows, and how many were read, piece by piece, of as many rows as have few bytes."""
    blocks, step = plan.inputs.blocks, FIRST_ROWS
    begin = int(blocks.begins[block])
    stop = begin + int(blocks.lengths[block])
    while begin < stop:
        end = min(begin + step, stop)
        table = rows_of(plan, reader, block, begin, end)
        yield table, end - begin
        begin = end
        if table.nbytes < PIECE_BYTES // 2:
            step = min(2 * step, PIECE_ROWS)
        elif table.nbytes > PIECE_BYTES:
            step = max(step // 2, 1)


def rows_of(plan: Plan, reader: Reader, block: int, begin: int, end: int) -> pa.Table:
    """What the stages make of rows of a block, as a table of these alone."""
    inputs = plan.inputs
    ids = int(inputs.blocks.firsts[block]) + np.arange(begin, end, dtype=np.int64)
    try:
        data = read_rows(inputs.listed, reader, block, begin, end)
        made = put_through(plan.chain.steps, Block(data, ids, epoch=0))
        return compact(decoded(table_of(made.data, CALLER)).replace_schema_metadata())
    except Exception as error:
        say_where(error, plan)
        raise


def first_rows(plan: Plan) -> pa.Table:
    blocks = plan.inputs.blocks
    there = np.flatnonzero(blocks.lengths)
    if not len(there):
        raise DataError(
            f"{CALLER}: {plan.chain.opener} has no rows, and nothing is written: check which files are named"
        )
    with closing(files_of(plan).reader()) as reader:
        return next(_pieces(plan, reader, int(there[0])))[0]
