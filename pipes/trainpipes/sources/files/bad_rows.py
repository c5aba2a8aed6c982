"""Rows of files that cannot be read: readers give nulls in their places, and why; ``BadRows`` leaves them
out.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import to_numpy
from trainpipes.columns.run import Run
from trainpipes.errors import UnreadableError
from trainpipes.interfaces.left_out import LeftOut
from trainpipes.interfaces.quarantine import OnBadRow, Quarantine, leaves_out, list_file
from trainpipes.interfaces.source import Place
from trainpipes.interfaces.stage import Stage, made_once
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.interfaces.tally import Tally

T = TypeVar("T")
log = logging.getLogger("trainpipes")

#: A column of ours: why a row cannot be read and, behind a zero, its text; null for others.
BAD = pa.field("trainpipes:bad", pa.string())
END = "\0"


def bad_rows(schema: pa.Schema, rows: int, why: str) -> pa.RecordBatch:
    """Nulls in place of rows that cannot be read."""
    nulls = [pa.nulls(rows, field.type) for field in schema]
    return pa.RecordBatch.from_arrays([*nulls, pa.repeat(why, rows)], schema=schema.append(BAD))


def separate(table: Any) -> tuple[Any, dict[int, tuple[str, str]]]:
    """A table without our column; and of its bad rows why they are, and their text."""
    why = table.column(BAD.name)
    bad = np.flatnonzero(to_numpy(why.is_valid())).tolist() if why.null_count < len(why) else []
    said = {row: why[row].as_py().partition(END)[::2] for row in bad}
    return table.drop_columns([BAD.name]), said


class BadRows(RunStage, keeps_rows=False, asks_inputs=True, gives="choice"):
    """Leaves out the rows that a reader could not read. ``shaping``: what else makes rows bad."""

    thread_safe = True

    reader: str
    on_error: OnBadRow
    shaping: Any = None

    @property
    def name(self) -> str:
        return self.reader

    def __repr__(self) -> str:
        return f"{self.reader}(on_error)"

    def identity(self) -> dict[str, Any]:
        return {"stage": str(self), "shaping": self.shaping}

    @made_once
    def _left_out(self) -> LeftOut:
        return LeftOut(self, "they cannot be read", "row", unit="", on_error=self.on_error)

    def _tallies(self) -> Sequence[Tally]:
        return (self._left_out,)

    def process(self, run: Run) -> Run:
        table, said = separate(run.block.data)
        run = run.with_block(run.block.with_data(table))
        bad = np.zeros(len(run.block), dtype=np.int64)
        bad[[*said]] = 1
        self._left_out.drop(run.block, bad, lambda n: said[n][0], lambda n: said[n][1])
        return run.pick(np.flatnonzero(bad == 0)) if said else run


def above_reader(reader: Stage, shaping: Any = None) -> tuple[Stage, ...]:
    """The stages above a reader that leave out its bad rows, if it is asked to."""
    on_error = reader.options["on_error"]
    return (BadRows(reader.name, on_error, shaping),) if leaves_out(on_error) else ()


def without_bad_files(open_on: Callable[[Any, Sequence[Stage]], T]) -> Callable[[Any, Any], T]:
    """``_open_on`` of a reader that may leave out files whose rows cannot be counted."""

    @functools.wraps(open_on)
    def opened(self: Any, files: Sequence[Stage]) -> T:
        while True:
            try:
                return open_on(self, files)
            except UnreadableError as error:
                bad = vars(error).get("bad_files")
                if not bad or not leaves_out(self.on_error):
                    raise
                self.bad_files.update(bad)
            for name, why in bad.items():
                place = Place(name, source=getattr(self._inputs, "name", None))
                said = "%s: a file is left out, which cannot be read: %s: %s"
                log.warning(said, self.name, place, why)
                if isinstance(self.on_error, Quarantine):
                    list_file(self.on_error, place, self, why)

    return opened
