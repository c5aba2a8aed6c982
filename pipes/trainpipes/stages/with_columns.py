"""``with_columns``: columns that a function makes, beside those that are there."""

from __future__ import annotations

import pyarrow as pa

from trainpipes.rows.columns import table_of
from trainpipes.rows.run import Run
from trainpipes.stages.column_function import ColumnFunction

__all__ = ["WithColumns"]


class WithColumns(ColumnFunction):
    """Adds columns that a function makes of the columns of many rows at once, as ``map(batched=True)`` of
    Hugging Face's datasets does; ``map_batches`` replaces all columns.

    In: rows with named columns. Out: the same rows, with the function's columns after their own; one of a
    name that is there takes its place. How many rows come at a time is not fixed and may differ between
    two runs, so the function treats each row by itself. Cursor: none of its own. Costs what the function
    costs.

    Args:
        fn: function of columns, returning a dict of columns or a ``pyarrow.Table``. With
            ``format="arrow"`` it gets a ``pyarrow.Table``, with "numpy" or "torch" a dict of arrays or
            tensors; as in ``map_batches``.
            A DataError that it raises with ``row=n`` is about the n-th of the rows that it was given.
        format: what the function takes.
        version: names the function in checkpoints; see ``map``.

    Raises:
        DataError: the function returned another number of rows; or a null among integers or bools, for
            which arrays and tensors have no place, names the row.
        SchemaError: it returned what makes no columns.

    >>> import pyarrow as pa, trainpipes as tp
    >>> pipe = tp.from_arrow(pa.table({"x": [1, 2]}))
    >>> list(pipe.with_columns(lambda c: {"double": c["x"] * 2}, format="numpy"))
    [{'x': 1, 'double': 2}, {'x': 2, 'double': 4}]
    """

    def process(self, run: Run) -> Run:
        found = self.returned(run)
        return run.with_block(run.block.with_data(_beside(table_of(run.block.data, self), found)))


def _beside(table: pa.Table, found: pa.Table) -> pa.Table:
    """A table with the columns of another one, which take the place of those of the same name."""
    for field, column in zip(found.schema, found.columns, strict=True):
        if field.name in table.column_names:
            place = table.column_names.index(field.name)
            table = table.set_column(place, field, column)
        else:
            table = table.append_column(field, column)
    return table
