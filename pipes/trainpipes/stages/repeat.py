"""``repeat``: one epoch after the other in one pass."""

from __future__ import annotations

from trainpipes._internal.checks import Count
from trainpipes.kinds.stage_kinds import RepeatStage


class Repeat(RepeatStage):
    """Starts the next epoch where one ends, each in its own order.

    In and out: rows or batches. With ``.repeat().batch()``, a batch may hold rows of two epochs,
    and none is short; with ``.batch().repeat()``, each epoch ends with its own last batch. An endless
    pipeline goes on where it stands when it is iterated again. Cursor: the epoch. Costs nothing.

    Args:
        times: epochs that one ``iter()`` gives; None for no end.

    Raises:
        DataError: the stages before it give nothing in a whole epoch.
    """

    times: Count | None = None
