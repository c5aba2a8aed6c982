"""``drop_columns``: columns that do not go on."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from trainpipes._internal.checks import column_names
from trainpipes._internal.messages import need_columns
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.stages.columns import columns_of


class DropColumns(RunStage):
    """Leaves some columns out, and keeps all others, in their order.

    In: rows with columns. Out: the same rows, fewer columns. Cursor: none of its own. Costs nothing.
    Columns that no stage needs are better not read at all: ``read_parquet(columns=...)``.

    Args:
        columns: names to leave out.

    Raises:
        ConfigError: no column would be left.
        SchemaError: a column is not there; names the nearest.

    >>> import pyarrow as pa, trainpipes as tp
    >>> list(tp.from_arrow(pa.table({"x": [1, 2], "y": [3, 4]})).drop_columns("y"))
    [{'x': 1}, {'x': 2}]
    """

    needs_columns = True
    names_only = True

    columns: Sequence[str]

    def check(self) -> None:
        self._set(columns=column_names(self.columns, "drop_columns(columns)"))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.columns))})"

    def process(self, run: Run) -> Run:
        block = columns_of(run.block, self)
        return run.with_block(block.with_columns(self._left))

    def _left(self, table: pa.Table) -> pa.Table:
        need_columns(table.column_names, self.columns, self)
        left = [name for name in table.column_names if name not in self.columns]
        if not left:
            raise ConfigError(
                f"{self}: rows keep one column at least, and have {', '.join(table.column_names)}; "
                "leave one of them in"
            )
        return table.select(left)
