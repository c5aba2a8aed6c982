"""What a pipeline reads: its source, opened when it is first asked for, and what is known of its rows.

Owns the source, the files of a ``cache()`` and the schemas of rows that are Python objects. It is all that a
stage can ask of the plan that it is part of. Any thread may ask it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from trainpipes.engine.planning.block_table import BlockTable
from trainpipes.engine.planning.chain import Chain
from trainpipes.engine.planning.schemas import Schemas
from trainpipes.errors import ConfigError
from trainpipes.kinds.random_access import RandomAccessSource
from trainpipes.kinds.source import Place, RowMixture, RowSource, RowStream, checked_source
from trainpipes.kinds.stage_kinds import MixingSource, put_through
from trainpipes.storage.caching.block_cache import BlockCache

#: Rows that types of columns are found from, at most.
SAMPLE_ROWS = 10_000


class Inputs:
    """The rows that a chain of stages reads.

    Args:
        chain: its stages are told of these inputs, where they ask.
        source: the source, if it is open already; opened when it is asked for otherwise.
        schemas: of other inputs of the same rows; their own otherwise.

    Attributes:
        schemas: of rows that are Python objects, by ``AsColumns.key``.
    """

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
        """Whether the source was asked for."""
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
        """Those of the pipelines whose rows are mixed; none where rows are of one source."""
        mix = self.chain.opener
        parts = mix.parts(self) if isinstance(mix, MixingSource) else {}
        for name, part in parts.items():
            self.schemas.join(name, part.schemas)
        return parts

    @property
    def listed(self) -> RowSource:
        """The source, where its blocks are listed."""
        assert isinstance(self.source, RowSource)
        return self.source

    @cached_property
    def blocks(self) -> BlockTable:
        """The blocks of that."""
        skip, stop = self.chain.skip_rows, self.chain.stop_rows
        return BlockTable(self.listed.lengths, skip, stop, self.listed.unread)

    @cached_property
    def epoch_rows(self) -> int | None:
        """Rows read in an epoch, if they are counted before they are read."""
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
        """Where a row, numbered in file order, stands."""
        if isinstance(self.source, RowSource):
            return self.source.place(*self.blocks.where(row))
        if isinstance(self.source, RowMixture):
            inputs, own, name = self.source.where(self, row)
            return replace(inputs.place_of(own), source=name)
        return Place(row=row)

    def places_of(self, row: int) -> list[Place]:
        """Where all that a row is made of stands: one place, but for rows side by side."""
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
        """What a cache() keeps; None where nothing is kept."""
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
        """What tells the rows that types of columns are found from."""
        firsts, found = self.blocks.firsts, []
        for block in np.flatnonzero(self.blocks.lengths).tolist():
            if firsts[block] - firsts[0] >= SAMPLE_ROWS:
                break
            found.append([int(self.blocks.begins[block]), self.listed.block_key(block)])
        return found
