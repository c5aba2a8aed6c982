"""``concat``: the rows of several sources, one after the other.

A ``Joined`` owns the sources of all pipelines, and any thread may ask it; each of its readers is one thread's
at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.errors import ConfigError, SchemaError
from trainpipes.order import IntArray
from trainpipes.runtime.caching.cache_key import cache_key
from trainpipes.runtime.kinds import RunStage, Source
from trainpipes.runtime.planning.arrange import arrange
from trainpipes.runtime.planning.as_columns import gives_objects
from trainpipes.runtime.planning.inputs import Inputs
from trainpipes.runtime.reading.listed import chain_before
from trainpipes.runtime.reading.random_access import RandomAccessSource
from trainpipes.runtime.rows.block import Block
from trainpipes.runtime.rows.payload import Payload, join_payloads, take_payload
from trainpipes.runtime.rows.same_columns import columns_of, difference, in_columns
from trainpipes.runtime.source import LooksAhead, Place, Reader, RowSource
from trainpipes.runtime.stage import Stage
from trainpipes.sources.files.row_names import file_names

__all__ = ["Concat"]


class Concat(Source):
    """The rows of several pipelines, one after the other in file order, as one source.

    Out: rows of the first pipeline, then of the second, … They are planned as one: an epoch is cut, dealt and
    shuffled over all of them. Cursor: as of any source. Costs nothing.

    Each has a source whose blocks are known in advance, and stages that keep all rows, such as ``select`` and
    ``rename`` to give all the same columns. What is common to all, what drops rows, and what orders, deals
    or batches them stands after it. To mix by weights: ``mix``; files of one kind: a list in ``list_files``.

    Args:
        pipelines: in this order.

    Raises:
        SchemaError: their columns differ; names both.

    >>> import pyarrow as pa, trainpipes as tp
    >>> old, new = tp.from_arrow(pa.table({"x": [1, 2]})), tp.from_arrow(pa.table({"y": [3]}))
    >>> list(tp.concat(old, new.rename({"y": "x"})))
    [{'x': 1}, {'x': 2}, {'x': 3}]
    """

    pipelines: Sequence[Any]

    def check(self) -> None:
        self._set(pipelines=tuple(self.pipelines))
        if not self.pipelines:
            raise ConfigError("concat(...) takes pipelines, got none")
        for pipeline in self.pipelines:
            if not hasattr(pipeline, "stages"):
                raise ConfigError(f"concat(...) takes pipelines, got {type(pipeline).__name__}")
        for number, chain in enumerate(self._chains):
            _check_chain(chain, number)

    @cached_property
    def _chains(self) -> list[Sequence[Stage]]:
        return [pipeline.stages for pipeline in self.pipelines]

    @property
    def runs_user_code(self) -> bool:
        return any(stage.runs_user_code for chain in self._chains for stage in chain)

    @property
    def makes_objects(self) -> bool:  # type: ignore[override]
        return any(map(gives_objects, self._chains))

    @property
    def has_blocks(self) -> bool:  # type: ignore[override]
        return all(_opener(chain).has_blocks for chain in self._chains)

    @property
    def random_access(self) -> bool:  # type: ignore[override]
        return all(_opener(chain).random_access for chain in self._chains)

    def open(self) -> RowSource:
        parts = [Inputs(arrange([stage.fresh() for stage in chain])) for chain in self._chains]
        for number, part in enumerate(parts):
            if not isinstance(part.source, RowSource):
                raise ConfigError(
                    f"concat(...) takes sources whose rows are counted before they are read, and source "
                    f"{number}, {part.chain.stages[0]}, is a stream: chain the iterables yourself, or write "
                    "them to files first"
                )
        if all(isinstance(part.source, RandomAccessSource) for part in parts):
            return JoinedByNumber(parts, str(self))
        return Joined(parts, str(self))

    def identity(self) -> dict[str, Any]:
        chains = [
            [stage.identity() for stage in chain if stage.role != "files"] for chain in self._chains
        ]
        return {"stage": self.name, "sources": chains}

    def __repr__(self) -> str:
        return f"concat({', '.join('.'.join(map(repr, chain)) for chain in self._chains)})"


def _opener(chain: Sequence[Stage]) -> Source:
    """The stage that opens a chain's source."""
    found = next((stage for stage in chain if stage.role == "reader"), chain[0])
    assert isinstance(found, Source)
    return found


def _check_chain(stages: Sequence[Stage], number: int) -> None:
    """Raise ConfigError unless a pipeline of these stages may be one of several."""
    reader = stages.index(_opener(stages))
    for stage in stages[:reader][1:]:
        if stage.role == "shuffle":
            raise ConfigError(f"concat(...): put {stage} after it, where it shuffles all sources")
    for stage in [*_opener(stages).above(), *stages[reader + 1 :]]:
        plain = stage.role == "rows" and isinstance(stage, RunStage)
        if not plain or not stage.keeps_rows or stage.by_epoch:
            raise ConfigError(
                f"concat(...): {stage} in source {number} does not keep each row as it is read, in every "
                f"epoch: put {stage.name}() after concat(), for all sources"
            )


class Joined(RowSource):
    """The blocks of several sources, one after the other.

    Args:
        parts: the inputs of each source, with the stages that its rows go through.
        asker: the stage, for messages.

    Attributes:
        file_of_block: the file that each block is in, numbered over all sources; a source without files
            counts as one. int64 ``[blocks]``.
    """

    def __init__(self, parts: Sequence[Inputs], asker: str) -> None:
        self.joined_inputs: list[Inputs] = list(parts)
        self._asker = asker
        self._sources: list[RowSource] = [part.source for part in parts]  # type: ignore[misc]
        self._apply = [chain_before(part.chain.steps) for part in parts]
        counts = [len(source.lengths) for source in self._sources]
        self._first_block = np.cumsum([0, *counts])
        self.lengths = np.concatenate([source.lengths for source in self._sources])
        self._firsts = np.cumsum([0, *self.lengths.tolist()])
        rows = [int(source.lengths.sum()) for source in self._sources]
        sizes = [source.row_bytes for source in self._sources]
        if sum(rows) and None not in sizes:
            total = sum(n * size for n, size in zip(rows, sizes, strict=True) if size is not None)
            self.row_bytes = total / sum(rows)
        blocks = [source.block_bytes for source in self._sources]
        if all(own is not None for own in blocks):
            self.block_bytes = np.concatenate([own for own in blocks if own is not None])
        self._names: list[str] = []
        files = []
        for number, (part, source) in enumerate(zip(parts, self._sources, strict=True)):
            own = source.file_of_block
            files.append((np.zeros_like(source.lengths) if own is None else own) + len(self._names))
            self._names += [f"{number}/{name}" for name in file_names(part)]
        self.file_of_block: IntArray = np.concatenate(files)
        self._kind: tuple[int, Any] | None = None
        self._keys: dict[int, list[Any]] = {}

    def relative_names(self) -> list[str]:
        """Names of the files, each with its source's number."""
        return self._names

    def reader(self) -> Reader:
        return _JoinedReader(self)

    def where(self, block: int) -> tuple[int, int]:
        """The source of a block, and its number in there."""
        number = int(np.searchsorted(self._first_block, block, side="right")) - 1
        return number, block - int(self._first_block[number])

    def place(self, block: int, row: int) -> Place:
        number, own = self.where(block)
        return self._sources[number].place(own, row)

    def block_key(self, block: int) -> Any:
        number, own = self.where(block)
        key = self._sources[number].block_key(own)
        if key is None:
            return None
        if number not in self._keys:  # once: what functions hold may change from call to call
            part = self.joined_inputs[number]
            stages = part.chain.stages[part.chain.stages.index(_opener(part.chain.stages)) :]
            types = part.first_keys() if any(stage.finds_types for stage in stages) else []
            self._keys[number] = [*cache_key(stages, self._asker), types]
        return [key, self._keys[number]]

    def fingerprint(self) -> dict[str, Any]:
        return {"sources": [source.fingerprint() for source in self._sources]}

    def describe(self) -> list[tuple[str, str]]:
        lines = [("sources", f"{len(self.joined_inputs)}, one after the other")]
        for number, source in enumerate(self._sources):
            lines += [(f"  {number}: {label}", text) for label, text in source.describe()]
        return lines

    def finished(self, number: int, data: Payload, rows: IntArray) -> Payload:
        """Rows of a source after its stages, in the columns that all have.

        Args:
            number: of the source.
            data: the rows.
            rows: their numbers in file order within the source, int64 ``[rows]``.
        """
        first = int(self._firsts[self._first_block[number]])
        try:
            made = self._apply[number](Block(data, rows)).data
        except Exception as error:
            mark = getattr(error, "_trainpipes", None)
            if mark is not None and mark[1] is not None:
                error._trainpipes = (mark[0], mark[1] + first)  # type: ignore[attr-defined]
            raise
        return self._alike(number, made)

    def _alike(self, number: int, data: Payload) -> Payload:
        if not len(data):
            return data
        if self._kind is None:
            whose = next(n for n, source in enumerate(self._sources) if source.lengths.any())
            self._kind = (
                (number, columns_of(data)) if whose == number else (whose, self._sample(whose))
            )
        whose, wanted = self._kind
        unlike = difference(wanted, columns_of(data))
        if unlike is None:
            return in_columns(data, wanted) if isinstance(data, pa.Table) else data
        raise SchemaError(
            f"concat(): rows of all sources have the same columns, and source {whose} has {unlike[0]}, "
            f"source {number} {unlike[1]}; bring them in line in the one or the other, by select(), "
            "rename() or map_batches()",
            stage=self._asker,
        )

    def _sample(self, number: int) -> Any:
        """Of what kind the rows of a source are, from its first one."""
        source = self._sources[number]
        block = int(np.flatnonzero(source.lengths)[0])
        reader = source.reader()
        try:
            data = reader.read(block, 0, 1)
        finally:
            reader.close()
        row = np.array([int(source.lengths[:block].sum())])
        return columns_of(self._apply[number](Block(data, row)).data)


class JoinedByNumber(Joined, RandomAccessSource):
    """Several sources whose rows can be had by number."""

    def take(self, index: IntArray) -> Payload:
        starts = self._firsts[self._first_block]
        which = np.searchsorted(starts, index, side="right") - 1
        order = np.argsort(which, kind="stable")
        found, edges = np.unique(which[order], return_index=True)
        parts = []
        for number, places in zip(found.tolist(), np.split(order, edges[1:]), strict=True):
            own = index[places] - starts[number]
            source = self._sources[number]
            assert isinstance(source, RandomAccessSource)
            parts.append(self.finished(number, source.take(own), own))
        if len(parts) < 2:
            return parts[0] if parts else []
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return take_payload(join_payloads(parts), back)


class _JoinedReader:
    """Reads the blocks of several sources."""

    def __init__(self, source: Joined) -> None:
        self._source = source
        self._readers: dict[int, Reader] = {}

    def _reader(self, number: int) -> Reader:
        if number not in self._readers:
            self._readers[number] = self._source._sources[number].reader()
        return self._readers[number]

    def read(self, block: int, start: int, stop: int) -> Payload:
        number, own = self._source.where(block)
        before = int(self._source._firsts[block] - self._source._firsts[block - own])
        rows = np.arange(before + start, before + stop, dtype=np.int64)
        data = self._reader(number).read(own, start, stop)
        return self._source.finished(number, data, rows)

    def expect(self, blocks: Sequence[int]) -> None:
        """Tell each source's reader which of its blocks come next."""
        found: dict[int, list[int]] = {}
        for block in blocks:
            number, own = self._source.where(block)
            found.setdefault(number, []).append(own)
        for number, own_blocks in found.items():
            reader = self._reader(number)
            if isinstance(reader, LooksAhead):
                reader.expect(own_blocks)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
