"""Columns of many rows, of which micro-batches are cut, by the thread that takes one or makes it ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from trainpipes.columns.arrays import to_arrow
from trainpipes.columns.rectangles import RaggedRows
from trainpipes.engine.layout import IntArray
from trainpipes.stages.varlen import add_sequences

#: Puts a column into a micro-batch, given its number.
Write: TypeAlias = Callable[[dict[str, Any], int], None]


class Writer(Protocol):
    """A column of many rows."""

    @property
    def row_bytes(self) -> float:
        """Bytes that an average row takes in a micro-batch; inf where Python objects are made."""
        ...

    def writes(self, index: IntArray | None, bounds: IntArray) -> Write:
        """What puts the column into micro-batches of some rows.

        Args:
            index: the rows, int64 ``[rows]``; None for all.
            bounds: first of them in each micro-batch, and the end, int64 ``[batches + 1]``.
        """
        ...


class RaggedWriter:
    """Lists of numbers, padded."""

    def __init__(self, name: str, rows: RaggedRows, mask: str | None) -> None:
        self._name, self._rows, self._mask = name, rows, mask

    @property
    def row_bytes(self) -> float:
        return self._rows.average_bytes

    def writes(self, index: IntArray | None, bounds: IntArray) -> Write:
        rectangles, name, mask = self._rows.rectangles(index, bounds), self._name, self._mask

        def write(batch: dict[str, Any], k: int) -> None:
            cells, real = rectangles[k]
            batch[name] = torch.from_numpy(cells)
            if mask is not None and real is not None:
                batch[mask] = torch.from_numpy(real)

        return write


class EvenWriter:
    """Numbers, or arrays of one shape."""

    def __init__(self, name: str, values: Any, dtype: np.dtype[Any]) -> None:
        self._name, self._values, self._dtype = name, values, dtype

    @property
    def row_bytes(self) -> float:
        return float(np.prod(self._values.shape[1:], dtype=np.int64)) * self._dtype.itemsize

    def writes(self, index: IntArray | None, bounds: IntArray) -> Write:
        edges, name, dtype = bounds.tolist(), self._name, self._dtype
        small = self._values.ndim == 1
        values = self._values if index is None or not small else self._values[index]

        def write(batch: dict[str, Any], k: int) -> None:
            rows = slice(edges[k], edges[k + 1])
            some = values[rows] if index is None or small else values[index[rows]]
            batch[name] = torch.from_numpy(np.array(some, dtype=dtype, order="C"))

        return write


class ObjectWriter:
    """Anything else: a list."""

    row_bytes = float("inf")

    def __init__(self, name: str, objects: Sequence[Any] | pa.Array) -> None:
        self._name, self._objects = name, objects

    def writes(self, index: IntArray | None, bounds: IntArray) -> Write:
        edges, name, objects = bounds.tolist(), self._name, self._objects
        if isinstance(objects, pa.Array):
            some = objects if index is None else objects.take(to_arrow(index))
            objects = some.to_pylist()
        elif index is not None:
            objects = [objects[row] for row in index.tolist()]

        def write(batch: dict[str, Any], k: int) -> None:
            batch[name] = list(objects[edges[k] : edges[k + 1]])

        return write


class SequencesWriter:
    """Where the documents of packed rows start."""

    row_bytes = 0.0

    def writes(self, index: IntArray | None, bounds: IntArray) -> Write:
        return lambda batch, _: add_sequences(batch)
