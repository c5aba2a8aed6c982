"""``map_batches``: a function on whole columns, of any number of rows at a time."""

from __future__ import annotations

from trainpipes.rows.run import Run
from trainpipes.stages.column_function import ColumnFunction

__all__ = ["MapBatches"]


class MapBatches(ColumnFunction):
    """Applies a function to the columns of many rows at once.

    In: rows with named columns. Out: as many rows, with the columns that the function returns and no
    others; ``with_columns`` keeps those that were there.
    How many rows come at a time is not fixed and may differ between two runs, so the function
    treats each row by itself. Cursor: none of its own. Costs what the function costs.

    Args:
        fn: function of columns. With ``format="arrow"`` of a ``pyarrow.Table``, returning one (or
            a dict of arrays); with "numpy" or "torch" of a dict of arrays or tensors
            ``[rows, ...]``, returning such a dict. Ragged columns come as object arrays of arrays
            in "numpy", and as lists of tensors in "torch"; nulls of floats as NaN. An array
            ``[rows, n, ...]`` that it returns is one of fixed-size lists, whose rows are arrays.
            A DataError that it raises with ``row=n`` is about the n-th of the rows that it was given.
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

    def process(self, run: Run) -> Run:
        return run.with_block(run.block.with_data(self.returned(run)))
