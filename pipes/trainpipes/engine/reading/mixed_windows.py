"""The windows of several pipelines whose rows are mixed, and the mixture that has them. These few lines stand
below the shards that ask them and above the plan that they are made of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from trainpipes._internal.pool import Pool
from trainpipes.columns.run import Run
from trainpipes.engine.planning.mixture import RowMixture
from trainpipes.engine.planning.plan import Plan


class MixedWindows(ABC):
    """The windows of several pipelines whose rows are mixed."""

    @abstractmethod
    def expect(self, shard: int, state: dict[str, Any], shards: int) -> None:
        """Keep the windows that a shard needs of each source from ``state`` on; ``shards`` are this
        process's.
        """

    @abstractmethod
    def open(
        self,
        shard: int,
        state: dict[str, Any],
        rows: tuple[int, int],
        shards: int,
        first: int,
        weights: int | None,
    ) -> Iterator[Run]:
        """The mixed rows of a shard from a state on; ``weights``: which of the plan's new weights hold."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all rows: the pass is over."""

    def start(self, epoch: int) -> dict[str, Any]:
        """The state of an epoch's start: none, since its number says it."""
        return {}


class WindowedMixture(RowMixture):
    """Rows of several pipelines, each read by its own windows."""

    @abstractmethod
    def windows(self, plan: Plan, pool: Pool | None, pass_number: int) -> MixedWindows:
        """The windows of all pipelines, for the shards of a process; see ``open_windows``."""
