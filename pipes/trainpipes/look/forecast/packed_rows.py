"""What packed rows hold: their documents, and what is left empty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainpipes._internal.progress import counted
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PackedRows", "packed_rows"]


@dataclass(frozen=True)
class PackedRows:
    """The documents of packed rows.

    Attributes:
        rows: packed rows that were looked at.
        max_length: tokens of a row.
        documents: in all of them, where a document cut in two counts as two.
        empty: tokens that hold none.
        lengths: of each row, the tokens of its documents, int64 ``[documents]``.
    """

    rows: int
    max_length: int
    documents: int
    empty: int
    lengths: tuple[IntArray, ...] = field(repr=False, compare=False)

    @property
    def share(self) -> float:
        """What is empty, as part of all tokens, 0 to 1."""
        return self.empty / (self.rows * self.max_length) if self.rows else 0.0

    def __str__(self) -> str:
        many = "s" * (self.rows != 1)
        each = self.documents / max(1, self.rows)
        return (
            f"{self.rows:,} row{many} of {self.max_length:,} tokens: {self.share:.2%} empty, {each:.1f} "
            "documents in a row"
        )

    __repr__ = __str__

    def plot(self, ax: Axes | None = None) -> Figure:
        """Draw the rows with their documents and their empty ends: up to 100 of them. A Matplotlib
        figure, to ``savefig``.

        Args:
            ax: axes to draw on; a new figure's if left out.

        Raises:
            MissingExtraError: Matplotlib is not installed.
        """
        from trainpipes.look.pictures.packing import draw

        return draw(self, ax)


def packed_rows(items: Iterable[Any], most: int) -> PackedRows:
    """Look at packed rows.

    Args:
        items: rows, or micro-batches of them, that have "segment_ids".
        most: rows to look at.

    Raises:
        ConfigError: an item has none.
    """
    lengths: list[IntArray] = []
    width = 0
    for ids in counted(_rows(items), "looking at packed rows", most, "rows"):
        width = max(width, len(ids))
        counts = np.bincount(ids)[1:]
        lengths.append(counts[counts > 0].astype(np.int64))
        if len(lengths) == most:
            break
    held = sum(int(own.sum()) for own in lengths)
    documents = sum(map(len, lengths))
    return PackedRows(len(lengths), width, documents, len(lengths) * width - held, tuple(lengths))


def _rows(items: Iterable[Any]) -> Iterator[IntArray]:
    for item in items:
        found = item.get("segment_ids") if isinstance(item, Mapping) else None
        if found is None:
            raise ConfigError(
                "packing() looks at rows that pack() made, which have segment_ids; got "
                f"{f'a dict of {list(item)}' if isinstance(item, Mapping) else type(item).__name__}"
            )
        ids = found.cpu().tolist() if isinstance(found, torch.Tensor) else found
        rows = np.array(ids, dtype=np.int64)
        yield from rows if rows.ndim == 2 else [rows]
