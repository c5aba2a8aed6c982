"""Makes the output files: one for each input file, of a large one several, cut between its row groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import one_chunk, to_numpy
from trainpipes.columns.block import Block
from trainpipes.columns.columns import table_of
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import DataError
from trainpipes.filesystems.output_file import OutputFile
from trainpipes.interfaces.blame import say_where
from trainpipes.interfaces.source import LooksAhead, Reader, read_rows
from trainpipes.interfaces.stage_kinds import put_through
from trainpipes.prepare.ahead import CALLER
from trainpipes.sources.files.file_reader import cut_by_bytes
from trainpipes.writers.output_folder import FileInfo
from trainpipes.writers.table_groups import check_columns, compact, decoded
from trainpipes.writers.write import FileWriter

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
    source: Any = plan.inputs.source
    lengths = plan.inputs.blocks.lengths
    own = source.block_bytes
    own = source.lengths * (source.row_bytes or 1.0) if own is None else own
    sizes = (own * lengths / np.maximum(1, source.lengths)).astype(np.int64)
    parts = []
    for file in range(len(source.files)):
        first, stop = np.searchsorted(source.file_of_block, [file, file + 1]).tolist()
        edges = first + cut_by_bytes(sizes[first:stop], bytes_per_file)
        parts += [(file, *edge) for edge in pairwise(edges.tolist())] or [(file, first, stop)]
    names, short = source.files.names, source.files.relative_names()
    width = max(5, len(str(len(parts) - 1)))
    return [
        Task(
            f"part-{number:0{width}d}{suffix}", names[file], short[file], first, stop,
            int(lengths[first:stop].sum()),
        )
        for number, (file, first, stop) in enumerate(parts)
    ]  # fmt: skip


class BareFile:
    """Nothing but the documents' ids in order, native numbers of one type, as nanoGPT's ``train.bin``."""

    def __init__(self, dtype: str, file: OutputFile, schema: pa.Schema) -> None:
        self.columns = {field.name: str(field.type) for field in schema}
        self._file, self._dtype = file, np.dtype(dtype)

    def write(self, group: pa.Table, first_row: int) -> None:
        ids = to_numpy(one_chunk(group.column("input_ids")).flatten())
        narrow = ids.astype(self._dtype)
        odd = ids[narrow != ids]
        if len(odd):
            raise DataError(
                f'tokenize(format="bin", dtype="{self._dtype}"): there is a token {odd[0]}, which that type '
                "cannot hold; give a dtype that does"
            )
        self._file.write(narrow.data)

    def close(self) -> None:
        """Nothing follows the last id."""


def make(
    open_file: Callable[[OutputFile, pa.Schema], FileWriter], schema: pa.Schema, ids: Sequence[str],
    task: Task, file: OutputFile, plan: Plan,
) -> FileInfo:  # fmt: skip
    source: Any = plan.inputs.source
    blocks, step = plan.inputs.blocks, FIRST_ROWS
    rows = tokens = 0
    with closing(source.reader()) as reader, closing(open_file(file, schema)) as writer:
        if isinstance(reader, LooksAhead):
            reader.expect(range(task.first, task.stop))
        for block in range(task.first, task.stop):
            # A row group for each block of the input, which may have no rows.
            parts = [pa.Table.from_batches([], schema)]
            begin = int(blocks.begins[block])
            stop = begin + int(blocks.lengths[block])
            while begin < stop:  # piece by piece, of as many rows as have few bytes
                end = min(begin + step, stop)
                table = rows_of(plan, reader, block, begin, end)
                check_columns(schema, table.schema, "tokenize", f" in {task.source}")
                parts.append(table)
                tokens += sum(len(one_chunk(table.column(name)).flatten()) for name in ids)
                file.advance(end - begin)
                if table.nbytes < PIECE_BYTES // 2 and end < stop:
                    step = min(2 * step, PIECE_ROWS)
                elif table.nbytes > PIECE_BYTES:
                    step = max(step // 2, 1)
                begin = end
            group = pa.concat_tables(parts)
            writer.write(group, rows)
            rows += len(group)
    return FileInfo(rows, writer.columns, notes={"tokens": tokens, "source": task.source_name})


def rows_of(plan: Plan, reader: Reader, block: int, begin: int, end: int) -> pa.Table:
    """What the stages make of rows of a block, as a table of these alone."""
    inputs = plan.inputs
    ids = int(inputs.blocks.firsts[block]) + np.arange(begin, end, dtype=np.int64)
    try:
        data = read_rows(inputs.listed, reader, block, begin, end)
        made = put_through(plan.chain.steps, Block(data, ids, epoch=0))
        return compact(decoded(table_of(made.data, CALLER)).replace_schema_metadata())
    except Exception as error:
        say_where(error, plan.inputs.place_of)
        raise


def first_rows(plan: Plan) -> pa.Table:
    source: Any = plan.inputs.source
    blocks = plan.inputs.blocks
    there = np.flatnonzero(blocks.lengths)
    if not len(there):
        raise DataError(
            f"{CALLER}: {plan.chain.opener} has no rows, and nothing is written: check which files are named"
        )
    block = int(there[0])
    begin, length = int(blocks.begins[block]), int(blocks.lengths[block])
    with closing(source.reader()) as reader:
        return rows_of(plan, reader, block, begin, begin + min(FIRST_ROWS, length))
