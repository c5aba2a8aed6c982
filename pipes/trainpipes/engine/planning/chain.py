"""Which stage of a pipeline stands where. Immutable; nothing is opened. Any thread may ask it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from trainpipes.engine.planning.block_table import BlockTable
from trainpipes.engine.planning.schemas import Schemas
from trainpipes.errors import ConfigError
from trainpipes.kinds.source import (
    Place,
    RandomAccessSource,
    RowMixture,
    RowSource,
    RowStream,
    checked_source,
)
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import (
    BatchingStage,
    CacheStage,
    DeviceStage,
    MixingSource,
    RepeatStage,
    RowOrder,
    ShardStage,
    ShuffleStage,
    Source,
    put_through,
)
from trainpipes.storage.caching.block_cache import BlockCache

#: Epochs between the passes of an endless pipeline, so that no two passes share an order.
PASS_EPOCHS = 1 << 20


@dataclass(frozen=True, eq=False)
class Chain:
    """The stages of a pipeline, sorted by what they are to its plan.

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
    opener: Source
    file_stages: tuple[Stage, ...] = ()
    before: tuple[Stage, ...] = ()
    after: tuple[Stage, ...] = ()
    shuffle: ShuffleStage | None = None
    shard: ShardStage | None = None
    batch: BatchingStage | None = None
    repeat: RepeatStage | None = None
    cache: CacheStage | None = None
    cached: int | None = None
    device_stages: tuple[DeviceStage, ...] = ()
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
    def keeps_rows(self) -> bool:
        rows = self.before + self.after_on_rows
        rows = rows if self.batch is None else (*rows, self.batch)
        counting = any(s.role in ("take", "skip") for s in self.after)
        return all(s.keeps_rows for s in rows) and not counting

    # Options

    @property
    def urls(self) -> Any:
        return self.stages[0].options["urls"] if self.stages[0].role == "files" else None

    @property
    def num_shards(self) -> int:
        return 1 if self.shard is None else self.shard.num_shards

    @property
    def ragged(self) -> bool:
        """Whether ranks may end at different steps, and all is delivered."""
        return self.shard is not None and self.shard.tail == "ragged"

    @property
    def batch_size(self) -> int:
        """Rows of a batch; 1 where there are none, or where they are not counted."""
        return 1 if self.batch is None else self.batch.batch_size or 1

    @property
    def drop_last(self) -> bool:
        return self.batch is not None and self.batch.drop_last

    @property
    def drawn(self) -> RowOrder | None:
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
        batch = self.batch.replaced(batch_size=size)
        after = tuple(batch if stage is self.batch else stage for stage in self.after)
        return replace(self, batch=batch, after=after)

    # Epochs and passes

    @property
    def times(self) -> int | None:
        """Epochs in a pass; None for no end."""
        if self.repeat is None:
            return None if self.opener.endless else 1
        return self.repeat.times

    @property
    def endless(self) -> bool:
        return self.times is None

    def goes_on(self, epoch: int, first_epoch: int) -> bool:
        if self.repeat is None:
            return False
        return self.times is None or epoch + 1 < first_epoch + self.times

    def first_epoch(self, number: int) -> int:
        return number * (PASS_EPOCHS if self.times is None else self.times)


#: Most rows that types of columns are found from.
SAMPLE_ROWS = 10_000


class Inputs:
    """The rows that a chain reads. The source is opened when it is first asked for."""

    def __init__(
        self,
        chain: Chain,
        source: RowSource | RowStream | None = None,
        schemas: Schemas | None = None,
    ) -> None:
        self.chain = chain
        self.schemas = schemas or Schemas()
        self._source = source
        for stage in {*chain.stages, *chain.steps}:
            if stage.by_place or stage.asks_inputs:
                stage.use_inputs(self)
        if schemas is None:
            self._join_schemas()

    @property
    def is_open(self) -> bool:
        return self._source is not None

    @cached_property
    def source(self) -> RowSource | RowStream:
        if self._source is None:
            chain = self.chain
            opened = chain.opener.open_files(chain.file_stages)
            self._source = checked_source(opened, chain.opener)
            if chain.drawn is not None and not isinstance(opened, RandomAccessSource):
                kind = type(opened).__name__
                raise ConfigError(
                    f"{chain.shuffle} reads rows by number, and {chain.opener} opens a {kind}, which cannot: "
                    "leave random_access out, and shuffle within a buffer"
                )
            self._join_schemas()
        return self._source

    def _join_schemas(self) -> None:
        if isinstance(self._source, RowSource):
            for number, part in enumerate(self._source.joined_inputs):
                self.schemas.join(str(number), part.schemas)

    @cached_property
    def mixed(self) -> dict[str, Inputs]:
        mix = self.chain.opener
        parts = mix.parts(self) if isinstance(mix, MixingSource) else {}
        for name, part in parts.items():
            self.schemas.join(name, part.schemas)
        return parts

    @property
    def listed(self) -> RowSource:
        assert isinstance(self.source, RowSource)
        return self.source

    @cached_property
    def blocks(self) -> BlockTable:
        skip, stop = self.chain.skip_rows, self.chain.stop_rows
        return BlockTable(self.listed.lengths, skip, stop, self.listed.unread)

    @cached_property
    def epoch_rows(self) -> int | None:
        chain = self.chain
        if isinstance(self.source, RowSource):
            rows = self.blocks.rows
            if chain.drawn is None:
                return rows
            chain.drawn.check(rows)
            return chain.drawn.length(rows)
        total = self.source.length
        if total is None:
            return None
        stop = total if chain.stop_rows is None else min(total, chain.stop_rows)
        return max(0, stop - chain.skip_rows)

    def place_of(self, row: int) -> Place:
        if isinstance(self.source, RowSource):
            return self.source.place(*self.blocks.where(row))
        if isinstance(self.source, RowMixture):
            inputs, own, name = self.source.where(self, row)
            return replace(inputs.place_of(own), source=name)
        return Place(row=row)

    def places_of(self, row: int) -> list[Place]:
        """Where all that a row is made of stands: one place, or several for zipped rows."""
        if isinstance(self.source, RowSource):
            return self.source.places(*self.blocks.where(row))
        if isinstance(self.source, RowMixture):
            inputs, own, name = self.source.where(self, row)
            found = inputs.places_of(own)
            parts = [name if p.source is None else f"{name}/{p.source}" for p in found]
            return [replace(p, source=part) for p, part in zip(found, parts, strict=True)]
        return [Place(row=row)]

    @cached_property
    def cached_blocks(self) -> BlockCache | None:
        chain = self.chain
        if chain.cache is None or chain.cached is None:
            return None
        below = chain.before[: chain.cached]
        return BlockCache(
            self.listed, self.blocks.firsts, [chain.opener, *below], chain.cache, partial(put_through, below),
            holes=chain.shuffle is None and not all(s.keeps_rows for s in below),
            listed=chain.urls, first=self.first_keys,
        )  # fmt: skip

    def first_keys(self) -> list[Any]:
        firsts, found = self.blocks.firsts, []
        for block in np.flatnonzero(self.blocks.lengths).tolist():
            if firsts[block] - firsts[0] >= SAMPLE_ROWS:
                break
            found.append([int(self.blocks.begins[block]), self.listed.block_key(block)])
        return found
