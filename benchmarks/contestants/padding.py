"""What every contestant without padding of its own does with the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

__all__ = ["Batch", "padded", "padded_flat"]

#: "input_ids" and "attention_mask", int64 ``[B, L]``.
Batch = dict[str, torch.Tensor]


def padded(rows: Sequence[torch.Tensor]) -> Batch:
    """Pad rows of token ids by ``pad_sequence``, as collate functions do."""
    ids = pad_sequence(list(rows), batch_first=True).long()
    lengths = torch.tensor([len(row) for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long(),
    }


def padded_flat(values: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> Batch:
    """Pad rows that lie one after the other, without a loop over them."""
    lengths = np.diff(offsets)
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(mask.shape, dtype=np.int64)
    ids[mask] = values[offsets[0] : offsets[-1]]
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
    }
