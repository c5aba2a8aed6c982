"""``repeat``: one epoch after the other in one pass."""

from __future__ import annotations

from typing import Any

from torchdata.nodes import BaseNode

from trainpipes.checks import whole_number
from trainpipes.runtime.stage import Stage

__all__ = ["Repeat"]


class Repeat(Stage):
    """Goes on with the next epoch where one ends, each in its own order.

    In and out: rows or micro-batches. Before ``batch``, micro-batches go across the epochs' joints and
    none is short; after it, each epoch ends with its own last micro-batch. An endless pipeline goes on
    where it stands when it is iterated again. Cursor: the epoch. Costs nothing.

    Args:
        source: the node below, or None as a step of a pipeline.
        times: epochs in a pass; None for no end.

    Raises:
        DataError: a stage below yields nothing in a whole epoch.
    """

    role = "repeat"

    def __init__(self, source: BaseNode[Any] | None = None, times: int | None = None) -> None:
        if times is not None:
            whole_number(times, 1, "repeat(times)", "epochs, or None for no end")
        super().__init__(source, times=times)
