"""Rows of narrow token ids, made wide where a micro-batch is made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainpipes.order import IntArray
from trainpipes.runtime.rows.block import TensorRows
from trainpipes.sources.memmap_format import Array

__all__ = ["TokenRows"]


class TokenRows(TensorRows):
    """Rows of "input_ids", and with them of "labels", the tokens after them: int64 ``[rows, length]`` for
    whoever looks, and as narrow as in their file until then.

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
        return self.wide(0, len(self))

    def __len__(self) -> int:
        return len(self.packed)

    def take(self, index: IntArray) -> TensorRows:
        return TokenRows(self.packed[index], self.labels)

    def slice(self, start: int, stop: int) -> TensorRows:
        return TokenRows(self.packed[start:stop], self.labels)

    def wide(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """The tensors of some rows, in memory of their own."""
        rows: Any = self.packed[start:stop]
        if not self.labels:
            return (torch.from_numpy(rows.astype(np.int64, order="C")),)
        return tuple(
            torch.from_numpy(part.astype(np.int64, order="C"))
            for part in (rows[:, :-1], rows[:, 1:])
        )
