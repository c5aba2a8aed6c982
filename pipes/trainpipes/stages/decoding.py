"""Parts that the stages share which decode files: pictures, sound, video."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from trainpipes.columns.block import Block
from trainpipes.columns.run import Run
from trainpipes.engine.calling import Answer, row_words
from trainpipes.engine.processes.executors import Threads
from trainpipes.errors import UnreadableError
from trainpipes.interfaces.quarantine import LeftOut, leaves_out
from trainpipes.interfaces.read_columns import blame, cell
from trainpipes.interfaces.stage import Tally, made_once
from trainpipes.media import Undecodable
from trainpipes.stages.columns import taken
from trainpipes.stages.map import RowFunction


class Decoder(RowFunction, asks_inputs=True):
    """A stage that decodes a column, in the engine's threads: ``column``, ``output_column`` and ``on_error``
    are its options. Of a batch it leaves out rows, and of batches those without any.

    Attributes:
        said: the kind of value, in errors.
        unit: the same in counts of rows that are left out.
    """

    rng = False
    shares = True
    thread_safe = True
    _rows_of_batches = _gives_arrays = True

    said: ClassVar[str]
    unit: ClassVar[str]

    @abstractmethod
    def decoded(self, value: Any, row: Any, rng: Any) -> Any:
        """What a value of a row becomes; raises ``Undecodable``. With ``rng`` it gets the row's generator."""

    @property
    def _output(self) -> str:
        output: str | None = self.options["output_column"]
        return output or str(self.options["column"])

    def _decoded_row(self, row: Any, rng: Any) -> dict[str, Any]:
        column, output = self.options["column"], self._output
        value = cell(row, column, self)
        if output != column and output in row:
            raise taken(output, self)
        several = isinstance(value, list | tuple)
        values = [self.decoded(v, row, rng) for v in (value if several else [value])]
        decoded = values if several else values[0]
        return {output if k == column else k: decoded if k == column else v for k, v in row.items()}

    def _traits(self) -> dict[str, Any]:
        return {"keeps_rows": not leaves_out(self.options["on_error"])}

    def _settle(self, threads: int) -> None:
        # Where the thread that iterates calls functions of the user's, others decode for it.
        self._running.executor = Threads(threads) if threads else None

    @property
    def function(self) -> tuple[Callable[..., Any], Any]:
        return self._fresh()._decoded_or_not, ""

    def _items(self, run: Run) -> Sequence[Any]:
        self._check_rows(run)
        return run.block.rows()

    def _words(self, run: Run) -> Any:
        return row_words(run.block) if self.rng else None

    def _decoded_or_not(self, row: Any, rng: Any = None) -> dict[str, Any] | Undecodable:
        try:
            return self._decoded_row(row, rng)
        except Undecodable as error:
            if not self.traits.keeps_rows:
                return error
            column = self.options["column"]
            said = f"column {column!r} holds no {self.said} that can be decoded: {error}"
            way = 'fix it, or leave such rows out with on_error="skip"'
            raise UnreadableError(f"{self}: {said}; {way}", stage=str(self)) from None

    def _with(self, run: Run, answer: Answer) -> Run:
        (rows, error), ids = answer, run.block.ids
        if error is not None:
            blame(error, self, int(ids[len(rows)]))
            raise error
        block, run = run.block, run.with_block(self._filled(run.block, rows))
        if self.traits.keeps_rows:
            return run
        good = np.array([not isinstance(row, Undecodable) for row in rows], dtype=np.bool_)
        self._left_out.drop(block, (~good).astype(np.int64), lambda row: rows[row])
        if good.all() or run.bounds is None:
            return run if good.all() else run.pick(np.flatnonzero(good))
        # Of batches with the rows that are left, those that have any.
        bounds = np.concatenate([[0], np.cumsum(good)])[run.bounds].astype(np.int64)
        shorter = Run(run.block.take(np.flatnonzero(good)), run.cursors, bounds)
        return shorter.keep(np.diff(bounds) > 0)

    def _filled(self, block: Block, decoded: list[Any]) -> Block:
        """Rows with their decoded values; where that is ``Undecodable``, they are left out after it."""
        return block.with_data(decoded)

    @made_once
    def _left_out(self) -> LeftOut:
        why, on_error = "they cannot be decoded", self.options["on_error"]
        return LeftOut(self, why, self.unit, unit="", on_error=on_error)

    def _tallies(self) -> Sequence[Tally]:
        return (self._left_out,)
