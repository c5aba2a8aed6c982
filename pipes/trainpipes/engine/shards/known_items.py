"""Items with the numbers of their rows, for those who ask which rows a batch is made of."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any, NamedTuple

import numpy as np

from trainpipes.columns.lazy_batches import LazyBatches
from trainpipes.columns.pieces import Pieces
from trainpipes.columns.run import Run
from trainpipes.engine.layout import IntArray


class ItemRows(NamedTuple):
    """The rows of one item.

    Args:
        ids: number of each in file order over all files, int64 ``[rows]``.
        epochs: in which each is read, int64 ``[rows]``.
        pieces: what they are made of, where they are packed.
    """

    ids: IntArray
    epochs: IntArray
    pieces: Pieces | None


class KnownItem(NamedTuple):
    """An item, and which rows it is made of."""

    item: Any
    rows: ItemRows


def known_items(run: Run) -> MutableSequence[Any]:
    """A run's items as ``Run.unroll`` gives them, each with its rows: what is made when it is taken is so
    here, too."""
    items, block, bounds = run.unroll(), run.block, run.bounds
    count = len(items)
    if bounds is None:
        bounds = np.arange(count + 1, dtype=np.int64)
    epochs = np.broadcast_to(np.asarray(block.epoch, dtype=np.int64), len(block))
    ids, made_of = block.ids, block.made_of

    def known(k: int) -> KnownItem:
        rows = slice(int(bounds[k]), int(bounds[k + 1]))
        pieces = None if made_of is None else made_of.at(rows)
        found = KnownItem(items[k], ItemRows(ids[rows], epochs[rows], pieces))
        items[k] = None  # held once
        return found

    if isinstance(items, LazyBatches):
        return LazyBatches(known, count)
    return [known(k) for k in range(count)]
