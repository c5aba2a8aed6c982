"""``enumerate``: the number of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from torchdata.nodes import BaseNode

from trainpipes.arrays import to_arrow
from trainpipes.checks import column_name, whole_number
from trainpipes.errors import ConfigError
from trainpipes.runtime.rows.block import TensorRows
from trainpipes.runtime.rows.columns import table_of
from trainpipes.runtime.run import Run
from trainpipes.runtime.stage import Stage
from trainpipes.stages.ragged_column import refuse_taken, taken

__all__ = ["Enumerate"]


class Enumerate(Stage):
    """Gives each row its number in file order over all files, from ``start``.

    In: rows, before anything drops some or puts them in another order. Out: rows that are dicts with one
    more column, int64; of others, pairs of number and row, as Python's ``enumerate`` gives them. A row has
    the same number in every epoch and on every rank, wherever it comes after a shuffle. Cursor: none of
    its own. Costs nothing for columns.

    The number of a batch in training is another thing: count in the loop.

    Args:
        source: the node below, or None as a step of a pipeline.
        start: the number of the first row.
        column: what the column is called.

    >>> import pyarrow as pa, trainpipes as tp
    >>> list(tp.from_dataset(["a", "b"]).enumerate(start=1))
    [(1, 'a'), (2, 'b')]
    >>> list(tp.from_arrow(pa.table({"x": ["a", "b", "c"]})).skip(1).enumerate().shuffle(9, seed=1))
    [{'x': 'c', 'index': 1}, {'x': 'b', 'index': 0}]
    """

    role = "rows"
    by_row = True

    def __init__(
        self, source: BaseNode[Any] | None = None, start: int = 0, *, column: str = "index"
    ) -> None:
        whole_number(start, -(2**62), "enumerate(start)", "the number of the first row", most=2**62)
        column_name(column, "enumerate(column)")
        super().__init__(source, start=start, column=column)
        self._first = start

    def bind(self, below: Sequence[Stage]) -> None:
        for stage in below:
            if stage.role in ("shuffle", "pack", "batch", "repeat") or not stage.keeps_rows:
                raise ConfigError(
                    f"{self} numbers rows in file order: put it before {stage.name}(), or number what "
                    "comes in the loop, for n, batch in enumerate(loader)"
                )
        passed = sum(stage.options["count"] for stage in below if stage.role == "skip")
        self._first = self.options["start"] - passed

    def process(self, run: Run) -> Run:
        block, name = run.block, self.options["column"]
        numbers = block.ids + self._first
        data = block.data
        if isinstance(data, TensorRows) and data.names is not None:
            data = table_of(data, self)
        if isinstance(data, pa.Table):
            refuse_taken(data, [name], self)
            return run.with_block(block.with_data(data.append_column(name, to_arrow(numbers))))
        if any(isinstance(row, Mapping) and name in row for row in block.rows()):
            raise taken(name, self)
        rows = [
            {**row, name: number} if isinstance(row, Mapping) else (number, row)
            for number, row in zip(numbers.tolist(), block.rows(), strict=True)
        ]
        return run.with_block(block.with_data(rows))
