"""What the plan asks of a source that mixes the rows of several pipelines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from trainpipes._internal.pool import Pool
from trainpipes.columns.run import Run
from trainpipes.errors import StateError
from trainpipes.interfaces.source import RowStream, StreamReader
from trainpipes.interfaces.stage_kinds import CombiningSource, RunStage
from trainpipes.state.cursor import shard_key
from trainpipes.state.format import Position

if TYPE_CHECKING:
    from trainpipes.engine.planning.inputs import Inputs
    from trainpipes.engine.planning.plan import Plan


def without_shares(cursor: dict[str, Any], shard: int) -> dict[str, Any]:
    """A shard's cursor from which shares count anew; sources stand where they stood.

    Raises:
        StateError: a stage above holds rows of the mix.
    """
    if "below" in cursor:
        if cursor.get("row"):
            raise StateError(
                f"{shard_key(shard)}: a stage after mix() still holds mixed rows, so that the mix cannot "
                "change here: load the state with the mix as it was; where pack() and take() are in the "
                "sources, before mix(), it can change"
            )
        return {**cursor, "below": without_shares(cursor["below"], shard)}
    place = {key: value for key, value in cursor.items() if key != "ahead"}
    if "sources" in place:  # one that had left may be back
        place["sources"] = {
            name: {key: value for key, value in own.items() if key != "gone"}
            for name, own in place["sources"].items()
        }
    return place


class MixedWindows(ABC):
    """The windows of several pipelines whose rows are mixed."""

    @abstractmethod
    def expect(self, shard: int, state: dict[str, Any], shards: int) -> None:
        """Keep what a shard needs of each source from ``state`` on; ``shards`` are this process's."""

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
        """The mixed rows of one shard from a state on; ``weights``: which of the plan's new ones hold."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all rows: the pass is over."""

    def start(self, epoch: int) -> dict[str, Any]:
        """The state of an epoch's start: none, since its number says it."""
        return {}


class RowMixture(RowStream):
    """Rows of several pipelines, each read by its own windows."""

    @abstractmethod
    def windows(self, plan: Plan, pool: Pool | None, pass_number: int) -> MixedWindows:
        """The windows of all pipelines, for the shards of one process; see ``open_windows``."""

    @abstractmethod
    def naming(self, name: str) -> RunStage:
        """A stage that gives one pipeline's rows the mixture's numbers, and its name where added."""

    @abstractmethod
    def united(self, found: Mapping[str, pa.Schema], caller: str) -> pa.Schema:
        """The columns of all rows, of those of each pipeline."""

    @abstractmethod
    def where(self, inputs: Inputs, row: int) -> tuple[Inputs, int]:
        """Which pipeline's a row is, and its number there."""

    def open(self, epoch: int, state: dict[str, Any] | None) -> StreamReader:
        raise TypeError("a mixture has no one order of its own: each shard mixes for itself")


class MixingSource(CombiningSource, asks_inputs=True):
    """A source that mixes the rows of several pipelines."""

    @abstractmethod
    def parts(self, mixed: Inputs) -> dict[str, Inputs]:
        """The inputs of each pipeline, dealt to the shards of the mix."""

    @abstractmethod
    def migrate(self, saved: dict[str, Any], now: dict[str, Any], position: Position) -> None:
        """Make a state of another mix one of this."""
