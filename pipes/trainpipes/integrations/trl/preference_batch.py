"""Batches of the recipe ``preference`` as TRL's trainers have them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import pad

__all__ = ["preference_batch"]

SIDES = ("chosen", "rejected")


def preference_batch(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The chosen responses and after them the rejected ones, padded to one length L:

        input_ids        [2 B, L]
        attention_mask   [2 B, L]  1 where there is a token
        completion_mask  [2 B, L]  1 on the response and its end

    Args:
        batch: ``chosen_input_ids``, ``chosen_attention_mask``, ``chosen_labels``, of B rows, and the same of
            ``rejected``.

    >>> sides = {"chosen": 3, "rejected": 2}
    >>> names = ["input_ids", "attention_mask", "labels"]
    >>> one = {f"{s}_{n}": torch.ones(1, sides[s], dtype=torch.int64) for s in sides for n in names}
    >>> preference_batch(one)["attention_mask"].tolist()
    [[1, 1, 1], [1, 1, 0]]
    """
    length = max(batch[f"{side}_input_ids"].shape[1] for side in SIDES)

    def both(name: str, filler: int) -> torch.Tensor:
        parts = [batch[f"{side}_{name}"] for side in SIDES]
        return torch.cat([pad(part, (0, length - part.shape[1]), value=filler) for part in parts])

    return {
        "input_ids": both("input_ids", 0),
        "attention_mask": both("attention_mask", 0),
        "completion_mask": (both("labels", -100) != -100).long(),
    }
