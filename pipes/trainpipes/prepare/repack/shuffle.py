"""The arithmetic of a shuffle on disk, and its two passes over Arrow tables.

Places in the result are cut into buckets that fit into memory. Scatter writes a part of the input bucket by
bucket; gather sorts the rows of a bucket. Where its reads would be small, scatter writes groups of buckets,
which a pass in between takes apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import isqrt

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import gathered, one_chunk, to_arrow, to_numpy
from trainpipes.engine.layout import IntArray

#: The last column of rows between the passes: where each goes.
PLACE = "place"


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
    """Where groups of buckets begin, and the end: as many groups as each has buckets."""
    count = len(buckets) - 1
    groups = max(1, isqrt(count))
    if size >= least * parts * count or 2 * reads(parts, count, groups) > reads(
        parts, count, count
    ):
        return buckets
    return np.append(buckets[:-1][:: -(-count // groups)], buckets[-1])


def inner_edges(first: int, stop: int, files: IntArray, units: float) -> IntArray:
    """How a group is cut into buckets: where files begin, and evenly."""
    within = files[np.searchsorted(files, first, "right") : np.searchsorted(files, stop)]
    rows = stop - first if units < 1.5 else int((stop - first) / units) + 1
    return bucket_edges(np.concatenate([[first], within, [stop]]), rows)


def reads(parts: int, buckets: int, groups: int) -> int:
    """Reads of temporary files, about.

    >>> reads(1000, 900, 900), reads(1000, 900, 30)
    (900000, 60600)
    """
    if groups == buckets:
        return parts * buckets
    return parts * groups + -(-parts // groups) * buckets


def scatter(tables: list[pa.Table], places: IntArray, edges: IntArray) -> Iterator[pa.Table]:
    """Rows by their places (a last column), bucket by bucket; negative ones go. Empties ``tables``."""
    order = np.argsort(places, kind="stable")
    order = order[int(np.count_nonzero(places < 0)) :]
    places = places[order]
    table = _taken(tables, order).append_column(PLACE, to_arrow(places))
    for start, stop in pairwise(np.searchsorted(places, edges).tolist()):
        yield table.slice(start, stop - start)


def gather(tables: list[pa.Table], first: int, stop: int) -> pa.Table | None:
    """The rows of a bucket in order; None where they are not all there, once. Empties ``tables``."""
    places = drop_places(tables)
    order = np.argsort(places, kind="stable")
    if not np.array_equal(places[order], np.arange(first, stop)):
        return None
    return _taken(tables, order)


def drop_places(tables: list[pa.Table]) -> IntArray:
    places = []
    for number, table in enumerate(tables):
        last = table.num_columns - 1
        places.append(to_numpy(table.column(last)))
        tables[number] = table.remove_column(last)
    return np.concatenate(places)


def _taken(tables: list[pa.Table], order: IntArray) -> pa.Table:
    schema = tables[0].schema
    chunks = [[c for table in tables for c in table.column(n).chunks] for n in range(len(schema))]
    tables.clear()
    columns = []
    for number, kind in enumerate(schema.types):
        column = one_chunk(pa.chunked_array(chunks[number], kind))
        chunks[number] = []
        columns.append(gathered(column, order))
        del column
    return pa.Table.from_arrays(columns, schema=schema)


def groups_of(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    held: list[pa.Table] = []
    count = 0
    for table in tables:
        start = 0
        while start < len(table):
            held.append(table.slice(start, rows - count))
            start, count = start + len(held[-1]), count + len(held[-1])
            if count == rows:
                yield pa.concat_tables(held).combine_chunks()
                held, count = [], 0
        if held:  # a copy: a slice would keep all of the table in memory
            held[-1] = gathered(held[-1], np.arange(len(held[-1])))
        del table  # before the next rows are read
    if held:
        yield pa.concat_tables(held).combine_chunks()
