"""What the plan asks of a source that mixes the rows of several pipelines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from trainpipes.errors import StateError
from trainpipes.interfaces.source import RowSource, RowStream, StreamReader
from trainpipes.interfaces.stage_kinds import CombiningSource, RunStage, ShardStage
from trainpipes.state.cursor import shard_key
from trainpipes.state.format import Position


class MixedInputs(Protocol):
    """What a mix asks of the inputs whose source it is."""

    @property
    def source(self) -> RowSource | RowStream: ...

    def name_of(self, part: str) -> str: ...


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
    if "sources" in place:  # a source that had left may be back
        place["sources"] = {
            name: {key: value for key, value in source_cursor.items() if key != "gone"}
            for name, source_cursor in place["sources"].items()
        }
    return place


class RowMixture(RowStream):
    """Rows of several pipelines."""

    @abstractmethod
    def naming(self, name: str) -> RunStage:
        """A stage that gives a pipeline's rows the mixture's numbers, and its name where added."""

    @abstractmethod
    def united(self, found: Mapping[str, pa.Schema], caller: str) -> pa.Schema:
        """The columns of all rows, of those of each pipeline."""

    @abstractmethod
    def where(self, row: int) -> tuple[Sequence[str], int]:
        """Which pipeline's a row is, by the names that lead to it from the outermost mix inwards, and its
        number there.
        """

    def open(self, epoch: int, state: dict[str, Any] | None) -> StreamReader:
        raise TypeError("a mixture has no one order of its own: each shard mixes for itself")


class MixingSource(CombiningSource, asks_inputs=True):
    """A source that mixes the rows of several pipelines."""

    @abstractmethod
    def parts(self, mixed: MixedInputs, shard: ShardStage | None) -> dict[str, Any]:
        """The ``Inputs`` of each pipeline, dealt to the shards of the mix."""

    @abstractmethod
    def migrate(self, saved: dict[str, Any], now: dict[str, Any], position: Position) -> None:
        """Make a state of another mix a state of this."""
