"""A small transformer to try things on: put your own model in its place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Attention", "Block", "Classifier", "Transformer"]


class Transformer(nn.Module):
    """Scores of tokens for each position: pre-norm, learnt positions, tied embeddings, no dropout.

    Args:
        vocabulary: V, token ids.
        max_length: positions; rows may be shorter.
        width: D, size of a position's vector.
        layers: blocks.
        heads: attention heads of each block.
        causal: whether a position sees those before it only; False for masked tokens and classes.
    """

    def __init__(
        self,
        vocabulary: int,
        max_length: int,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        *,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(
        self,
        input_ids: Tensor,
        segments: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """``[B, L]`` ids to ``[B, L, V]`` scores of tokens (logits).

        Args:
            input_ids: ``[B, L]``.
            segments: ``[B, L]``; a position sees those of its own number only: ``attention_mask``, or
                the ``segment_ids`` of packed rows. A causal model needs none where padding comes last.
            position_ids: ``[B, L]``; 0, 1, 2, … if left out.
        """
        return self.vectors(input_ids, segments, position_ids) @ self.tokens.weight.T

    def vectors(
        self,
        input_ids: Tensor,
        segments: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """``[B, L]`` ids to ``[B, L, D]`` vectors, before the scores."""
        length = input_ids.shape[1]
        places = (
            self.positions.weight[:length] if position_ids is None else self.positions(position_ids)
        )
        x = self.tokens(input_ids) + places
        seen = None
        if segments is not None:
            seen = segments[:, :, None] == segments[:, None, :]  # [B, L, L]
            if self.causal:
                seen = seen & torch.ones_like(seen[0]).tril()
        for block in self.blocks:
            x = block(x, seen, causal=self.causal and seen is None)
        out: Tensor = self.norm(x)
        return out


class Classifier(nn.Module):
    """Scores of classes for each row: the mean vector of its tokens, then a linear layer.

    Args:
        vocabulary: V, token ids.
        classes: C.
        max_length: positions; rows may be shorter.
        width: D, size of a position's vector.
        layers: blocks.
        heads: attention heads of each block.
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        max_length: int,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.body = Transformer(vocabulary, max_length, width, layers, heads, causal=False)
        self.scores = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """``[B, L]`` ids, and 1 where they are no padding, to ``[B, C]`` scores of classes."""
        tokens = attention_mask[:, :, None]
        x = self.body.vectors(input_ids, attention_mask) * tokens
        out: Tensor = self.scores(x.sum(1) / tokens.sum(1).clamp(min=1))
        return out


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to its input.

    Args:
        width: D, size of a position's vector.
        heads: attention heads.
        of_others: whether it also attends to the vectors of an encoder.
    """

    def __init__(self, width: int, heads: int, *, of_others: bool = False) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.before_others = nn.LayerNorm(width) if of_others else None
        self.others = Attention(width, heads) if of_others else None
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(
        self,
        x: Tensor,
        seen: Tensor | None = None,
        *,
        causal: bool = False,
        others: Tensor | None = None,
        others_seen: Tensor | None = None,
    ) -> Tensor:
        """``[B, L, D]`` vectors to as many new ones. ``seen`` ``[B, L, L]`` is True where a position
        sees another; ``others`` ``[B, M, D]`` are the encoder's, seen where ``[B, L, M]`` says."""
        normed = self.before_attention(x)
        x = x + self.attention(normed, normed, seen, causal)
        if self.others is not None and self.before_others is not None:
            x = x + self.others(self.before_others(x), others, others_seen)
        out: Tensor = x + self.perceptron(x)
        return out


class Attention(nn.Module):
    """Multi-head attention of ``x`` ``[B, L, D]`` to ``others`` ``[B, M, D]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Linear(width, width)
        self.keys_values = nn.Linear(width, 2 * width)
        self.mixed = nn.Linear(width, width)

    def forward(
        self, x: Tensor, others: Tensor, seen: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        B, L, D = x.shape
        q = self.queries(x).view(B, L, self.heads, -1).transpose(1, 2)  # [B, heads, L, D / heads]
        k, v = (
            self.keys_values(others)
            .view(B, others.shape[1], 2, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        mask = None if seen is None else seen[:, None]
        attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        out: Tensor = self.mixed(attended.transpose(1, 2).reshape(B, L, D))
        return out
