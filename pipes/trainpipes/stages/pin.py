"""``pin``: batches in page-locked memory, for fast copies to an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from trainpipes.runtime.kinds import PlaceStage
from trainpipes.runtime.warn_once import warn_once

__all__ = ["Pin"]


class Pin(PlaceStage):
    """Puts the tensors of each batch in page-locked memory.

    In and out: batches of any nesting of dicts, lists and tuples. Carried out by the process that
    trains; workers of a plain ``DataLoader`` pass it over with one notice (use its ``pin_memory``).
    Without an accelerator it does nothing, with one notice. Cursor: none. Costs one copy.
    """

    def place(self, item: Any) -> Any:
        """The batch with its tensors pinned."""
        if not torch.accelerator.is_available():
            warn_once("pin() does nothing here: there is no accelerator to copy to")
            return item
        return tree_map(lambda x: x.pin_memory() if isinstance(x, torch.Tensor) else x, item)
