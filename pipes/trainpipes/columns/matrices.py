"""Columns of one type that lie side by side in memory, as one array ``[columns, rows]``.

A table of hundreds of columns is gathered and cast by a few calls on such arrays: a call for each
column takes longer than its values do. ``Joining`` lays columns so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.lib.stride_tricks import as_strided

from trainpipes._internal.types import IntArray
from trainpipes.columns.arrays import Array, is_number, once_for_each, to_numpy

#: Columns of one type from which it is worth it.
LEAST_COLUMNS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Columns of a table, at ``places`` in it. ``spaced`` ``[columns, items]`` is their memory, each up to
    the next one: the first ``rows`` items are a column's values, and nothing else may be read.
    """

    kind: pa.DataType
    places: tuple[int, ...]
    spaced: Array
    rows: int

    def gathered(self, index: IntArray | None) -> Array:
        """The rows at ``index``, ``[columns, rows]``, or all if None; a view where they follow each other."""
        if index is None:
            return self.spaced[:, : self.rows]
        start, count = int(index[0]) if len(index) else 0, len(index)
        if (index == np.arange(start, start + count)).all():
            return self.spaced[:, start : start + count]
        return self.spaced.take(index, axis=1)  # NumPy first copies what is not contiguous


def matrix_kinds(schema: pa.Schema) -> dict[pa.DataType, list[int]]:
    """Types of numbers that many columns have, with the columns' places."""
    if len(schema) < LEAST_COLUMNS:
        return {}
    places: dict[pa.DataType, list[int]] = defaultdict(list)
    for place, kind in enumerate(schema.types):
        places[kind].append(place)
    many = {kind: of_kind for kind, of_kind in places.items() if len(of_kind) >= LEAST_COLUMNS}
    return {
        kind: of_kind for kind, of_kind in many.items() if is_number(kind) and kind != pa.bool_()
    }


def matrices(table: pa.Table) -> tuple[Matrix, ...]:
    """What lies side by side in a table: columns without nulls, evenly spaced in memory. Hold the table as
    long as these are used.
    """
    if table.num_columns < LEAST_COLUMNS or not len(table):
        return ()
    return _of_table(table)


@once_for_each
def _of_table(table: pa.Table) -> tuple[Matrix, ...]:
    return tuple(_found(table))


def _found(table: pa.Table) -> Iterator[Matrix]:
    for kind, places in matrix_kinds(table.schema).items():
        columns = [table.column(place) for place in places]
        arrays = [
            column.chunk(0) if column.num_chunks == 1 and not column.null_count else None
            for column in columns
        ]
        width = kind.bit_width // 8
        begins = [
            -1 if array is None else array.buffers()[1].address + array.offset * width
            for array in arrays
        ]
        start = 0
        for stop in _evenly_spaced(begins, len(table) * width):
            step = 0 if stop == start + 1 else begins[start + 1] - begins[start]
            if stop - start >= LEAST_COLUMNS and step % width == 0:
                shape = stop - start, step // width
                first = to_numpy(arrays[start])
                spaced = as_strided(first, shape, (step, width), writeable=False)
                yield Matrix(kind, tuple(places[start:stop]), spaced, len(table))
            start = stop


def _evenly_spaced(begins: list[int], least: int) -> Iterator[int]:
    """Where each stretch of columns ends that begin evenly spaced, at least so many bytes apart.

    >>> list(_evenly_spaced([0, 8, 16, 40, 48, -1, 64], 8))
    [3, 5, 6, 7]
    """
    start = 0
    for place in range(1, len(begins)):
        step = begins[place] - begins[place - 1]
        even = place == start + 1 or step == begins[start + 1] - begins[start]
        if not even or step < least or begins[place - 1] < 0:
            yield place
            start = place
    yield len(begins)
