"""What packed rows are made of: pieces of other rows. Any thread may ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trainpipes.engine.layout import IntArray

#: The length of a piece that is a row as it is, not packed.
WHOLE = -1


class Pieces(NamedTuple):
    """The pieces of some packed rows, row after row.

    Args:
        ids: number of the row that each is of, in file order over all files, int64 ``[pieces]``.
        epochs: in which that is read, int64 ``[pieces]``.
        starts: first token of each in its row, int64 ``[pieces]``.
        lengths: tokens of each, int64 ``[pieces]``; WHOLE for a row that is not packed.
        bounds: first piece of each packed row, and the end, int64 ``[rows + 1]``.
    """

    ids: IntArray
    epochs: IntArray
    starts: IntArray
    lengths: IntArray
    bounds: IntArray

    @staticmethod
    def whole(ids: IntArray, epoch: int | IntArray) -> Pieces:
        """Those of rows that are not packed: each is its own."""
        epochs = np.broadcast_to(np.asarray(epoch, dtype=np.int64), len(ids))
        bounds = np.arange(len(ids) + 1, dtype=np.int64)
        return Pieces(ids, epochs, np.zeros_like(ids), np.full_like(ids, WHOLE), bounds)

    def at(self, rows: IntArray | slice) -> Pieces:
        """Those of the packed rows at some places, in that order."""
        if isinstance(rows, slice):
            rows = np.arange(len(self.bounds) - 1, dtype=np.int64)[rows]
        counts = np.diff(self.bounds)[rows]
        ends = np.cumsum(counts)
        piece = np.repeat(self.bounds[:-1][rows] - (ends - counts), counts)
        piece += np.arange(len(piece))
        return Pieces(
            self.ids[piece], self.epochs[piece], self.starts[piece], self.lengths[piece],
            np.concatenate([[0], ends]).astype(np.int64),
        )  # fmt: skip

    @staticmethod
    def join(parts: Sequence[Pieces]) -> Pieces:
        """Those of all rows, part after part."""
        sizes = np.concatenate([np.diff(part.bounds) for part in parts])
        bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        ids, epochs, starts, lengths = (
            np.concatenate([part[n] for part in parts]) for n in range(4)
        )
        return Pieces(ids, epochs, starts, lengths, bounds)
