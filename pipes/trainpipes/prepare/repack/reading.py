"""The first step: the input is read, part by part. See ``input_parts`` for what becomes of a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.arrays import to_arrow
from trainpipes.errors import SchemaError
from trainpipes.naming import need_columns
from trainpipes.prepare.repack.input_parts import Keeping, Part, SortedPart
from trainpipes.prepare.repack.row_bytes import ROW_COST
from trainpipes.prepare.repack.row_groups import check_schema
from trainpipes.prepare.repack.sorted_runs import taken
from trainpipes.prepare.repack.work import Work
from trainpipes.prepare.repack.workers import InTurn
from trainpipes.writers.epoch_rows import EpochRows

__all__ = ["InputReader", "check_rows"]


class InputReader:
    """Reads the input once.

    Args:
        work: of which this is a step.
        rows: the input, not opened.
        part_rows: rows in a part, where they are counted.
        size: bytes of all rows, about, where they are counted.
    """

    def __init__(self, work: Work, rows: EpochRows, part_rows: int, size: int) -> None:
        self._work, self._rows = work, rows
        self._part_rows, self._size = part_rows, size
        self._count = rows.count if rows.plan.counted else None
        self._rest: pa.Table | None = None  # rows that were read, and are of the next part
        self._checked = False

    def read(self) -> list[Part]:
        """All parts; reads those that are not there yet."""
        with closing(self._rows), self._work.workers.in_turn() as turn:
            return self._stream() if self._count is None else self._counted(self._count, turn)

    def _counted(self, count: int, turn: InTurn) -> list[Part]:
        """Parts of a number of rows that is known before anything is read: each can be read alone."""
        work, at = self._work, -1
        firsts = range(0, count, self._part_rows)
        for number, first in enumerate(firsts):
            work.report("reading", first, count)
            if work.part(number, "read") is not None:
                continue
            if at != first:
                self._rows.close()
                self._rows.open(self._rows.cursor_at(first))
                self._rest, at = None, first
            stop = min(first + self._part_rows, count)
            maker = self._maker(number, first, count, len(firsts))
            try:
                for held in self._stretches(stop - first):
                    turn.do(partial(maker.add, held))
                    at += sum(map(len, held))
                    work.report("reading", at, count)
                if at != stop:
                    raise work.changed(first, stop - first, at - first)
                turn.do(partial(self._close, maker, number))
                turn.finish()
            finally:
                turn.wait()
                maker.abandon()
        parts = [work.part(number, "read") for number in range(len(firsts))]
        return [part for part in parts if part is not None]

    def _close(self, maker: Keeping | SortedPart, number: int) -> None:
        self._work.save_part(number, maker.close(), "read")

    def _stream(self) -> list[Part]:
        """Parts of rows that are not counted: each goes on where the one before has ended."""
        work = self._work
        parts: list[Part] = []
        while (part := work.part(len(parts), "read")) is not None:
            parts.append(part)
        if not parts or parts[-1].next is not None:
            if parts:
                self._rows.plan.adopt(parts[-1].notes or {})
            self._rows.open(parts[-1].next if parts else None)
        while not parts or parts[-1].next is not None:
            first = parts[-1].first + parts[-1].rows if parts else 0
            work.report("reading", first, None)
            held = next(self._stretches(None), None)
            if held is None:
                if parts:
                    parts[-1] = replace(parts[-1], next=None)
                    work.save_part(len(parts) - 1, parts[-1], "read")
                break
            maker = self._maker(len(parts), first, 0, 1)
            try:
                maker.add(held)
                part = maker.close()
            finally:
                maker.abandon()
            after: dict[str, Any] = {"next": self._rows.cursor, "notes": self._rows.plan.notes}
            work.save_part(len(parts), replace(part, **after), "read")
            parts.append(replace(part, **after))
        return parts

    def _maker(self, number: int, first: int, count: int, parts: int) -> Keeping | SortedPart:
        work, options = self._work, self._work.options
        if self._count is None or options.needs_all:
            return Keeping(work.temporary, number, first, options.by, work.order, work.asker)
        return work.sorter(number, first, work.shuffled(count), count, self._size, parts)

    def _stretches(self, limit: int | None) -> Iterator[list[pa.Table]]:
        """The next rows, up to ``limit``, some at a time."""
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
