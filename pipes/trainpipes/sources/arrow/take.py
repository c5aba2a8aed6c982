"""Rows of a table in several chunks, by their numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from trainpipes.columns.gathered import gathered
from trainpipes.engine.layout import IntArray


def take_rows(
    take: Callable[[int, IntArray], pa.RecordBatch], firsts: IntArray, index: IntArray
) -> pa.Table:
    """The rows at ``index``, of one row or more.

    ``ChunkedArray.take`` may copy the whole column; a chunk's own takes what is asked.

    Args:
        take: gives rows of a chunk by the chunk's number and theirs in it.
        firsts: the number of each chunk's first row, and the number of rows, int64 ``[chunks + 1]``.
        index: numbers of rows, int64, in any order, with repeats.
    """
    which = np.searchsorted(firsts, index, side="right") - 1
    order = np.argsort(which, kind="stable")
    found, edges = np.unique(which[order], return_index=True)
    parts = []
    for number, places in zip(found.tolist(), np.split(order, edges[1:]), strict=True):
        parts.append(pa.Table.from_batches([take(number, index[places] - firsts[number])]))
    if len(parts) == 1:  # the one sort was stable, so that rows stand as they were asked for
        return parts[0]
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return gathered(pa.concat_tables(parts).combine_chunks(), back)
