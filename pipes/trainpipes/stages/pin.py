"""``pin``: batches in page-locked memory, for fast copies to an accelerator."""

from __future__ import annotations

from typing import Any

import torch

from trainpipes._internal.messages import warn_once
from trainpipes.kinds.stage_kinds import PlaceStage
from trainpipes.stages.nested import map_tensors


class Pin(PlaceStage):
    """Puts the tensors of each batch in page-locked memory.

    In and out: batches of any nesting of mappings, lists, tuples and dataclasses; objects with a
    ``pin_memory`` method are pinned by it. Tensors that are on a device, or sparse, stay as they are. The
    process that trains does it; workers of a plain ``DataLoader`` skip it with one warning (use its
    ``pin_memory``). Without an accelerator, and on MPS, which shares the CPU's memory, it does nothing, with
    one warning. Cursor: none. Costs one copy. Memory: torch keeps pinned memory to use it again, and rounds
    each tensor's size up to a power of two.
    """

    def place(self, item: Any) -> Any:
        """The batch with its tensors pinned."""
        if not torch.accelerator.is_available():
            warn_once("pin() does nothing here: there is no accelerator to copy to")
            return item
        if str(torch.accelerator.current_accelerator()) == "mps":
            warn_once("pin() does nothing here: MPS shares the CPU's memory")
            return item
        return map_tensors(item, _pinned)


def _pinned(one: Any) -> Any:
    if isinstance(one, torch.Tensor):
        dense = one.layout in (torch.strided, torch.jagged)
        return one.pin_memory() if dense and one.device.type == "cpu" else one
    if isinstance(one, type) or not callable(getattr(one, "pin_memory", None)):
        return None
    return one.pin_memory()
