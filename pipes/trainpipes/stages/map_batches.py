"""``map_batches``: a function on whole columns, of any number of rows at a time."""

from __future__ import annotations

from trainpipes.columns.run import Run
from trainpipes.stages.column_function import ColumnFunction


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
            in "numpy", and as lists of tensors in "torch"; nulls of floats as NaN. A returned array
            ``[rows, n, ...]`` becomes a column of fixed-size lists, whose rows are arrays.
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
    >>> list(pipe.map_batches(lambda c: {"y": c["x"] * 2}, format="numpy"))
    [{'y': 2}, {'y': 4}]
    """

    def process(self, run: Run) -> Run:
        return run.with_block(run.block.with_data(self.returned(run)))
