"""A small encoder-decoder to try things on: put your own model in its place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainpipes_recipes.training.model import Block, Transformer

__all__ = ["EncoderDecoder"]


class EncoderDecoder(nn.Module):
    """Scores of a response's tokens, given a prompt: one embedding for both, tied to the scores.

    Args:
        vocabulary: V, token ids.
        max_length: positions of the prompt, and of the response.
        width: D, size of a position's vector.
        layers: blocks of the encoder, and of the decoder.
        heads: attention heads of each block.
    """

    def __init__(
        self, vocabulary: int, max_length: int, width: int = 128, layers: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.encoder = Transformer(vocabulary, max_length, width, layers, heads, causal=False)
        self.start = nn.Parameter(torch.zeros(width))
        self.positions = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width, heads, of_others=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, input_ids: Tensor, input_mask: Tensor, target_ids: Tensor) -> Tensor:
        """Scores ``[B, M, V]`` of each token of the response, given the prompt and the tokens before it.

        Args:
            input_ids: ``[B, L]``, the prompt.
            input_mask: ``[B, L]``, 1 where it is no padding.
            target_ids: ``[B, M]``, the response; padding comes last, any id or -100.
        """
        prompt = self.encoder.vectors(input_ids, input_mask)
        # What position t sees of the response ends with token t - 1; the first sees a learnt vector.
        before = self.encoder.tokens(target_ids[:, :-1].clamp(min=0))
        start = self.start.expand(len(target_ids), 1, -1)
        x = torch.cat([start, before], dim=1) + self.positions.weight[: target_ids.shape[1]]
        seen = input_mask.bool()[:, None, :].expand(-1, target_ids.shape[1], -1)  # [B, M, L]
        seen = seen | ~seen.any(dim=-1, keepdim=True)  # of an empty prompt its padding
        for block in self.blocks:
            x = block(x, causal=True, others=prompt, others_seen=seen)
        out: Tensor = self.norm(x) @ self.encoder.tokens.weight.T
        return out
