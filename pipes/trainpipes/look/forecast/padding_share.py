"""How much of micro-batches is padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PaddingShare", "padding_share"]


@dataclass(frozen=True)
class PaddingShare:
    """Cells of micro-batches, and how many of them are padding.

    Attributes:
        batches: micro-batches that were counted.
        cells: B * L, over all of them.
        padding: of these, those that hold no token.
        lengths: of each micro-batch, the tokens of its rows, int64 ``[B]``.
        widths: of each micro-batch, L.
    """

    batches: int
    cells: int
    padding: int
    lengths: tuple[IntArray, ...] = field(default=(), repr=False, compare=False)
    widths: tuple[int, ...] = field(default=(), repr=False, compare=False)

    @property
    def share(self) -> float:
        """Padding as part of all cells, 0 to 1."""
        return self.padding / self.cells if self.cells else 0.0

    def __str__(self) -> str:
        many = "es" * (self.batches != 1)
        return f"{self.share:.2%} of {self.cells:,} cells in {self.batches:,} micro-batch{many}"

    __repr__ = __str__

    def plot(self, ax: Axes | None = None) -> Figure:
        """Draw the rows of micro-batches, their tokens and their padding: up to 24 micro-batches, evenly
        taken. A Matplotlib figure, to ``savefig``.

        Args:
            ax: axes to draw on; a new figure's if left out.

        Raises:
            MissingExtraError: Matplotlib is not installed.
        """
        from trainpipes.look.pictures.padding import draw

        return draw(self, ax)


def padding_share(batches: Iterable[Any], mask: str | None = None) -> PaddingShare:
    """Count the padding of micro-batches.

    Args:
        batches: dicts of tensors.
        mask: the tensor ``[B, L]`` that is 0 on padding, and nowhere else; if left out, "segment_ids" or
            "attention_mask".

    Raises:
        ConfigError: a micro-batch has no such tensor.

    >>> print(padding_share([{"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}]))
    33.33% of 6 cells in 1 micro-batch
    """
    count = cells = padding = 0
    lengths, widths = [], []
    for batch in batches:
        names = ("segment_ids", "attention_mask") if mask is None else (mask,)
        there = batch if isinstance(batch, Mapping) else {}
        real = next((there[n] for n in names if isinstance(there.get(n), torch.Tensor)), None)
        if real is None:
            raise ConfigError(
                f"padding is counted by a mask, {' or '.join(map(repr, names))}, got "
                f"{f'a dict of {list(batch)}' if there else type(batch).__name__}; pad_collate() makes "
                "one, and mask=... says its name"
            )
        count += 1
        held = torch.count_nonzero(real, dim=-1).reshape(-1).cpu()
        lengths.append(np.array(held.tolist(), dtype=np.int64))
        widths.append(real.shape[-1])
        cells += real.numel()
        padding += real.numel() - int(held.sum())
    return PaddingShare(count, cells, padding, tuple(lengths), tuple(widths))
