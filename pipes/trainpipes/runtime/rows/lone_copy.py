"""Copies of tensors made by the thread that asks, and by no other.

torch divides a copy among threads of its own. Beside threads that each work on another batch, waking
those costs more than the copy: ten times as much on a busy machine of two cores.
"""

from __future__ import annotations

import numpy as np
import torch

from trainpipes.order import IntArray

__all__ = ["copied", "gathered", "is_plain"]

#: Numbers that NumPy does not have.
FOREIGN = {torch.bfloat16} | {
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.itemsize == 1 and dtype.is_floating_point
}


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy."""
    if not is_plain(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    return torch.from_numpy(np.array(tensor.numpy(), order="C"))


def gathered(tensor: torch.Tensor, index: IntArray) -> torch.Tensor:
    """The rows at ``index``, copied."""
    if not is_plain(tensor):
        return tensor.index_select(0, torch.from_numpy(np.ascontiguousarray(index)))
    return torch.from_numpy(tensor.numpy()[index])


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether NumPy knows such a tensor."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.requires_grad:
        return False
    return not tensor.dtype.is_complex and tensor.dtype not in FOREIGN
