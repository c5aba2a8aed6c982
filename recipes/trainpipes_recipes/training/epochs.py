"""Batches for as many steps as a run has left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainpipes import Loader
from trainpipes_recipes.training.ranks import Rank

__all__ = ["batches"]


def batches(loader: Loader, rank: Rank, steps: int) -> Iterator[Any]:
    """Batches on the device, epoch after epoch; each epoch has another order.

    The loader stands after the last batch that was given, so that its state can be saved at any step.

    Args:
        loader: of the batches.
        rank: this process.
        steps: how many to give; none if there are none left to do.
    """
    given = 0
    while given < steps:
        before = given
        for batch in loader:
            given += 1
            yield rank.move(batch)
            if given == steps:
                return
        if given == before:
            raise SystemExit(
                "an epoch has no batch: give --batch-size that is at most the rows of each rank"
            )
