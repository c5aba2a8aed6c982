"""Rows that are dealt before it is known which of them are left.

A cache puts holes in their places, and a stage above the dealing closes them. Owns nothing; called by any
thread.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import to_arrow, to_numpy
from trainpipes.columns.run import Run
from trainpipes.engine.layout import IntArray
from trainpipes.kinds.stage_kinds import RunStage

#: A column of ours: whether a row is there.
THERE = "trainpipes:there"


class DropHoles(RunStage):
    """Leaves out the rows that a stage below the cache has dropped.

    Where rows are dealt before a condition is asked of them, they are counted as they stand in the files:
    so a cache of what it lets through has holes until then.
    """

    keeps_rows = False

    def process(self, run: Run) -> Run:
        data = run.block.data
        assert isinstance(data, pa.Table)
        if (
            THERE not in data.column_names
        ):  # the first rows, read past the cache to find their types
            return run
        there = np.flatnonzero(to_numpy(data.column(THERE)))
        block = run.block.with_data(data.drop_columns(THERE))
        if len(there) == len(run):
            return run.with_block(block)
        kept = run.pick(there.astype(np.int64))
        assert isinstance(kept.block.data, pa.Table)
        return kept.with_block(kept.block.with_data(kept.block.data.drop_columns(THERE)))


def with_holes(table: pa.Table, places: IntArray, rows: int) -> pa.Table:
    """``rows`` rows, of which those at ``places`` are the table's and all others null, and a column that
    says so."""
    found = np.full(rows, -1, dtype=np.int64)
    found[places] = np.arange(len(places))
    there = to_arrow(found >= 0)
    if not table.num_columns:
        return pa.table({THERE: there})
    return table.take(to_arrow(found, found < 0)).append_column(THERE, there)
