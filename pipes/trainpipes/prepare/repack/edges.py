"""The arithmetic of a shuffle on disk.

Places in the result are cut into buckets that fit into memory. Scatter writes a part of the input bucket by
bucket; gather sorts the rows of a bucket. Where its reads would be small, scatter writes groups of buckets,
which a pass in between takes apart.
"""

from __future__ import annotations

from itertools import pairwise
from math import isqrt

import numpy as np

from trainpipes.engine.layout import IntArray

#: Pieces that are read one by one, however small they are.
FEW = 64


def part_edges(rows: int, part_rows: int, blocks: IntArray | None) -> IntArray:
    """The first row of each part of the input, where a block begins if possible, and the end."""
    firsts = _even(0, rows, -(-rows // max(1, part_rows)))[:-1]
    if blocks is not None and blocks.sum() == rows:
        edges = np.concatenate([[0], np.cumsum(blocks)])
        block = np.searchsorted(edges, firsts, side="right") - 1
        small = np.diff(edges)[block] <= part_rows
        firsts = np.unique(np.where(small, edges[block], firsts))
    return np.append(firsts, rows)


def bucket_edges(edges: IntArray, bucket_rows: int) -> IntArray:
    """Where buckets begin, each between two edges, and the end.

    >>> bucket_edges(np.array([0, 4, 11]), 3).tolist()
    [0, 2, 4, 6, 8, 11]
    """
    cut = [_even(a, b, -(-(b - a) // bucket_rows))[:-1] for a, b in pairwise(edges.tolist())]
    return np.append(np.concatenate(cut), edges[-1])


def _even(start: int, stop: int, count: int) -> IntArray:
    return start + np.arange(count + 1, dtype=np.int64) * (stop - start) // max(1, count)


def group_edges(buckets: IntArray, parts: int, size: float, least: int) -> IntArray:
    """Where groups of buckets begin, and the end: as many groups as each has buckets, where each of so many
    parts, of that size together, would hold less than the least of a bucket.
    """
    count = len(buckets) - 1
    if parts * count <= FEW or size >= least * parts * count:
        return buckets
    return np.append(buckets[:-1][:: -(-count // isqrt(count))], buckets[-1])


def inner_edges(first: int, stop: int, files: IntArray, units: float) -> IntArray:
    """How a group is cut into buckets: where files begin, and evenly."""
    within = files[np.searchsorted(files, first, "right") : np.searchsorted(files, stop)]
    rows = stop - first if units < 1.5 else int((stop - first) / units) + 1
    return bucket_edges(np.concatenate([[first], within, [stop]]), rows)
