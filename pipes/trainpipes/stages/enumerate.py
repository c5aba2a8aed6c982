"""``enumerate``: the number of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Self

import pyarrow as pa

from trainpipes._internal.checks import ColumnName, Ge
from trainpipes.columns.arrays import to_arrow
from trainpipes.columns.columns import table_of
from trainpipes.columns.run import Run
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.errors import ConfigError
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import MixingSource, RunStage
from trainpipes.stages.label_column import refuse_taken, taken


class Enumerate(RunStage):
    """Gives each row its number in file order over all files, from ``start``.

    In: rows, before any stage that drops or reorders them. Out: the same rows with one more column, int64;
    rows that are not dicts become pairs ``(number, row)``, as Python's ``enumerate`` gives them. A row has
    the same number in every epoch and on every rank, also after a shuffle. Cursor: none of its own. Costs
    nothing for columns.

    To number the batches in training, count in the loop.

    Args:
        start: the number of the first row.
        output_column: name of the new column.

    >>> import pyarrow as pa, trainpipes as tp
    >>> list(tp.from_dataset(["a", "b"]).enumerate(start=1))
    [(1, 'a'), (2, 'b')]
    >>> list(tp.from_arrow(pa.table({"x": ["a", "b", "c"]})).skip(1).enumerate().shuffle(9, seed=1))
    [{'x': 'c', 'index': 1}, {'x': 'b', 'index': 0}]
    """

    by_row = True

    start: Annotated[int, Ge(-(2**62), 2**62)] = 0
    _: KW_ONLY
    output_column: ColumnName = "index"

    _passed = 0  # rows that are skipped below

    def resolve(self, below: Sequence[Stage]) -> Self:
        for stage in below:
            if stage.role in ("shuffle", "pack", "batch", "repeat") or not stage.keeps_rows:
                raise ConfigError(
                    f"{self} numbers rows in file order: put it before {stage.name}(), or number "
                    "the batches in the loop, for n, batch in enumerate(loader)"
                )
            if isinstance(stage, MixingSource):
                raise ConfigError(
                    f"{self} numbers rows in file order, and each of several sources has its own: "
                    f"put it before {stage.name}(), in each of its sources"
                )
        passed = sum(stage.options["count"] for stage in below if stage.role == "skip")
        return self.resolved(_passed=passed)

    def process(self, run: Run) -> Run:
        block, name = run.block, self.output_column
        numbers = block.ids + (self.start - self._passed)
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
