"""What a contestant is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from benchmarks.contestants.padding import Batch
from benchmarks.corpus import Data

__all__ = ["Cannot", "Contestant"]


class Cannot(Exception):
    """A contestant cannot do a job. Says why, in the words for a table's cell."""


class Contestant:
    """One way from the files to padded batches, in a process of its own.

    A job uses one of the same class for the run that is interrupted and another for the one that goes on.

    Args:
        data: what to read.
    """

    #: Whether it shuffles, and so gives another epoch than the files' order.
    shuffles: ClassVar[bool] = True

    def __init__(self, data: Data) -> None:
        self.data = data

    def convert(self) -> None:
        """Write the data in a format of its own. Once, before the race."""

    def epoch(self) -> Iterator[Batch]:
        """The next epoch, or what is left of the one whose state was loaded."""
        raise NotImplementedError

    def told(self) -> int | None:
        """Bytes that it says it will take, above imports."""
        return None

    def ranks(self, world_size: int) -> list[Iterator[Batch]]:
        """The next epoch, as so many ranks go through it."""
        raise Cannot("")

    def state(self) -> Any:
        """Where it stands, after the batch given last."""
        raise Cannot("has no state")

    def load(self, state: Any) -> None:
        """Let the next epoch go on from a state."""
        raise Cannot("has no state")
