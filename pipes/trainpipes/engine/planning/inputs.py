"""What a chain reads: its source, the blocks of it as arrays, and the schemas that are found. Of folders and
tables that grow: the files of an epoch, or the version of a run, as rank 0 found them and as a state
keeps them.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.checks import IntArray, whole_number
from trainpipes._internal.locks import ForkLock, cached_property
from trainpipes.engine.planning.chain import Chain, MixingSource, RowMixture
from trainpipes.errors import ConfigError, StateError, shown
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.source import (
    Place,
    RandomAccessSource,
    RowSource,
    RowStream,
    checked_source,
)
from trainpipes.interfaces.stage import Stage

#: Most rows that types of columns are found from.
SAMPLE_ROWS = 10_000


class Schemas:
    """The schemas of rows that are Python objects, a schema for each place where rows become columns.
    Any thread may ask.
    """

    def __init__(self) -> None:
        self._found: dict[str, pa.Schema | None] = {}
        self._parts: dict[str, Schemas] = {}
        #: Held while one is looked for: functions of the user's are called for it, which may iterate another
        #: pipeline.
        self._searching = ForkLock()

    def give(self, key: str, schema: pa.Schema) -> None:
        self._found[key] = schema

    def get(self, key: str, find: Callable[[], pa.Schema | None]) -> pa.Schema | None:
        if key not in self._found:
            with self._searching:
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
        self.keeps_pieces = kinds.first_of(chain.after, kinds.ShuffleStage) is not None
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
            chain = chain.without(kinds.PushedStage)
        return chain.bound(self)

    @property
    def _pushes(self) -> bool:
        arranged = self._arranged
        return (
            arranged.cache is None and kinds.first_of(arranged.steps, kinds.PushedStage) is not None
        )

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
            files_shuffle = kinds.first_of(chain.file_stages, kinds.ShuffleStage)
            by_file = isinstance(opened, RowSource) and opened.file_of_block is None
            if files_shuffle is not None and by_file and chain.shuffle is None:
                name = chain.opener.name
                raise ConfigError(
                    f"{files_shuffle} before {name}() must be of files with several rows, and here each file "
                    f"is one, so that nothing would be shuffled: put it after {name}()"
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

    def check_lengths(self) -> None:
        """Raise DataChangedError where a source has another number of rows than when it was opened."""
        for part in self.parts:
            part.check_lengths()
        if isinstance(self.source, RowSource):
            self.source._check_length()

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
    def cached_blocks(self) -> kinds.CachedBlocks | None:
        chain = self.chain
        if chain.cache is None or chain.cached is None:
            return None
        below = chain.before[: chain.cached]
        return chain.cache.open_cache(
            self.listed, self.blocks.firsts, [chain.opener, *below], partial(kinds.put_through, below),
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


#: The key of a state that has the files.
FILES = "files"
#: Most characters of that key.
MOST_TEXT = 1 << 20
#: Most bytes of names that are unpacked from it.
MOST_NAMES = 256 << 20


def grows(stages: Sequence[Stage]) -> bool:
    """Whether an epoch has the files that stand there when it begins."""
    return any(stage.traits.grows for stage in kinds.stages_within(stages))


def kept_in_states(stages: Sequence[Stage]) -> list[Stage]:
    """The sources of which states name the files of an epoch, or the version."""
    return [s for s in kinds.stages_within(stages) if s.traits.grows or s.traits.pins]


def refuse_repeat(stages: Sequence[Stage]) -> None:
    """Raise ConfigError where files are listed for each epoch, and epochs have no end of their own."""
    listing = next((s for s in kinds.stages_within(stages) if s.traits.grows), None)
    rolls = (
        s
        for s in kinds.stages_within(stages)
        if isinstance(s, kinds.RepeatStage) or s.traits.endless
    )
    if listing is not None and (repeat := next(rolls, None)) is not None:
        raise ConfigError(
            f"{listing} lists files when an epoch begins, and {repeat} makes one iteration of several "
            "epochs: leave it out, and iterate the Loader once for each epoch; or leave out refresh"
        )


def of_files(stages: Sequence[Stage], files: Sequence[Sequence[str] | None]) -> list[Stage]:
    """The stages, with the files of an epoch in place of the present files; None leaves that."""
    return _given(stages, iter(files))


def _given(stages: Sequence[Stage], files: Iterator[Sequence[str] | None]) -> list[Stage]:
    found: list[Stage] = []
    for stage in stages:
        if isinstance(stage, kinds.CombiningSource):
            stage = stage.of_chains([_given(chain, files) for chain in stage.chains])
        elif kept_in_states([stage]) and (names := next(files)) is not None:
            stage = stage._resolved(only=tuple(names))
        found.append(stage)
    return found


def listed_files(inputs: Inputs) -> str:
    """The files of growing folders, for a state. Opens the source."""
    names = [source.epoch_files for source in _lists(inputs)]
    text = b64encode(zlib.compress(json.dumps(names).encode(), 9)).decode()
    if len(text) > MOST_TEXT:
        raise ConfigError(
            f"list_files(refresh) must be left out where a state has no room for the names of the files, "
            f"got {sum(map(len, names)):,} files; write the rows to fewer files, or make a pipeline of the "
            "files of each epoch, list_files(names), and keep the names beside the checkpoint"
        )
    return text


def check_after(files: str, inputs: Inputs) -> None:
    """Raise DataChangedError where an epoch cannot follow one of these files, as a state has them."""
    sources = [*_lists(inputs)]
    for source, names in zip(sources, files_of(files, len(sources)), strict=True):
        if hasattr(source, "check_after"):
            source.check_after(names)


def versions(inputs: Inputs) -> list[Any]:
    """What tells the files of growing folders from others of the same names."""
    lists = [getattr(source, "files", None) for source in _lists(inputs)]
    return [None if f is None else [f.names, f.sizes.tolist(), f.stamps] for f in lists]


def _lists(inputs: Inputs) -> Iterator[Any]:
    opener: Any = inputs.chain.stages[0]
    if isinstance(opener, kinds.CombiningSource):
        # A mix has its parts in the order of their names, not of its chains.
        names = getattr(opener, "sources", ())
        for part in [inputs.mixed[name] for name in names] or inputs.parts:
            yield from _lists(part)
    elif kept_in_states([opener]):
        yield inputs.source


def of_run(files: Sequence[Sequence[str]], stages: Sequence[Stage]) -> list[Sequence[str] | None]:
    """What all epochs of a run have of these; None for what each epoch lists."""
    sources = kept_in_states(stages)
    return [None if s.traits.grows else names for s, names in zip(sources, files, strict=True)]


def files_of(text: Any, count: int) -> list[list[str]]:
    """The files in a state, those of ``count`` growing folders."""
    try:
        unpack = zlib.decompressobj()
        found = json.loads(unpack.decompress(b64decode(text, validate=True), MOST_NAMES))
        good = unpack.eof and all(isinstance(names, list) for names in found)
        good &= all(
            isinstance(name, str) and "/" in name for source_names in found for name in source_names
        )
    except (ValueError, TypeError, zlib.error):
        good = False
    if not good:
        raise StateError(f"{FILES}: damaged, got {shown(text)}; load the state as it was saved")
    if len(found) != count:
        raise StateError(
            f"{FILES}: saved of {len(found)} folders with refresh, now there are {count}; build the pipeline "
            "as it was when the state was saved, or load the state of an epoch's start"
        )
    return found  # type: ignore[no-any-return]
