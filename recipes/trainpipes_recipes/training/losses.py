"""Losses of token and class scores: the mean over what is learnt, 0 where nothing is.

>>> scores, labels = torch.zeros(1, 3, 4), torch.tensor([[-100, 2, -100]])
>>> token_loss(scores, labels).exp()  # one label, four tokens that are as likely
tensor(4.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["IGNORED", "class_loss", "next_token_loss", "token_loss"]

#: The label of what is not learnt, in torch and in transformers.
IGNORED = -100


def token_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the token at each position: of masked tokens, of an encoder-decoder's response.

    Args:
        scores: ``[B, L, V]``.
        labels: ``[B, L]``, -100 where nothing is learnt.
    """
    learnt = labels != IGNORED
    total = F.cross_entropy(scores[learnt].float(), labels[learnt], reduction="sum")
    return total / learnt.sum().clamp(min=1)


def next_token_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the token after each position: of a causal model.

    Args:
        scores: ``[B, L, V]``; those of position t are compared with the label of t + 1.
        labels: ``[B, L]``, each at the place of the token that it is; -100 where nothing is learnt.
    """
    return token_loss(scores[:, :-1], labels[:, 1:])


def class_loss(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of the class of each row.

    Args:
        scores: ``[B, C]``.
        labels: ``[B]``, -100 where nothing is learnt.
        weights: ``[C]``, what a row of each class counts for; all the same if left out.
    """
    learnt = labels != IGNORED
    weights = torch.ones_like(scores[0]) if weights is None else weights.to(scores)
    total = F.cross_entropy(scores[learnt], labels[learnt], weights, reduction="sum")
    counted = weights[labels[learnt]].sum()
    return total / torch.where(counted > 0, counted, 1)
