"""The first step: the input is read, part by part. See ``input_parts`` for what becomes of a part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from trainpipes._internal.messages import need_columns
from trainpipes.columns.arrays import to_arrow
from trainpipes.engine.layout import IntArray
from trainpipes.engine.planning.block_table import BlockTable
from trainpipes.errors import SchemaError
from trainpipes.pipeline import Pipeline
from trainpipes.prepare.repack.input_parts import Keeping, Part, SortedPart
from trainpipes.prepare.repack.row_bytes import ROW_COST
from trainpipes.prepare.repack.row_groups import check_schema
from trainpipes.prepare.repack.sorted_runs import taken
from trainpipes.prepare.repack.work import Work
from trainpipes.prepare.repack.workers import InTurn, Tell
from trainpipes.sources.files.file_rows import FileBlocks
from trainpipes.storage.writers.epoch_rows import EpochRows

#: Parts that a block may be larger than, and is still read as one.
LARGE_BLOCK = 4


@dataclass(frozen=True)
class Input:
    """The rows of the input, opened by whoever reads some. Pickles.

    Attributes:
        pipeline: gives them.
        asker: for messages.
        files: the source, opened, where it is files: they are listed once.
    """

    pipeline: Pipeline
    asker: str
    files: FileBlocks | None

    @staticmethod
    def of(pipeline: Pipeline, rows: EpochRows) -> Input:
        """The input of a pipeline whose rows another has opened."""
        source = rows.plan.inputs.source
        return Input(pipeline, rows.asker, source if isinstance(source, FileBlocks) else None)

    def rows(self) -> EpochRows:
        """The rows, not opened."""
        return EpochRows(self.pipeline, self.asker, self.files)


def part_firsts(count: int, part_rows: int, blocks: BlockTable | None) -> IntArray:
    """The number of each part's first row, and how many rows there are: int64 ``[parts + 1]``.

    Args:
        count: how many rows there are.
        part_rows: rows in a part, about.
        blocks: that parts shall not cut, where rows are read in their order and they are not too large.
    """
    firsts = np.arange(0, count, part_rows, dtype=np.int64)
    if blocks is not None and blocks.rows == count:
        edges = np.concatenate([[0], np.cumsum(blocks.lengths)])
        block = np.searchsorted(edges, firsts, side="right") - 1
        small = edges[block + 1] - edges[block] <= LARGE_BLOCK * part_rows
        firsts = np.unique(np.where(small, edges[block], firsts))
    return np.append(firsts, count)


@dataclass(frozen=True)
class ReadParts:
    """Reads parts whose rows are counted: each can be read alone.

    Attributes:
        work: of which this is a step.
        input: the rows.
        firsts: the first row of each part, and the end.
        size: bytes of all rows, about.
    """

    work: Work
    input: Input
    firsts: IntArray
    size: int

    def __call__(self, number: int, tell: Tell) -> Part:
        ((_, part),) = self.read([number], tell, InTurn(False))
        return part

    def named(self, number: int) -> str:
        """What is made of a part, for messages."""
        return (
            f"the sorted rows {self.firsts[number]:,} to {self.firsts[number + 1]:,} of the input"
        )

    def read(self, numbers: Iterable[int], tell: Tell, turn: InTurn) -> Iterator[tuple[int, Part]]:
        """Read some parts, one after the other.

        Args:
            numbers: of the parts, ascending.
            tell: called with rows done since the last call.
            turn: sorts rows while the next ones are read.
        """
        work, rows, at = self.work, self.input.rows(), -1
        stretches = _Stretches(rows, work)
        with closing(rows):
            for number in numbers:
                first, stop = int(self.firsts[number]), int(self.firsts[number + 1])
                if at != first:
                    rows.close()
                    rows.open(rows.cursor_at(first))
                    stretches = _Stretches(rows, work)
                    at = first
                maker = self._maker(number, first)
                try:
                    for held in stretches.upto(stop - first):
                        turn.do(partial(maker.add, held))
                        at += sum(map(len, held))
                        tell(sum(map(len, held)))
                    if at != stop:
                        raise work.changed(first, stop - first, at - first)
                    turn.finish()
                    part = work.save_part(number, maker.close(), "read")
                finally:
                    turn.wait()
                    maker.abandon()
                yield number, part

    def _maker(self, number: int, first: int) -> Keeping | SortedPart:
        work = self.work
        if work.options.needs_all:
            return Keeping(work.files, number, first, work.options.by, work.order)
        count, parts = int(self.firsts[-1]), len(self.firsts) - 1
        return work.sorter(number, first, work.shuffled(count), count, self.size, parts)


def read_stream(work: Work, rows: EpochRows, tell: Tell) -> list[Part]:
    """All parts of rows that are not counted: each goes on where the one before has ended."""
    parts = list(work.parts("read").values())
    with closing(rows):
        if not parts or parts[-1].next is not None:
            rows.open(parts[-1].next if parts else None)
        stretches = _Stretches(rows, work)
        while not parts or parts[-1].next is not None:
            first = parts[-1].first + parts[-1].rows if parts else 0
            held = next(stretches.upto(None), None)
            if held is None:
                if parts:
                    parts[-1] = replace(parts[-1], next=None)
                    work.save_part(len(parts) - 1, parts[-1], "read")
                break
            maker = Keeping(work.files, len(parts), first, work.options.by, work.order)
            try:
                maker.add(held)
                part = maker.close()
            finally:
                maker.abandon()
            part = replace(part, next=rows.cursor)
            parts.append(work.save_part(len(parts), part, "read"))
            tell(part.rows)
    return parts


class _Stretches:
    """Rows as they come, some at a time, as many as fit into memory."""

    def __init__(self, rows: EpochRows, work: Work) -> None:
        self._rows, self._work = rows, work
        self._rest: pa.Table | None = None  # rows that were read, and are of the next part
        self._checked = False

    def upto(self, limit: int | None) -> Iterator[list[pa.Table]]:
        """The next rows, up to ``limit``."""
        held: list[pa.Table] = []
        size = count = 0
        while limit is None or count < limit:
            table = self._rest if self._rest is not None else self._rows.some()
            self._rest = None
            if table is None:
                break
            if limit is not None and count + len(table) > limit:
                self._rest = table.slice(limit - count)
                table = table.slice(0, limit - count)
            if not self._checked:
                check_rows(table.schema, self._work)
                self._checked = True
            held.append(table)
            count += len(table)
            size += table.nbytes + ROW_COST * len(table)
            if size >= self._work.unit:
                yield held
                held, size = [], 0
        if held:
            yield held


def check_rows(schema: pa.Schema, work: Work) -> None:
    """Raise SchemaError unless the columns that are asked for are there, and all can be written."""
    need_columns(schema.names, [*work.options.sort, *(work.options.by or ())], f"{work.asker}()")
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise SchemaError(
            f"{work.asker}(): rows have the column {twice[0]!r} twice: give each a name of its own",
            stage=work.asker,
        )
    check_schema(schema, work.options.form, work.asker)
    if work.order is not None:
        work.order.check(schema)
    if work.options.moves_rows:
        for field in schema:
            try:
                taken(pa.nulls(1, field.type), to_arrow(np.zeros(1, np.int64)))
            except pa.ArrowException as error:
                raise SchemaError(
                    f"{work.asker}(): column {field.name!r} holds {field.type}, whose rows Arrow cannot put "
                    f"into another order ({error}): leave it out by columns=[...], or make another "
                    "column of it",
                    stage=work.asker,
                ) from error
