"""What a chain reads: its source, the blocks of it as arrays, and the schemas that are found."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.checks import IntArray, whole_number
from trainpipes._internal.locks import ForkLock, cached_property
from trainpipes.engine.planning.chain import Chain
from trainpipes.engine.planning.mixture import MixingSource, RowMixture
from trainpipes.errors import ConfigError
from trainpipes.interfaces.source import (
    Place,
    RandomAccessSource,
    RowSource,
    RowStream,
    checked_source,
)
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import (
    CachedBlocks,
    PushedStage,
    ShuffleStage,
    first_of,
    put_through,
)

#: Most rows that types of columns are found from.
SAMPLE_ROWS = 10_000
#: Held while a schema is looked for: functions of the user's may be called for it.
searching = ForkLock()


class Schemas:
    """The schemas of rows that are Python objects, a schema for each place where rows become columns.
    Any thread may ask.
    """

    def __init__(self) -> None:
        self._found: dict[str, pa.Schema | None] = {}
        self._parts: dict[str, Schemas] = {}

    def give(self, key: str, schema: pa.Schema) -> None:
        self._found[key] = schema

    def get(self, key: str, find: Callable[[], pa.Schema | None]) -> pa.Schema | None:
        if key not in self._found:
            with searching:
                if key not in self._found:
                    self._found[key] = find()
        return self._found[key]

    def join(self, name: str, part: Schemas) -> None:
        """Take in those of a part of this pipeline, under its name."""
        self._parts[name] = part
        self._tell(name, part)

    def known(self) -> dict[str, pa.Schema | None]:
        """All that are known, for another process, which would find the same."""
        found = dict(self._found)
        for name, part in self._parts.items():
            found |= {f"{name}/{key}": schema for key, schema in part.known().items()}
        return found

    def adopt(self, known: Mapping[str, pa.Schema | None]) -> None:
        self._found |= known
        for name, part in self._parts.items():
            self._tell(name, part)

    def _tell(self, name: str, part: Schemas) -> None:
        schemas = {
            k.removeprefix(f"{name}/"): v
            for k, v in self._found.items()
            if k.startswith(f"{name}/")
        }
        part.adopt(schemas)


class BlockTable:
    """A source's blocks as arrays, without rows before ``skip``, from ``stop`` on, and of ``unread``
    blocks: each block's first row, first row used, and rows used.
    """

    def __init__(
        self,
        lengths: IntArray,
        skip: int = 0,
        stop: int | None = None,
        unread: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self.firsts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        total = int(self.firsts[-1])
        last = total if stop is None else min(stop, total)
        low = np.clip(self.firsts[:-1], skip, max(skip, last))
        high = np.clip(self.firsts[1:], skip, max(skip, last))
        self.begins = low - self.firsts[:-1]
        self.lengths = high - low
        if unread is not None:
            self.lengths[unread] = 0
        self.rows = int(self.lengths.sum())
        self._orders: OrderedDict[int, tuple[IntArray, IntArray | None]] = OrderedDict()

    def order(
        self, epoch: int, make: Callable[[int], IntArray | None]
    ) -> tuple[IntArray, IntArray | None]:
        """Rows before each place of an epoch's order of blocks, and that order."""
        found = self._orders.get(epoch)
        if found is None:
            order = make(epoch)
            lengths = self.lengths if order is None else self.lengths[order]
            starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            found = self._orders[epoch] = (starts, order)
            with suppress(KeyError):  # another thread has let it go
                while len(self._orders) > 3:
                    self._orders.popitem(last=False)
        return found

    def numbers(self, stretches: Sequence[tuple[int, int, int]]) -> IntArray:
        firsts = self.firsts
        found = [np.arange(firsts[b] + low, firsts[b] + high) for b, low, high in stretches]
        return np.concatenate(found or [np.empty(0, dtype=np.int64)])

    def where(self, row: int) -> tuple[int, int]:
        block = int(np.searchsorted(self.firsts, row, side="right")) - 1
        return block, row - int(self.firsts[block])


class Inputs:
    """The rows that a chain reads. The source is opened when it is first asked for."""

    def __init__(
        self,
        chain: Chain,
        source: RowSource | RowStream | None = None,
        schemas: Schemas | None = None,
        name: str | None = None,
    ) -> None:
        #: Of a source of a mix, or of a mix within another: "outer/inner".
        self.name = name
        self.schemas = schemas or Schemas()
        self._source = source
        #: Whether rows say which rows they are made of (``Block.made_of``), which a shuffle of them asks.
        self.keeps_pieces = first_of(chain.after, ShuffleStage) is not None
        #: Of a source of a mix: the stages that its rows go through above the mix.
        self.above: tuple[Stage, ...] = ()
        self._arranged = chain
        if schemas is None:
            self._join_schemas()

    @cached_property
    def chain(self) -> Chain:
        """Without the stages that the source has carried out, which is opened then."""
        chain, pushes = self._arranged, self._pushes
        if pushes and isinstance(self.source, RowSource) and self.source.is_filtered:
            chain = chain.without(PushedStage)
        return chain.bound(self)

    @property
    def _pushes(self) -> bool:
        arranged = self._arranged
        return arranged.cache is None and first_of(arranged.steps, PushedStage) is not None

    @property
    def is_open(self) -> bool:
        return self._source is not None

    @cached_property
    def source(self) -> RowSource | RowStream:
        if self._source is None:
            chain = self._arranged if self._pushes else self.chain
            opened = chain.opener._open_on(chain.file_stages)
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
        parts: dict[str, Inputs] = {}
        if isinstance(mix, MixingSource):
            parts = mix.parts(self, self.chain.shard)
        for name, part in parts.items():
            self.schemas.join(name, part.schemas)
            part.keeps_pieces |= self.keeps_pieces
            part.above = self.chain.after + self.above
        return parts

    @property
    def parts(self) -> list[Inputs]:
        """Those of the pipelines that the source combines."""
        return [*self.mixed.values(), *getattr(self.source, "joined_inputs", ())]

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
            found: Any = chain.drawn.length(rows)
            found = int(found) if isinstance(found, np.integer) else found
            return whole_number(found, 0, f"{chain.shuffle}: length({rows})")
        total = self.source.length
        if total is None:
            return None
        stop = total if chain.stop_rows is None else min(total, chain.stop_rows)
        return max(0, stop - chain.skip_rows)

    def file_name(self, file: int, sources: Sequence[str] = ()) -> str:
        """The name of a file of the source, or of a source below it; nothing where it has none."""
        if sources:
            below = self.mixed or {str(n): part for n, part in enumerate(self.parts)}
            return below[sources[0]].file_name(file, sources[1:]) if sources[0] in below else ""
        listed = getattr(self.source, "files", None)
        names: Sequence[str] = getattr(listed, "names", ())
        return names[file] if file < len(names) else ""

    def name_of(self, part: str) -> str:
        """The name of a source of this mix."""
        return part if self.name is None else f"{self.name}/{part}"

    def place_of(self, row: int) -> Place:
        if isinstance(self.source, RowMixture):
            inputs, row_there = self._mixed_row(self.source, row)
            return inputs.place_of(row_there)
        if isinstance(self.source, RowSource):
            return self._named(self.source.place(*self.blocks.where(row)))
        return self._named(Place(row=row))

    def places_of(self, row: int) -> list[Place]:
        """Where all that a row is made of stands: a place, or several for zipped rows."""
        if isinstance(self.source, RowMixture):
            inputs, row_there = self._mixed_row(self.source, row)
            return inputs.places_of(row_there)
        if isinstance(self.source, RowSource):
            return [*map(self._named, self.source.places(*self.blocks.where(row)))]
        return [self._named(Place(row=row))]

    def _mixed_row(self, mixture: RowMixture, row: int) -> tuple[Inputs, int]:
        path, row_there = mixture.where(row)
        return reduce(lambda inputs, name: inputs.mixed[name], path, self), row_there

    def _named(self, place: Place) -> Place:
        if self.name is None:
            return place
        return replace(place, source=self.name_of(place.source) if place.source else self.name)

    @cached_property
    def cached_blocks(self) -> CachedBlocks | None:
        chain = self.chain
        if chain.cache is None or chain.cached is None:
            return None
        below = chain.before[: chain.cached]
        return chain.cache.open_cache(
            self.listed, self.blocks.firsts, [chain.opener, *below], partial(put_through, below),
            holes=chain.shuffle is None and not all(s.traits.keeps_rows for s in below),
            listed=chain.urls, first=self.first_keys,
        )  # fmt: skip

    def first_keys(self) -> list[Any]:
        firsts, found = self.blocks.firsts, []
        for block in np.flatnonzero(self.blocks.lengths).tolist():
            if firsts[block] - firsts[0] >= SAMPLE_ROWS:
                break
            found.append([int(self.blocks.begins[block]), self.listed.block_key(block)])
        return found
