"""Rows of narrow token ids, made wide where a micro-batch is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.layout import IntArray
from trainpipes.sources.memmap.manifest import Array


class TokenRows(TensorRows):
    """Rows of "input_ids", and with them of "labels", the tokens after them: int64 ``[rows, length]`` for
    whoever looks, and as narrow as in their file until then. ``tensors`` makes all rows wide each time that
    it is asked for, ``part`` those that are asked for.

    Args:
        packed: ids in their file's dtype, ``[rows, length]``, of rows with labels ``[rows, length + 1]``.
        labels: whether a row has the tokens after it.
    """

    packed: Array
    labels: bool

    def __init__(self, packed: Array, labels: bool) -> None:
        vars(self).update(packed=packed, labels=labels)
        vars(self).update(names=("input_ids", "labels") if labels else ("input_ids",))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.part(0, len(self))

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def nbytes(self) -> int:
        length = int(self.packed.shape[1]) - self.labels
        return len(self) * length * (1 + self.labels) * 8

    def take(self, index: IntArray) -> TensorRows:
        return TokenRows(self.packed[index], self.labels)

    def slice(self, start: int, stop: int) -> TensorRows:
        return TokenRows(self.packed[start:stop], self.labels)

    def joined(self, others: Sequence[TensorRows]) -> TensorRows:
        alike = [
            part.packed
            for part in others
            if isinstance(part, TokenRows) and part.labels == self.labels
        ]
        if len(alike) < len(others) or any(one.dtype != self.packed.dtype for one in alike):
            return super().joined(others)
        return TokenRows(np.concatenate([self.packed, *alike]), self.labels)

    def part(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        rows: Any = self.packed[start:stop]
        if not self.labels:
            return (torch.from_numpy(rows.astype(np.int64, order="C")),)
        return tuple(
            torch.from_numpy(part.astype(np.int64, order="C"))
            for part in (rows[:, :-1], rows[:, 1:])
        )
