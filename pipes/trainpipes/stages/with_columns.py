"""``with_columns``: columns that a function makes, beside those that are there."""

from __future__ import annotations

import pyarrow as pa

from trainpipes.columns.columns import table_of
from trainpipes.columns.run import Run
from trainpipes.stages.column_function import ColumnFunction


class WithColumns(ColumnFunction):
    """Adds the columns that a function makes from the columns of many rows at once, as ``map(batched=True)``
    of Hugging Face's datasets does; ``map_batches`` replaces all columns.

    In: rows with named columns. Out: the same rows, with the function's columns after their own; a column
    whose name is there already replaces the old one. How many rows come at a time is not fixed and may differ
    between two runs, so the function treats each row by itself. Cursor: none of its own. Costs what the
    function costs.

    Args:
        fn: function of columns, returning a dict of columns or a ``pyarrow.Table``. With
            ``format="arrow"`` it gets a ``pyarrow.Table``, with "numpy" or "torch" a dict of arrays or
            tensors; as in ``map_batches``.
            If it raises a DataError with ``row=n``, counted from 0 among the rows that it was given, the
            error names that row in its file.
        format: "arrow", "numpy" or "torch": what the function takes.
        version: names the function in checkpoints; see ``map``.
        thread_safe: whether several threads may call it at once; see ``map``.

    Raises:
        DataError: the function returned another number of rows; or with "numpy" or "torch", a column of
            integers or bools has a null, which arrays and tensors cannot hold; names the row.
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
    """A table with the columns of another one, which take the place of those of the same name."""
    for field, column in zip(found.schema, found.columns, strict=True):
        if field.name in table.column_names:
            place = table.column_names.index(field.name)
            table = table.set_column(place, field, column)
        else:
            table = table.append_column(field, column)
    return table
