from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from trainpipes._internal.checks import require
from trainpipes.columns.block import Block
from trainpipes.columns.payload import Payload, join_payloads
from trainpipes.engine.layout import IntArray
from trainpipes.engine.planning.arrange import arrange
from trainpipes.engine.planning.as_columns import gives_objects
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.errors import ConfigError
from trainpipes.kinds.source import (
    LooksAhead,
    Place,
    RandomAccessSource,
    Reader,
    RowSource,
    read_rows,
)
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import CombiningSource, RunStage, Source, put_through
from trainpipes.sources.combined.common_columns import CommonColumns, Joined
from trainpipes.storage.caching.contents import cache_key

#: Blocks of a source that one block is cut of, up to which they are asked for together although not all may
#: be needed.
FEW_BLOCKS = 3


class Cut(NamedTuple):
    """Rows of one pipeline: input, first row's number, and the blocks: number, first row, stop."""

    part: JoinedInput
    first: int
    stretches: Sequence[tuple[int, int, int]]


class JoiningSource(CombiningSource):
    """A stage that reads the rows of several pipelines as those of one source."""

    joined: ClassVar[Joined] = "one sequence"

    pipelines: Sequence[Any]

    def check(self) -> None:
        self._set(pipelines=tuple(self.pipelines))
        good = self.pipelines and all(hasattr(one, "stages") for one in self.pipelines)
        require(good, f"{self.name}(...)", "one pipeline or more", self.pipelines)
        for number, pipeline in enumerate(self.pipelines):
            if getattr(pipeline, "_ranks", None) is not None:
                raise ConfigError(
                    f"{self.name}(...): source {number} is distributed(): put that after {self.name}()"
                )
            _check_chain(pipeline.stages, number, self.name)

    @cached_property
    def chains(self) -> Sequence[Sequence[Stage]]:
        return [pipeline.stages for pipeline in self.pipelines]

    @property
    def makes_objects(self) -> bool:  # type: ignore[override]
        return all(map(gives_objects, self.chains))

    @property
    def has_blocks(self) -> bool:  # type: ignore[override]
        return all(_opener(chain).has_blocks for chain in self.chains)

    @property
    def random_access(self) -> bool:  # type: ignore[override]
        return all(_opener(chain).random_access for chain in self.chains)

    def open(self) -> RowSource:
        return self.opened([None] * len(self.chains))

    def opened(self, sources: Sequence[RowSource | None]) -> RowSource:
        chains: dict[int, tuple[Inputs, Sequence[Stage]]] = {}
        columns = CommonColumns(self.name, str(self), chains, self.joined)
        found = [
            JoinedInput(n, chain, source, self.name, columns)
            for n, (chain, source) in enumerate(zip(self.chains, sources, strict=True))
        ]
        chains.update((part.number, (part.inputs, part.inputs.chain.steps)) for part in found)
        return self.rows_of(found)

    @abstractmethod
    def rows_of(self, parts: Sequence[JoinedInput]) -> JoinedRows:
        """The rows of all pipelines, made of those of each."""

    def identity(self) -> dict[str, Any]:
        chains = [
            [stage.identity() for stage in chain if stage.role != "files"] for chain in self.chains
        ]
        return {"stage": self.name, "sources": chains}

    def __repr__(self) -> str:
        return f"{self.name}({', '.join('.'.join(map(repr, chain)) for chain in self.chains)})"


def _opener(chain: Sequence[Stage]) -> Source:
    found = next((stage for stage in chain if stage.role == "reader"), chain[0])
    assert isinstance(found, Source)
    return found


def _check_chain(stages: Sequence[Stage], number: int, caller: str) -> None:
    reader = stages.index(_opener(stages))
    for stage in stages[:reader][1:]:
        if stage.role == "shuffle":
            raise ConfigError(f"{caller}(...): put {stage} after it, where it shuffles all sources")
    for stage in [*_opener(stages).above(), *stages[reader + 1 :]]:
        if stage.role in ("take", "skip"):  # of rows in file order, since all others keep each row
            continue
        plain = stage.role == "rows" and isinstance(stage, RunStage)
        if not plain or not stage.keeps_rows or stage.by_epoch:
            raise ConfigError(
                f"{caller}(...): {stage} in source {number} does not keep each row as it is read, in every "
                f"epoch: put {stage.name}() after {caller}(), for all sources"
            )


class JoinedRows(RowSource):
    def __init__(self, stage: JoiningSource, parts: Sequence[JoinedInput]) -> None:
        self.stage = stage
        self.parts = parts
        self.joined_inputs = [part.inputs for part in parts]

    def __reduce__(self) -> Any:
        return self.stage.opened, ([part.source for part in self.parts],)

    @abstractmethod
    def cut(self, block: int, start: int, stop: int) -> list[Cut]:
        """Of which rows of the pipelines some rows of a block are made."""

    def joined(self, parts: Sequence[Payload]) -> Payload:
        (found,) = parts
        return found

    def reader(self) -> Reader:
        return _JoinedReader(self)

    def fingerprint(self) -> dict[str, Any]:
        return {"sources": [part.source.fingerprint() for part in self.parts]}


class _JoinedReader:
    def __init__(self, source: JoinedRows) -> None:
        self._source = source
        self._readers: dict[int, Reader] = {}

    def _reader(self, part: JoinedInput) -> Reader:
        if part.number not in self._readers:
            self._readers[part.number] = part.source.reader()
        return self._readers[part.number]

    def read(self, block: int, start: int, stop: int) -> Payload:
        rows = []
        for part, first, stretches in self._source.cut(block, start, stop):
            reader = self._reader(part)
            found = [part.read(reader, own, low, high, first) for own, low, high in stretches]
            rows.append(found[0] if len(found) == 1 else join_payloads(found))
        return self._source.joined(rows)

    def expect(self, blocks: Sequence[int]) -> None:
        """Tell each source's reader its next blocks, without many small ones of which it may need a part."""
        wanted: dict[int, dict[int, None]] = {}
        for block in blocks:
            for part, _, stretches in self._source.cut(block, 0, int(self._source.lengths[block])):
                own = wanted.setdefault(part.number, {})
                if len(stretches) <= FEW_BLOCKS or block not in (blocks[0], blocks[-1]):
                    own |= dict.fromkeys(number for number, _, _ in stretches)
        for number, own in wanted.items():
            reader = self._reader(self._source.parts[number])
            if isinstance(reader, LooksAhead):
                reader.expect(list(own))

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


class JoinedInput:
    """One pipeline's rows with their stages; row 0 comes after ``skipped`` rows of the source."""

    def __init__(
        self,
        number: int,
        stages: Sequence[Stage],
        source: RowSource | None,
        caller: str,
        columns: CommonColumns,
    ) -> None:
        self.number, self.columns, self._asker = number, columns, caller
        self.inputs = Inputs(arrange([stage.fresh() for stage in stages]), source)
        if not isinstance(self.inputs.source, RowSource):
            raise ConfigError(
                f"{caller}(...) takes sources whose rows are counted before they are read, and source "
                f"{number}, {self.inputs.chain.stages[0]}, is a stream: write its rows to files first, by "
                "write_parquet()"
            )
        self.source = self.inputs.source
        blocks = self.inputs.blocks
        # Of each block, rows that are used: all, but for ``take`` and ``skip``.
        self._begins, self.lengths = blocks.begins, blocks.lengths
        self._starts = blocks.firsts[:-1] + blocks.begins  # each block's first row that is used
        self.edges: IntArray = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        used = np.flatnonzero(self.lengths)
        self.skipped = int(self._starts[used[0]]) if len(used) else 0
        self._key: list[Any] | None = None

    def read(self, reader: Reader, block: int, start: int, stop: int, first: int) -> Payload:
        """Rows of a block after the pipeline's stages; ``first`` is this input's first row number among
        all.
        """
        begin, own = int(self._begins[block]), int(self._starts[block])
        data = read_rows(self.source, reader, block, begin + start, begin + stop)
        return self.finished(data, np.arange(own + start, own + stop, dtype=np.int64), first)

    def take(self, index: IntArray, first: int) -> Payload:
        assert isinstance(self.source, RandomAccessSource)
        own = index + self.skipped
        return self.finished(self.source.take(own), own, first)

    def finished(self, data: Payload, rows: IntArray, first: int) -> Payload:
        try:
            block = put_through(self.inputs.chain.steps, Block(data, rows))
            return self.columns.of(self.number, block).data
        except Exception as error:
            mark = getattr(error, "_trainpipes", None)
            if mark is not None and mark[1] is not None:
                if not hasattr(error, "_place"):
                    error._place = self.inputs.place_of(mark[1])  # type: ignore[attr-defined]
                error._trainpipes = (mark[0], mark[1] - self.skipped + first)  # type: ignore[attr-defined]
            raise

    def place(self, row: int) -> Place:
        return self.inputs.place_of(row + self.skipped)

    def places(self, row: int) -> list[Place]:
        return self.inputs.places_of(row + self.skipped)

    def block_key(self, block: int) -> list[Any] | None:
        key = self.source.block_key(block)
        if key is None:
            return None
        if self._key is None:  # once: what functions hold may change from call to call
            chain = self.inputs.chain
            stages = chain.stages[chain.stages.index(chain.opener) :]
            types = self.inputs.first_keys() if any(stage.finds_types for stage in stages) else []
            self._key = [*cache_key(stages, self._asker), types]
        changed = self.columns.changed(self.number)
        return [key, self._key] if changed is None else [key, self._key, changed]

    @cached_property
    def block_bytes(self) -> Any:
        """float64 ``[blocks]``; None if unknown."""
        source = self.source
        if source.block_bytes is not None:
            return source.block_bytes * (self.lengths / np.maximum(1, source.lengths))
        return None

    def describe(self) -> list[tuple[str, str]]:
        return [(f"  {self.number}: {label}", text) for label, text in self.source.describe()]
