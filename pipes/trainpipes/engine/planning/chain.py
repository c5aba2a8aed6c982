"""Which stage of a pipeline stands where, and what the plan asks of a source that mixes the rows of several
pipelines. Immutable; nothing is opened.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import pyarrow as pa

from trainpipes.errors import StateError
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.source import RowSource, RowStream, StreamReader
from trainpipes.interfaces.stage import Stage
from trainpipes.state.cursor import shard_key
from trainpipes.state.format import Position

#: Epochs between the passes of an endless pipeline, so that no two passes share an order.
PASS_EPOCHS = 1 << 20
#: Numbers of epochs stay below, so that int64 holds them in mixes of mixes, whose epochs are passes: a prime,
#: so that few of them share an order.
LARGEST_EPOCH = 6 * 10**18 + 23


@dataclass(frozen=True, eq=False)
class Chain:
    """The stages of a pipeline, sorted by their parts in the plan.

    Attributes:
        stages: all of them.
        opener: opens the source of rows.
        before: on rows, before the shuffle.
        after: on rows after they are dealt, and on batches.
        shard: deals rows.
        cached: how many of ``before`` are below the cache; None where nothing is kept.
        device_stages: on finished batches, in the process that trains.
        skip_rows, stop_rows: which rows in file order an epoch has.
        skip_batches, stop_batches: which batches an epoch has.
        rolling: whether rows go on into the next epoch before they are batched.
    """

    stages: tuple[Stage, ...]
    opener: kinds.Source
    file_stages: tuple[Stage, ...] = ()
    before: tuple[Stage, ...] = ()
    after: tuple[Stage, ...] = ()
    shuffle: kinds.ShuffleStage | None = None
    shard: kinds.ShardStage | None = None
    batch: kinds.BatchingStage | None = None
    repeat: kinds.RepeatStage | None = None
    cache: kinds.CacheStage | None = None
    cached: int | None = None
    device_stages: tuple[kinds.DeviceStage, ...] = ()
    skip_rows: int = 0
    stop_rows: int | None = None
    skip_batches: int = 0
    stop_batches: int | None = None
    rolling: bool = False

    # Stages

    @property
    def steps(self) -> tuple[Stage, ...]:
        return self.before + self.after

    @property
    def after_on_rows(self) -> tuple[Stage, ...]:
        """Stages on rows, or that make rows, after they are dealt."""
        if self.batch is None:
            return self.after
        return self.after[: self.after.index(self.batch)]

    @property
    def mixes(self) -> bool:
        return isinstance(self.opener, MixingSource)

    @property
    def groups(self) -> tuple[kinds.BatchingStage, ...]:
        """Stages that group batches."""
        return tuple(s for s in self.after if isinstance(s, kinds.BatchingStage) and s.nested)

    @property
    def keeps_rows(self) -> bool:
        rows = self.before + self.after_on_rows
        rows = rows if self.batch is None else (*rows, self.batch)
        counting = kinds.first_of(self.after, kinds.CountingStage)
        return all(s.traits.keeps_rows for s in rows) and not counting

    @property
    def takes_turns(self) -> bool:
        """Whether a stage must know how many batches its shard has given."""
        return any(isinstance(s, kinds.RegroupStage) and s._takes_turns for s in self.after)

    # Options

    @property
    def urls(self) -> Any:
        listing = kinds.first_of(self.stages[:1], kinds.ListingSource)
        return None if listing is None else listing.options["urls"]

    @property
    def num_shards(self) -> int:
        return 1 if self.shard is None else self.shard.num_shards

    @property
    def uneven(self) -> bool:
        """Whether ranks may end at different steps, and all is delivered."""
        return self.shard is not None and self.shard.tail == "uneven"

    @property
    def batch_size(self) -> int:
        """Rows of a batch; 1 where there are none, or where they are not counted."""
        return 1 if self.batch is None else self.batch.batch_size or 1

    @property
    def drop_last(self) -> bool:
        return self.batch is not None and self.batch.drop_last

    @property
    def drawn(self) -> kinds.RowOrder | None:
        """The stage that draws an epoch's rows by number."""
        return None if self.shuffle is None else self.shuffle.order

    @property
    def may_repeat(self) -> bool:
        return self.shuffle is not None and self.shuffle.sampler is not None

    @property
    def buffer(self) -> int | None:
        """Rows that are shuffled together; None without a buffer."""
        if self.shuffle is None or self.drawn is not None:
            return None
        return self.shuffle.buffer_size

    @property
    def seed(self) -> int | None:
        return None if self.shuffle is None or self.drawn is not None else self.shuffle.seed

    def of_batch_size(self, size: int) -> Chain:
        if self.batch is None:
            return self
        batch = self.batch._replaced(batch_size=size)
        after = tuple(batch if stage is self.batch else stage for stage in self.after)
        return replace(self, batch=batch, after=after)

    def without(self, kind: Any) -> Chain:
        """This chain without stages of a kind on the rows as they are read."""
        stages, before, after = (
            tuple(kinds.without(some, kind)) for some in (self.stages, self.before, self.after)
        )
        return replace(self, stages=stages, before=before, after=after)

    def bound(self, inputs: Any) -> Chain:
        """This chain, with copies of the stages that look at the pipeline's inputs."""
        asking = {s for s in (*self.stages, *self.steps) if s.traits.asks_inputs}
        copies = {stage: stage._bound(inputs) for stage in asking}
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Chain(**{name: _copied(value, copies) for name, value in values.items()})

    # Epochs and passes

    @property
    def times(self) -> int | None:
        """Epochs in a pass; None for no end."""
        if self.repeat is None:
            return None if self.opener.traits.endless else 1
        return self.repeat.times

    @property
    def endless(self) -> bool:
        return self.times is None

    @property
    def has_no_end(self) -> bool:
        """Whether a pass has no end, also not by ``take``."""
        counting = (s for s in self.after if isinstance(s, kinds.CountingStage))
        taken = self.stop_batches is not None or any(not stage.skips for stage in counting)
        return self.endless and not (taken and self.repeat is None)

    def goes_on(self, epoch: int, first_epoch: int) -> bool:
        if self.repeat is None:
            return False
        return self.times is None or epoch + 1 < first_epoch + self.times

    def first_epoch(self, pass_number: int) -> int:
        return pass_number * (PASS_EPOCHS if self.times is None else self.times) % LARGEST_EPOCH


def _copied(value: Any, copies: Mapping[Stage, Stage]) -> Any:
    if isinstance(value, tuple):
        return tuple(_copied(each, copies) for each in value)
    return copies.get(value, value) if isinstance(value, Stage) else value


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
    def naming(self, name: str) -> kinds.RunStage:
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


class MixingSource(kinds.CombiningSource, asks_inputs=True):
    """A source that mixes the rows of several pipelines."""

    @abstractmethod
    def parts(self, mixed: MixedInputs, shard: kinds.ShardStage | None) -> dict[str, Any]:
        """The ``Inputs`` of each pipeline, dealt to the shards of the mix."""

    @abstractmethod
    def migrate(self, saved: dict[str, Any], now: dict[str, Any], position: Position) -> None:
        """Make a state of another mix a state of this."""
