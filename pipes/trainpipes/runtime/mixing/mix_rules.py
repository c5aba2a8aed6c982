"""How the sources of a mix are mixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainpipes.order import IntArray
from trainpipes.runtime.rows.block import Block

__all__ = ["MixRules", "Stop"]

Stop = Literal["all_exhausted", "first_exhausted", "repeat"]


@dataclass(frozen=True)
class MixRules:
    """How sources are mixed.

    Args:
        names: of the sources, sorted.
        starts: where each step of the schedule begins, in rows or tokens of the whole mix; the first at 0.
        steps: whole weights of the sources in each step, all with the same sum.
        repetitions: how often each source may be gone through in an epoch of the mix; None for no limit.
        stop: what ends an epoch of the mix.
        lengths: tokens of each row, where tokens are counted: int64 ``[rows]``, 1 or more.
        column: of the sources' names, to be added; None for none.
        asker: the stage, for messages.
    """

    names: tuple[str, ...]
    starts: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    repetitions: tuple[int | None, ...]
    stop: Stop
    lengths: Callable[[Block], IntArray] | None
    column: str | None
    asker: object
