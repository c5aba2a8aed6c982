from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, Literal

import pyarrow as pa

from trainpipes._internal.checks import Function
from trainpipes.columns.bad_text import BadCell
from trainpipes.columns.block import Block
from trainpipes.columns.columns import from_columns, table_of, untyped_columns
from trainpipes.columns.run import Run
from trainpipes.engine.planning.first_rows import find_schema
from trainpipes.errors import DataError, SchemaError, TrainpipesError
from trainpipes.kinds.blame import at_row, blame, refused
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.stages.columns import columns_as

CURE = "have the function return Arrow arrays of a type, pa.array(values, pa.string())"
Format = Literal["arrow", "numpy", "torch"]


class ColumnFunction(RunStage):
    needs_columns = True
    finds_types = True
    asks_inputs = True
    versioned = "fn"
    free = frozenset({"thread_safe"})
    draws_by = (
        "draw in a map(fn, rng=True) before it, or in a TableStage, whose open() gets the numbers and "
        "epochs of the rows (docs/extend.md has an example)"
    )

    fn: Function
    _: KW_ONLY
    format: Format = "arrow"
    version: str | None = None
    thread_safe: bool = False

    def returned(self, run: Run) -> pa.Table:
        self._check_rows(run)
        columns = columns_as(run.block, self.format, self)
        try:
            fn = self._draw_watch.around(self.fn)
            data = from_columns(fn(columns), self, self._type)
        except BadCell as bad:
            raise at_row(f"{self}: {bad}", self, run.block.ids[bad.row or 0], SchemaError) from None
        except TrainpipesError as error:
            place = 0
            if error.path is None and error.row is not None:  # of those that the function got
                place, error.row = min(error.row, len(run.block) - 1), None
            blame(error, self, int(run.block.ids[place]))
            raise
        except Exception as error:
            blame(error, self, int(run.block.ids[0]))
            raise
        if len(data) != len(run.block):
            counts = f"got {len(run.block)} rows and returned {len(data)}"
            rule = "the function gives one row for each row it gets"
            raise refused(self, f": {rule}, {counts}; to drop rows use filter()", DataError)
        return data

    def _type(self, name: str) -> pa.DataType | None:
        """The type of a column that the function returns as a list: that of the first rows."""
        inputs = self.plan_inputs
        key = f"{self.name}-{inputs.chain.stages.index(self)}"

        def find() -> pa.Schema:
            steps = inputs.chain.steps
            below = steps[: steps.index(self)]
            return find_schema(inputs, below, str(self), CURE, self._untyped)

        schema = inputs.schemas.get(key, find)
        return schema.field(name).type if name in schema.names else None

    def _untyped(self, block: Block) -> list[dict[str, Any]]:
        columns = untyped_columns(self.fn(columns_as(block, self.format, self)))
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, values, strict=True)) for values in rows]


class MapBatches(ColumnFunction):
    """Apply a function to the columns of many rows at once, which returns the new columns.

    Treat each row by itself: the number of rows in a call may differ between two runs.

    Args:
        fn: function of columns that returns columns, one value for each row. With
            ``format="arrow"`` of a ``pyarrow.Table``, returning one or a dict of arrays; with
            "numpy" or "torch" of a dict of arrays or tensors ``[rows, ...]``, returning such a
            dict. Ragged columns come as object arrays of arrays in "numpy", as lists of tensors in
            "torch"; nulls of floats as NaN. A returned array ``[rows, n, ...]`` becomes fixed-size
            lists. A DataError with ``row=n`` names row n (from 0) of those given.
        format: "arrow", "numpy" or "torch": what the function takes.
        version: names the function in checkpoints; see ``map``.
        thread_safe: whether several threads may call the function at once; see ``map``.

    Raises:
        DataError: another number of rows; or with "numpy" or "torch" a null among integers or
            bools.
        SchemaError: the function returned something that makes no columns.

    >>> import pyarrow as pa, trainpipes as tp
    >>> pipe = tp.from_arrow(pa.table({"x": [1, 2]}))
    >>> list(pipe.map_batches(lambda c: {"y": c["x"] * 2}, format="numpy"))
    [{'y': 2}, {'y': 4}]
    """

    def process(self, run: Run) -> Run:
        return run.with_block(run.block.with_data(self.returned(run)))


class WithColumns(ColumnFunction):
    """Add the columns that a function makes of the columns of many rows at once.

    A column whose name is there already replaces the old one; otherwise as ``map_batches``.

    Args:
        fn: function of columns that returns columns; see ``map_batches``.
        format: "arrow", "numpy" or "torch": what the function takes.
        version: names the function in checkpoints; see ``map``.
        thread_safe: whether several threads may call the function at once; see ``map``.

    Raises:
        DataError: another number of rows; or with "numpy" or "torch" a null among integers or
            bools.
        SchemaError: the function returned something that makes no columns.

    >>> import pyarrow as pa, trainpipes as tp
    >>> pipe = tp.from_arrow(pa.table({"x": [1, 2]}))
    >>> list(pipe.with_columns(lambda c: {"double": c["x"] * 2}, format="numpy"))
    [{'x': 1, 'double': 2}, {'x': 2, 'double': 4}]
    """

    def process(self, run: Run) -> Run:
        found = self.returned(run)
        return run.with_block(run.block.with_data(_beside(table_of(run.block.data, self), found)))


def _beside(table: pa.Table, found: pa.Table) -> pa.Table:
    for field, column in zip(found.schema, found.columns, strict=True):
        if field.name in table.column_names:
            table = table.set_column(table.column_names.index(field.name), field, column)
        else:
            table = table.append_column(field, column)
    return table
