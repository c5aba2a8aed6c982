"""Columns of micro-batches, written when a micro-batch is made."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from trainpipes.rectangles import Rectangles
from trainpipes.runtime.rows.late_items import late_if_small
from trainpipes.stages.varlen import add_sequences

__all__ = [
    "EvenWriter",
    "ObjectWriter",
    "RaggedWriter",
    "SequencesWriter",
    "Writer",
    "late_batches",
]


class Writer(Protocol):
    """A column of all micro-batches of a run."""

    @property
    def nbytes(self) -> int:
        """Bytes of what is written, over all micro-batches."""
        ...

    def write(self, batch: dict[str, Any], k: int) -> None:
        """Put the column into micro-batch ``k``."""
        ...


def late_batches(writers: Sequence[Writer], count: int) -> MutableSequence[Any]:
    """Micro-batches of these columns; small ones are made when they are taken."""

    def make(k: int) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for writer in writers:
            writer.write(batch, k)
        return batch

    return late_if_small(make, count, sum(writer.nbytes for writer in writers))


class RaggedWriter:
    """Lists of numbers, padded."""

    def __init__(self, name: str, rectangles: Rectangles, mask: str | None) -> None:
        self._name, self._rectangles, self._mask = name, rectangles, mask

    @property
    def nbytes(self) -> int:
        return self._rectangles.nbytes

    def write(self, batch: dict[str, Any], k: int) -> None:
        cells, real = self._rectangles[k]
        batch[self._name] = torch.from_numpy(cells)
        if self._mask is not None and real is not None:
            batch[self._mask] = torch.from_numpy(real)


class EvenWriter:
    """Numbers, or arrays of one shape."""

    def __init__(self, name: str, values: Any, dtype: np.dtype[Any], edges: list[int]) -> None:
        self._name, self._values, self._dtype, self._edges = name, values, dtype, edges

    @property
    def nbytes(self) -> int:
        return int(self._values.size) * self._dtype.itemsize

    def write(self, batch: dict[str, Any], k: int) -> None:
        some = self._values[self._edges[k] : self._edges[k + 1]]
        batch[self._name] = torch.from_numpy(np.array(some, dtype=self._dtype, order="C"))


class ObjectWriter:
    """Anything else: a list."""

    nbytes = 0

    def __init__(self, name: str, objects: list[Any], edges: list[int]) -> None:
        self._name, self._objects, self._edges = name, objects, edges

    def write(self, batch: dict[str, Any], k: int) -> None:
        batch[self._name] = self._objects[self._edges[k] : self._edges[k + 1]]


class SequencesWriter:
    """Where the documents of packed rows start."""

    nbytes = 0

    def write(self, batch: dict[str, Any], k: int) -> None:
        add_sequences(batch)
