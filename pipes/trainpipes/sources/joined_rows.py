"""Rows of several pipelines as a single source: lanes side by side, each of pipelines in turn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import IntArray
from trainpipes.columns.arrays import parts_of
from trainpipes.columns.block import Block
from trainpipes.columns.payload import Payload, join_payloads, take_payload
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.planning.column_types import ColumnTypes
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.plan import arrange
from trainpipes.engine.planning.row_names import file_names
from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.interfaces.contents import cache_key
from trainpipes.interfaces.source import (
    LooksAhead,
    Place,
    RandomAccessSource,
    Reader,
    RowSource,
    Taker,
    read_rows,
)
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import put_through
from trainpipes.sources.common_columns import Alike, CommonColumns

#: Blocks of a lane that a block is cut of, up to which they are asked for together although not all may be
#: needed.
FEW_BLOCKS = 3
NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)
#: What a state says of files of which the first rows are left out: ``sample`` and ``split`` know rows by
#: their numbers in a file.
COUNTED = {"row_numbers": "skipped rows counted"}


class Part:
    """One pipeline's rows with their stages; row 0 comes after ``skipped`` rows of the source."""

    def __init__(
        self, number: int, stages: Sequence[Stage], source: RowSource | None, columns: CommonColumns
    ) -> None:
        self.number, self._columns = number, columns
        self.inputs = Inputs(arrange([stage._fresh() for stage in stages]), source)
        if not isinstance(self.inputs.source, RowSource):
            raise ConfigError(
                f"{columns.stage.name}(...) takes sources whose rows are counted before they are read, and "
                f"source {number}, {self.inputs.chain.stages[0]}, is a stream: write its rows to files "
                "first, by write_parquet()"
            )
        steps = self.inputs.chain.steps
        columns.parts[number] = self.inputs, steps
        self._steps = *steps, Alike(columns, number)
        self.source, blocks = self.inputs.source, self.inputs.blocks
        # Of each block, rows that are used: all, but for ``take`` and ``skip``.
        self._begins, self.lengths, self.rows = blocks.begins, blocks.lengths, blocks.rows
        self._starts = blocks.firsts[:-1] + blocks.begins  # each block's first row that is used
        used = np.flatnonzero(self.lengths)
        self.skipped = int(self._starts[used[0]]) if len(used) else 0
        self.first = 0  # row 0's number in its lane
        self._key: list[Any] | None = None

    def read(self, reader: Reader, block: int, start: int, stop: int) -> Payload:
        """Rows of a block after the pipeline's stages."""
        begin, first = int(self._begins[block]), int(self._starts[block])
        data = read_rows(self.source, reader, block, begin + start, begin + stop)
        return self._finished(data, np.arange(first + start, first + stop, dtype=np.int64))

    def take(self, taker: Taker, index: IntArray) -> Payload:
        numbers = index + self.skipped
        return self._finished(taker.take(numbers), numbers)

    def _finished(self, data: Payload, rows: IntArray) -> Payload:
        try:
            return put_through(self._steps, Block(data, rows)).data
        except Exception as error:
            mark = getattr(error, "_trainpipes", None)
            if mark is not None and mark[1] is not None:
                if not hasattr(error, "_place"):
                    error._place = self.inputs.place_of(mark[1])  # type: ignore[attr-defined]
                error._trainpipes = (mark[0], mark[1] - self.skipped + self.first)  # type: ignore[attr-defined]
            raise

    def block_key(self, block: int) -> list[Any] | None:
        key = self.source.block_key(block)
        if key is None:
            return None
        if self._key is None:  # once: values that functions hold may change from call to call
            chain = self.inputs.chain
            stages = chain.stages[chain.stages.index(chain.opener) :]
            finds_types = any(stage.traits.gives == "found types" for stage in stages)
            types = self.inputs.first_keys() if finds_types else []
            self._key = [*cache_key(stages, self._columns.stage.name), types]
        return [key, self._key, str((self._columns.wanted or {}).get(self.number))]


class Lane:
    """The rows of some pipelines, in turn."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.edges: IntArray = np.append(0, np.cumsum(self.lengths)).astype(np.int64)
        self.firsts: IntArray = np.cumsum([0, *(part.rows for part in parts)], dtype=np.int64)
        for part, first in zip(parts, self.firsts.tolist(), strict=False):
            part.first = first
        self._blocks = np.cumsum([0, *(len(part.lengths) for part in parts)])
        self.by_number = all(isinstance(part.source, RandomAccessSource) for part in parts)
        sizes = [part.source.row_bytes for part in parts]
        self.row_bytes: Any = sizes[0]
        if len(parts) > 1:
            known = None not in sizes and self.firsts[-1]
            total = sum(part.rows * (size or 0) for part, size in zip(parts, sizes, strict=True))
            self.row_bytes = total / int(self.firsts[-1]) if known else None
        self.block_bytes: Any = None  # float64 [blocks]
        blocks: list[Any] = [part.source.block_bytes for part in parts]
        if all(each is not None for each in blocks):
            used = [part.lengths / np.maximum(1, part.source.lengths) for part in parts]
            self.block_bytes = np.concatenate([a * b for a, b in zip(blocks, used, strict=True)])

    def cut(self, start: int, stop: int) -> list[tuple[Part, int, int, int]]:
        """The blocks that rows ``start`` to ``stop`` lie in: of which part, number, first row, and stop."""
        first = max(0, int(np.searchsorted(self.edges, start, side="right")) - 1)
        last = int(np.searchsorted(self.edges, stop, side="left"))
        stretches = []
        for block in range(min(first, len(self.lengths) - 1), max(first + 1, last)):
            begin, end = self.edges[block : block + 2].tolist()
            low, high = max(start, begin) - begin, min(stop, end) - begin
            if low < high or start == stop:
                number = int(np.searchsorted(self._blocks, block, side="right")) - 1
                inner = block - int(self._blocks[number])
                stretches.append((self.parts[number], inner, low, max(low, high)))
        return stretches

    def split(self, index: IntArray) -> tuple[list[tuple[Part, IntArray]], IntArray | None]:
        """Rows by part, numbered there; and where each then stands, unless they are in order."""
        if len(self.parts) == 1:
            return [(self.parts[0], index)], None
        parts, back = parts_of(self.firsts, index)
        return [(self.parts[n], rows) for n, rows in parts], back

    def take(self, takers: Mapping[Part, Taker], index: IntArray) -> Payload:
        parts, back = self.split(index)
        payloads = [part.take(takers[part], rows) for part, rows in parts]
        if back is None:
            return payloads[0]
        return take_payload(join_payloads(payloads), back) if payloads else []

    def inputs_of(self, row: int) -> tuple[Inputs, int]:
        """The pipeline that a row is of, and its number in the source there."""
        part = self.parts[int(np.searchsorted(self.firsts, row, side="right")) - 1]
        return part.inputs, row - part.first + part.skipped


class JoinedRows(RowSource):
    """The rows of ``concat`` (one lane) and ``zip`` (lanes side by side)."""

    def __init__(self, stage: Any, lanes: Sequence[Lane]) -> None:
        self.stage, self.lanes = stage, lanes
        self.parts = [part for lane in lanes for part in lane.parts]
        self.joined_inputs = [part.inputs for part in self.parts]
        self.is_local = all(getattr(part.source, "is_local", True) for part in self.parts)
        if stage.beside:
            self._check_counts()
        cuts = _best(lanes)
        self.edges, self.lengths = cuts.edges, cuts.lengths
        sizes = [lane.row_bytes for lane in lanes]
        self.row_bytes = None if None in sizes else sum(sizes)
        self.block_bytes = self._block_bytes()
        if stage.beside:
            self.named_by = self.parts[0].inputs, self.parts[0].skipped
            known = [ColumnTypes(part.inputs).known(part.inputs.chain.steps) for part in self.parts]
            self._check_names([[] if schema is None else schema.names for schema in known])
            if None not in known:
                self.schema = pa.schema([field for schema in known for field in schema])  # type: ignore[union-attr]
        else:
            self._names: list[str] = []
            self._first_files: list[int] = []  # of each part
            files, skipped = [], [NO_ROWS]
            for part in self.parts:
                file_of_block, names = part.source.file_of_block, file_names(part.inputs)
                if file_of_block is None:
                    file_of_block = np.zeros_like(part.lengths)
                self._first_files.append(len(self._names))
                files.append(file_of_block + len(self._names))
                self._names += [f"{part.number}/{name}" for name in names]
                block = np.searchsorted(file_of_block, np.arange(len(names)))
                before = np.maximum(0, part.skipped - part.inputs.blocks.firsts[block])
                skipped.append(before + getattr(part.source, "skipped_rows", 0))
            self.file_of_block = np.concatenate(files)
            self.skipped_rows: IntArray = np.concatenate(skipped)  # of each file
            self._is_begun = self.skipped_rows[self.file_of_block] > 0  # of each block

    def __reduce__(self) -> Any:
        return self.stage.opened, ([part.source for part in self.parts],)

    def reader(self) -> Reader:
        return _JoinedReader(self)

    def fingerprint(self) -> dict[str, Any]:
        begun = not self.stage.beside and self._is_begun[self.lengths > 0].any()
        sources = [part.source.fingerprint() for part in self.parts]
        return {"sources": sources, **(COUNTED if begun else {})}

    def relative_names(self) -> list[str]:
        return self._names

    def deleted_rows(self, file: int) -> IntArray:
        number = int(np.searchsorted(self._first_files, file, side="right")) - 1
        source = self.parts[number].source
        deleted_of = getattr(source, "deleted_rows", None)
        if deleted_of is None or source.file_of_block is None:  # of zip() it has no files
            return NO_ROWS
        deleted: IntArray = deleted_of(file - self._first_files[number])
        return deleted

    def place(self, block: int, row: int) -> Place:
        inputs, row_below = self.lanes[0].inputs_of(int(self.edges[block]) + row)
        return self._counted(inputs.place_of(row_below), block, row)

    def places(self, block: int, row: int) -> list[Place]:
        places = []
        for number, lane in enumerate(self.lanes):
            inputs, row_below = lane.inputs_of(int(self.edges[block]) + row)
            for place in inputs.places_of(row_below):
                if self.stage.beside:
                    source = f"{number}" + (f"/{place.source}" if place.source else "")
                    places.append(replace(place, source=source))
                else:
                    places.append(self._counted(place, block, row))
        return [*dict.fromkeys(places)]

    def _counted(self, place: Place, block: int, row: int) -> Place:
        """Of rows one after the other, those without a file are counted over all, as ``find`` takes them."""
        if self.stage.beside or place.path is not None or place.source is not None:
            return place
        return replace(place, row=int(self.edges[block]) + row)

    def block_key(self, block: int) -> Any:
        start, stop = self.edges[block : block + 2].tolist()
        cuts = [cut for lane in self.lanes for cut in lane.cut(start, stop)]
        keys = [[part.block_key(inner), low, high] for part, inner, low, high in cuts]
        if any(key is None for key, _, _ in keys):
            return None
        begun = not self.stage.beside and self._is_begun[block]
        return [*keys, COUNTED] if begun else keys

    def describe(self) -> list[tuple[str, str]]:
        how = "side by side" if self.stage.beside else "one after the other"
        lines = [("sources", f"{len(self.parts)}, {how}"), ("rows", f"{self.edges[-1]:,}")]
        if count := len(self.lengths):
            lines.append(("blocks", f"{count:,} of up to {self.lengths.max():,} rows"))
        for part in self.parts:
            each = part.source.describe()
            lines += [(f"  {part.number}: {label}", text) for label, text in each]
        return lines

    def joined(self, columns: Sequence[Any]) -> Payload:
        if len(columns) == 1:
            return columns[0]
        if all(isinstance(payload, pa.Table) for payload in columns):
            self._check_names([payload.column_names for payload in columns])
            fields = [field for payload in columns for field in payload.schema]
            whole = [column for payload in columns for column in payload.columns]
            return pa.table(whole, schema=pa.schema(fields))
        if all(isinstance(payload, TensorRows) for payload in columns):
            tensors = tuple(tensor for payload in columns for tensor in payload.tensors)
            names = [payload.names for payload in columns if payload.names is not None]
            if 0 < len(names) < len(columns):
                raise self._unlike("tensors with names beside tensors without")
            self._check_names(names)
            return TensorRows(
                tensors, tuple(n for part_names in names for n in part_names) if names else None
            )
        if all(isinstance(payload, list) for payload in columns):
            return [self._row(row) for row in zip(*columns, strict=True)]
        raise self._unlike("rows of different kinds")

    def _row(self, rows: Sequence[Any]) -> Any:
        if all(isinstance(row, tuple) for row in rows):
            return tuple(value for row in rows for value in row)
        odd = next((row for row in rows if not isinstance(row, Mapping)), None)
        if odd is not None:
            raise self._unlike(f"a row that is no dict, but a {type(odd).__name__}")
        joined = {name: value for row in rows for name, value in row.items()}
        if len(joined) < sum(map(len, rows)):
            self._check_names([list(row) for row in rows])
        return joined

    def _block_bytes(self) -> Any:
        if len(self.lanes) == 1 or all(lane.block_bytes is None for lane in self.lanes):
            return self.lanes[0].block_bytes
        nbytes = np.zeros(len(self.lengths))
        for lane in self.lanes:
            if lane.block_bytes is None:
                nbytes += self.lengths * (lane.row_bytes or 0.0)
            else:
                before = np.append(0.0, np.cumsum(lane.block_bytes))
                nbytes += np.diff(np.interp(self.edges, lane.edges, before))
        return nbytes

    # What is refused

    def _check_counts(self) -> None:
        rows = [part.rows for part in self.parts]
        odd = next((n for n, count in enumerate(rows) if count != rows[0]), None)
        if odd is not None:
            openers = [self.parts[n].inputs.chain.stages[0] for n in (0, odd)]
            raise DataError(
                f"zip(...) puts row k of each source beside row k of the others, and source 0, {openers[0]}, "
                f"has {rows[0]:,} rows, source {odd}, {openers[1]}, {rows[odd]:,}: give it the files that "
                f"belong together, or cut the longer one by take({min(rows[0], rows[odd])})",
                stage=str(self.stage),
            )

    def _check_names(self, names: Sequence[Sequence[str]]) -> None:
        owner: dict[str, int] = {}
        for number, part_names in enumerate(names):
            for name in part_names:
                if owner.setdefault(name, number) != number:
                    raise ConfigError(
                        f"zip(...): sources {owner[name]} and {number} both have a column {name!r}: give it "
                        f"another name in one of them, .rename({{{name!r}: ...}}), or leave it out there, by "
                        "select() or drop_columns()",
                        stage=str(self.stage),
                    )

    def _unlike(self, kinds: str) -> SchemaError:
        return SchemaError(
            "zip(...) puts columns side by side, so that rows are dicts in all sources, or tuples in "
            f"all, got {kinds}: make dicts with map() first",
            stage=str(self.stage),
        )


class JoinedByNumber(JoinedRows, RandomAccessSource):
    """The same where all sources read rows by number."""

    def __init__(self, stage: Any, lanes: Sequence[Lane]) -> None:
        super().__init__(stage, lanes)
        sources: list[Any] = [part.source for part in self.parts]
        self.by_number = stage.beside and all(source.by_number for source in sources)
        self.holds_numbers = stage.beside and all(source.holds_numbers for source in sources)

    def take(self, index: IntArray) -> Payload:
        return self.taker().take(index)

    def taker(self) -> Taker:
        return _JoinedTaker(self)

    def will_need(self, start: int, stop: int) -> None:
        for part in self.parts if self.by_number else ():
            assert isinstance(part.source, RandomAccessSource)
            part.source.will_need(start + part.skipped, stop + part.skipped)


class _JoinedTaker:
    """Takes rows by number, of all sources at the same time where they are on other machines."""

    def __init__(self, source: JoinedByNumber) -> None:
        sources: list[Any] = [part.source for part in source.parts]
        self._source = source
        self._takers = {p: s.taker() for p, s in zip(source.parts, sources, strict=True)}

    def take(self, index: IntArray) -> Payload:
        if not self._source.is_local:
            self.coming(index)
        return self._source.joined([lane.take(self._takers, index) for lane in self._source.lanes])

    def coming(self, index: IntArray) -> None:
        for lane in self._source.lanes:
            for part, rows in lane.split(index)[0]:
                self._takers[part].coming(rows + part.skipped)


class _JoinedReader:
    """Reads blocks of all lanes, and puts their columns side by side."""

    def __init__(self, source: JoinedRows) -> None:
        self._source = source
        self._readers: dict[int, Reader] = {}

    def _reader(self, part: Part) -> Reader:
        if part.number not in self._readers:
            self._readers[part.number] = part.source.reader()
        return self._readers[part.number]

    def read(self, block: int, start: int, stop: int) -> Payload:
        first, columns = int(self._source.edges[block]), []
        for lane in self._source.lanes:
            rows = [
                part.read(self._reader(part), inner, low, high)
                for part, inner, low, high in lane.cut(first + start, first + stop)
            ]
            columns.append(rows[0] if len(rows) == 1 else join_payloads(rows))
        return self._source.joined(columns)

    def expect(
        self, blocks: Sequence[int], turns: Sequence[float] = (), most: float = math.inf
    ) -> None:
        """Tell each source's reader its next blocks, without many small ones of which it may need a part."""
        wanted: dict[Part, dict[int, float]] = {}
        for block, turn in zip(blocks, turns or repeat(0.0), strict=False):
            start, stop = self._source.edges[block : block + 2].tolist()
            for lane in self._source.lanes:
                cuts = lane.cut(start, stop)
                if len(cuts) <= FEW_BLOCKS or block not in (blocks[0], blocks[-1]):
                    for part, inner, _, _ in cuts:
                        wanted.setdefault(part, {}).setdefault(inner, turn)
        for part, numbers in wanted.items():
            reader = self._reader(part)
            if isinstance(reader, LooksAhead):
                reader.expect(list(numbers), list(numbers.values()), most)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


def _best(lanes: Sequence[Lane]) -> Lane:
    """The lane at whose blocks' ends the fewest rows are decoded twice."""
    cut_by_blocks = [lane for lane in lanes if not lane.by_number]

    def again(cuts: IntArray) -> int:
        total = 0
        for lane in cut_by_blocks:
            block = np.searchsorted(lane.edges, cuts, side="right") - 1
            total += int(lane.lengths[block[~np.isin(cuts, lane.edges)]].sum())
        return total

    return min(cut_by_blocks or lanes, key=lambda lane: again(lane.edges))
