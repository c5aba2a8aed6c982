"""Where the sequences of a packed batch start, as attention over variable lengths takes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def add_sequences(batch: dict[str, Any]) -> None:
    """Add ``cu_seqlens`` and ``max_seqlen`` to a batch that has ``segment_ids``, ``[B, L]``.

    They are about its tokens as one sequence of B * L (``batch["input_ids"].view(-1)``), in which each
    document, and the padding at a row's end, is a sequence of its own:

    - cu_seqlens: first token of each, and B * L; int32 ``[sequences + 1]``
    - max_seqlen: tokens of the longest, an int

    >>> batch = {"segment_ids": torch.tensor([[1, 1, 2, 0], [1, 1, 1, 1]])}
    >>> add_sequences(batch)
    >>> batch["cu_seqlens"], batch["max_seqlen"]
    (tensor([0, 2, 3, 4, 8], dtype=torch.int32), 4)
    """
    segments = batch["segment_ids"].numpy()
    first = np.ones(segments.shape, dtype=np.bool_)
    np.not_equal(segments[:, 1:], segments[:, :-1], out=first[:, 1:])
    edges = np.append(np.flatnonzero(first), segments.size).astype(np.int32)
    batch["cu_seqlens"] = torch.from_numpy(edges)
    batch["max_seqlen"] = int(np.diff(edges).max(initial=0))
