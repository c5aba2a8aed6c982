"""``map_batches``: a function on whole columns, of any number of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, Literal

import pyarrow as pa

from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.runtime.blame import blame
from trainpipes.runtime.kinds import RunStage
from trainpipes.runtime.planning.first_rows import Unfit, find_schema
from trainpipes.runtime.rows.bad_cell import BadCell
from trainpipes.runtime.rows.block import Block, Payload
from trainpipes.runtime.rows.columns import from_columns, untyped_columns
from trainpipes.runtime.run import Run
from trainpipes.shown import shown
from trainpipes.stages.columns import columns_as

__all__ = ["Format", "MapBatches"]

CURE = "have the function return Arrow arrays of a type, pa.array(values, pa.string())"

Format = Literal["arrow", "numpy", "torch"]


class MapBatches(RunStage):
    """Applies a function to the columns of many rows at once.

    In: rows with named columns. Out: as many rows, with the columns that the function returns.
    How many rows come at a time is not fixed and may differ between two runs, so the function
    treats each row by itself. Cursor: none of its own. Costs what the function costs.

    Args:
        fn: function of columns. With ``format="arrow"`` of a ``pyarrow.Table``, returning one (or
            a dict of arrays); with "numpy" or "torch" of a dict of arrays or tensors
            ``[rows, ...]``, returning such a dict. Ragged columns come as object arrays of arrays
            in "numpy", and as lists of tensors in "torch"; nulls of floats as NaN. An array
            ``[rows, n, ...]`` that it returns is one of fixed-size lists, whose rows are arrays.
        format: what the function takes.
        version: names the function in checkpoints; see ``map``.

    Raises:
        DataError: the function returned another number of rows; or a null among integers or bools,
            for which arrays and tensors have no place, names the row.
        SchemaError: it returned what makes no columns.

    >>> import pyarrow as pa, trainpipes as tp
    >>> pipe = tp.from_arrow(pa.table({"x": [1, 2]}))
    >>> list(pipe.map_batches(lambda c: {"y": c["x"] * 2}, format="numpy"))
    [{'y': 2}, {'y': 4}]
    """

    needs_columns = True
    finds_types = True
    asks_plan = True
    versioned = "fn"

    fn: Callable[[Any], Any]
    _: KW_ONLY
    format: Format = "arrow"
    version: str | None = None

    def check(self) -> None:
        if not callable(self.fn):
            raise ConfigError(f"map_batches(fn) takes a function of columns, got {shown(self.fn)}")

    def process(self, run: Run) -> Run:
        if run.items is not None:
            raise ConfigError(
                f"{self} stands below pad_collate() or collate(), which make tensors of columns; "
                "above them use map()"
            )
        columns = columns_as(run.block, self.format, self)
        try:
            data: Payload = from_columns(self.fn(columns), self, self._type)
        except BadCell as bad:
            error = SchemaError(f"{self}: {bad}", stage=str(self))
            blame(error, self, int(run.block.ids[bad.row or 0]))
            raise error from None
        except Exception as error:
            blame(error, self, int(run.block.ids[0]))
            raise
        if len(data) != len(run.block):
            raise DataError(
                f"{self}: the function gives one row for each row it gets, got {len(run.block)} rows "
                f"and returned {len(data)}; to drop rows use filter()",
                stage=str(self),
            )
        return run.with_block(run.block.with_data(data))

    def _type(self, name: str) -> pa.DataType | None:
        """The type of a column that the function returns as a list of Python values: that of the first
        rows, as for rows that are Python objects."""
        key = f"{self.name}-{self.plan.stages.index(self)}"
        schema = self.plan.schemas.get(key, self._find)
        return schema.field(name).type if name in schema.names else None

    def _find(self) -> pa.Schema:
        stages = [*self.plan.before, *self.plan.after]
        below = stages[: stages.index(self)]
        try:
            return find_schema(self.plan, below, str(self), CURE, self._untyped)
        except Unfit as unfit:
            raise unfit.error from None

    def _untyped(self, block: Block) -> list[dict[str, Any]]:
        """Columns that the function returns as Python values, for some rows."""
        columns = untyped_columns(self.fn(columns_as(block, self.format, self)))
        if not columns:
            return []
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
