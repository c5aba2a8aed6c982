"""Rows of several tensors that share their first dimension."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from trainpipes.columns.lazy_batches import late_if_small
from trainpipes.columns.lone_copy import copied, gathered
from trainpipes.engine.layout import IntArray


@dataclass(frozen=True)
class TensorRows:
    """Rows of several tensors that share their first dimension."""

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...] | None

    def __len__(self) -> int:
        return int(self.tensors[0].shape[0])

    def take(self, index: IntArray) -> TensorRows:
        return TensorRows(tuple(gathered(t, index) for t in self.tensors), self.names)

    def slice(self, start: int, stop: int) -> TensorRows:
        return TensorRows(tuple(t[start:stop] for t in self.tensors), self.names)

    def joined(self, others: Sequence[TensorRows]) -> TensorRows:
        """These rows and those of the others."""
        columns = zip(*(part.tensors for part in (self, *others)), strict=True)
        return TensorRows(tuple(torch.cat(column) for column in columns), self.names)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def part(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """The tensors of rows ``start`` to ``stop``, in memory that no other rows lie in."""
        return tuple(_part(tensor, start, stop) for tensor in self.tensors)

    def batch(self, start: int, stop: int) -> Any:
        """What ``default_collate`` makes of rows ``start`` to ``stop``."""
        parts = self.part(start, stop)
        return list(parts) if self.names is None else dict(zip(self.names, parts, strict=True))

    def rows(self) -> list[Any]:
        columns = zip(*self.tensors, strict=True)
        if self.names is None:
            return list(columns)
        return [dict(zip(self.names, row, strict=True)) for row in columns]


def _part(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Some rows: a copy, unless they are all that lies in the tensor's memory."""
    if stop - start == len(tensor) and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return copied(tensor[start:stop])


def batches_of(parts: Iterable[tuple[TensorRows, Sequence[int]]]) -> MutableSequence[Any]:
    """Batches of rows, each cut at its edges; none are copied to lie beside others."""
    nbytes = 0
    cuts: list[tuple[TensorRows, int, int]] = []
    for rows, edges in parts:
        nbytes += rows.nbytes
        cuts += [(rows, start, stop) for start, stop in pairwise(edges)]

    def make(k: int) -> Any:
        rows, start, stop = cuts[k]
        return rows.batch(start, stop)

    return late_if_small(make, len(cuts), nbytes)
