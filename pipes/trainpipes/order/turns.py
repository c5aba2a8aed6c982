from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainpipes._internal.types import IntArray
from trainpipes.order.permutation import permutation, uniform

#: Turns whose ranks are a permutation: a buffer of any batches has of each part of the costs about as many.
STRATA = 32


def turn_order(
    costs: npt.NDArray[Any], first: int, strata: int, seed: int, *path: int | str
) -> IntArray:
    """Which batch a shard gives at each turn, int64 ``[batches]``, so that those of one step cost about the
    same.

    A shard's t-th batch of a pass is given at *turn* t, and the ranks of a step are at the same turn. For
    each turn one rank among costs is drawn, alike for all shards, and each shard gives the batch that has
    that rank among its own: nothing is asked of other shards, and the order follows from the position.

    Args:
        costs: of a shard's batches, ``[batches]``.
        first: the turn of the first one given.
        strata: turns among which each part of the costs comes once.
        path: names the draws; alike for all shards.

    >>> turn_order(np.array([5, 9, 1, 7]), 0, 4, 0).tolist()
    [0, 3, 2, 1]
    >>> turn_order(np.array([90, 10, 50]), 0, 4, 0).tolist()  # of another shard, which has one less
    [2, 0, 1]
    """
    turns = np.arange(first, first + len(costs), dtype=np.int64)
    keys = np.empty(len(costs), dtype=np.float64)
    for window in range(first // strata, -(-(first + len(costs)) // strata)):
        inside = turns // strata == window
        drawn = permutation(strata, seed, "turns", *path, window)[turns[inside] % strata]
        keys[inside] = drawn + uniform(window, window + 1, seed, "turns", *path)[0]
    order = np.empty(len(costs), dtype=np.int64)
    order[np.argsort(keys, kind="stable")] = np.argsort(costs, kind="stable")
    return order
