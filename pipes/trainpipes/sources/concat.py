"""Rows of several pipelines: one after the other (``concat``), side by side (``zip``); and ``windows``:
stretches of neighboring rows, as rows of a source.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal import checks, locks, messages
from trainpipes._internal.checks import ColumnNames, Count, IntArray
from trainpipes.columns import arrays
from trainpipes.columns.columns import table_of
from trainpipes.columns.content import short_digest
from trainpipes.columns.payload import join_payloads
from trainpipes.columns.python_values import array_of, lists_of
from trainpipes.columns.types import CELL, fixed_shape
from trainpipes.engine.planning.column_types import gives_objects
from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.options import instead, is_pipeline
from trainpipes.interfaces.source import LooksAhead, Place, RandomAccessSource, Reader, RowSource
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import CountingStage
from trainpipes.sources.common_columns import CommonColumns
from trainpipes.sources.joined_rows import JoinedByNumber, JoinedRows, Lane, Part


class JoiningSource(kinds.CombiningSource):
    """A stage that reads the rows of several pipelines as a single source."""

    beside: ClassVar[bool] = False

    pipelines: Sequence[Any]

    def check(self) -> None:
        several = isinstance(self.pipelines, list | tuple)
        checks.require(several, f"{self.name}(...)", "one pipeline or more", self.pipelines)
        self._set(pipelines=tuple(self.pipelines))
        others = [part for part in self.pipelines if not is_pipeline(part)]
        way, good = instead(others[0]) if others else "", self.pipelines and not others
        checks.require(good, f"{self.name}(...)", "one pipeline or more", self.pipelines, way)
        for number, pipeline in enumerate(self.pipelines):
            if getattr(pipeline, "_ranks", None) is not None:
                raise ConfigError(
                    f"{self.name}(...): source {number} is distributed(): put that after {self.name}()"
                )
            _check_chain(pipeline.stages, number, self.name)

    @locks.cached_property
    def chains(self) -> Sequence[Sequence[Stage]]:
        return [pipeline.stages for pipeline in self.pipelines]

    def of_chains(self, chains: Sequence[Sequence[Stage]]) -> JoiningSource:
        pairs = zip(self.pipelines, chains, strict=True)
        return self._replaced(pipelines=[type(p)(c) for p, c in pairs])

    def _traits(self) -> dict[str, Any]:
        openers = [opener_of(chain).traits for chain in self.chains]
        names = "has_blocks", "random_access"
        return super()._traits() | {n: all(getattr(o, n) for o in openers) for n in names}

    def open(self) -> RowSource:
        return self.opened([None] * len(self.chains))

    def opened(self, sources: Sequence[RowSource | None]) -> RowSource:
        columns = CommonColumns(self, self.beside)
        chains = enumerate(zip(self.chains, sources, strict=True))
        parts = [Part(number, chain, source, columns) for number, (chain, source) in chains]
        lanes = [Lane([part]) for part in parts] if self.beside else [Lane(parts)]
        by_number = all(isinstance(part.source, RandomAccessSource) for part in parts)
        return (JoinedByNumber if by_number else JoinedRows)(self, lanes)

    def identity(self) -> dict[str, Any]:
        read = [kinds.without(chain, kinds.ListingSource) for chain in self.chains]
        chains = [[stage.identity() for stage in chain] for chain in read]
        return {"stage": self.name, "sources": chains}

    def __repr__(self) -> str:
        return f"{self.name}({', '.join('.'.join(map(repr, chain)) for chain in self.chains)})"


class Concat(JoiningSource):
    """The rows of several pipelines, in turn, as a single source.

    Each pipeline needs a source whose blocks are known in advance, and stages that keep all rows, such as
    ``select``, or ``take`` and ``skip``. A column's types are widened; Python objects and tensors become
    columns where another source gives columns.

    Args:
        pipelines: in this order, as arguments or in a list.

    Raises:
        SchemaError: two pipelines have different columns or types; names both.

    >>> import pyarrow as pa, trainpipes as tp
    >>> old, new = tp.from_arrow(pa.table({"x": [1, 2]})), tp.from_arrow(pa.table({"y": [3]}))
    >>> list(tp.concat(old, new.rename({"y": "x"})))
    [{'x': 1}, {'x': 2}, {'x': 3}]
    """


class Zip(JoiningSource):
    """The columns of several pipelines side by side: row k of each is part of row k.

    Each pipeline needs a source whose rows are counted in advance, and stages that keep all rows, such as
    ``map``, or ``take`` and ``skip``. Tensors and Python objects become columns where another source gives
    columns. ``split`` and ``sample`` without a key go by the rows of the first pipeline.

    Args:
        pipelines: whose columns come in this order; as arguments or in a list.

    Raises:
        DataError: they have different numbers of rows; names both.
        ConfigError: a pipeline cannot be counted, or two have a column of the same name.
        SchemaError: the rows of a pipeline make no columns.

    >>> import numpy as np, pyarrow as pa, trainpipes as tp
    >>> text = tp.from_arrow(pa.table({"text": ["a", "b", "c"]}))
    >>> label = tp.from_tensors(label=np.array([0, 1, 1]))
    >>> list(text.zip(label))[1]
    {'text': 'b', 'label': 1}
    """

    beside = True


def opener_of(chain: Sequence[Stage]) -> kinds.Source:
    opener = next((stage for stage in chain if isinstance(stage, kinds.ReadingSource)), chain[0])
    assert isinstance(opener, kinds.Source)
    return opener


def _check_chain(stages: Sequence[Stage], number: int, caller: str) -> None:
    reader, options = stages.index(opener := opener_of(stages)), opener._above()
    for stage in stages[:reader][1:]:
        if isinstance(stage, kinds.ShuffleStage):
            raise ConfigError(f"{caller}(...): put {stage} after it, where it shuffles all sources")
    for stage in [*options, *stages[reader + 1 :]]:
        # Those that count do so in file order, since all others keep each row.
        if not isinstance(stage, kinds.CountingStage) and not kinds.keeps_each_row(stage):
            several = caller != "windows"
            way = f"put {stage.name}() after {caller}()" + ", for all sources" * several
            if isinstance(stage, kinds.ShuffleStage) and caller == "concat":
                way += (
                    '; or go through one after the other, each shuffled in itself, by mix({"a": a, "b": b}, '
                    'schedule=[(0, {"a": 1, "b": 0}), (ROWS_OF_A, {"a": 0, "b": 1})])'
                )
            if stage.name == "split" and caller == "concat":
                way += '; all parts but one are rows.enumerate().filter(lambda row: row["index"] % 5 != 0)'
            if stage in options:
                way = f" and {way}" if several and stage.name != opener.name else ""
                way = f"leave that option of {opener.name}() out{way}, or write the rows to files first"
            where = f" in source {number}" * several
            raise ConfigError(
                f"{caller}(...): {stage}{where} does not keep each row as it is read, in every epoch: {way}"
            )


_log_once = cache(logging.getLogger("trainpipes").warning)


class Windows(JoiningSource):
    """Windows of ``length`` consecutive rows, such as frames of an episode.

    A window is a row: each column holds the values of its rows, in order: numbers as an array ``[length]``,
    fixed-size lists ``[n, ...]`` as one ``[length, n, ...]``, anything else as a list. The columns of
    ``within`` keep one value. Windows never go from one series into the next, nor over the end of a file,
    and none is cut where shards meet: they are made before rows are shuffled and dealt, so that ``shuffle``
    mixes windows, ``len()`` counts them, and any rank may have any. Rows at the end of a series that fill no
    window are in none; a series shorter than ``length`` has no window, and the log says how many these are.

    Stands before ``shuffle``, ``sharding_filter`` and all that drops rows; stages on columns may come
    before, functions on rows after it. The columns ``within`` are read once, when the pipeline starts.

    Args:
        length: rows of a window.
        stride: rows from one window's start to the next one's; ``length`` if left out.
        within: the column, or several, whose values tell series apart, of integers or texts: rows with the
            same values that stand together are a series. Left out, each file is one.

    Raises:
        ConfigError: it comes after a stage that orders, deals or drops rows, or on Python objects.
        DataError: no series has ``length`` rows, or a value in ``within`` is null.
        SchemaError: there is no such column, or its values are lists, structs or floats.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"episode": [0] * 5 + [1] * 3, "x": range(8)}))
    >>> for row in rows.windows(3, stride=2, within="episode"):
    ...     print(row["episode"], row["x"])
    0 [0 1 2]
    0 [2 3 4]
    1 [5 6 7]

    A window with a null is a list with None. To have arrays alone, fill nulls before:

    >>> import pyarrow.compute as pc
    >>> rows = tp.from_arrow(pa.table({"x": [1.5, None, 2.5]}))
    >>> filled = rows.with_columns(lambda c: {"x": pc.fill_null(c["x"], float("nan"))}, format="arrow")
    >>> next(iter(filled.windows(3)))["x"]
    array([1.5, nan, 2.5])
    """

    length: Count
    _: KW_ONLY
    stride: Count | None = None
    within: ColumnNames | None = None

    def check(self) -> None:
        super().check()
        (chain,) = self.chains
        if gives_objects(chain):
            way = "put functions on rows after windows(), or give the types of what they return by schema="
            if gives_objects(chain[:1]):
                way = "use from_arrow(), or give types of columns, as by from_dataset(schema=pa.schema(...))"
            raise ConfigError(f"windows() takes columns; {chain[-1]} gives Python objects: {way}")

    @locks.cached_property
    def step(self) -> int:
        return self.stride or self.length

    @locks.cached_property
    def names(self) -> list[str]:
        return [] if self.within is None else checks.column_names(self.within, "windows(within)")

    def identity(self) -> dict[str, Any]:
        names = self.names or None
        shaping = {"length": self.length, "stride": self.step, "within": names}
        return {**super().identity(), **{k: v for k, v in shaping.items() if v is not None}}

    def opened(self, sources: Sequence[RowSource | None], starts: Any = None) -> RowSource:
        rows = super().opened(sources)
        assert isinstance(rows, JoinedRows)
        by_number = isinstance(rows, RandomAccessSource)
        return (WindowsByNumber if by_number else WindowRows)(self, rows, starts)

    def telling(self, files: Sequence[str] = ()) -> Windows | None:
        """The same, of the columns ``within`` alone where the reader can leave out all others; of these files
        or this version.
        """
        (chain,) = self.chains
        opener = opener_of(chain)
        first = chain.index(opener)
        later = [stage for stage in chain[first + 1 :] if not _only_chooses(stage)]
        if "columns" not in opener.options or not all(isinstance(s, CountingStage) for s in later):
            return None
        below = [*chain[:first], opener._replaced(columns=self.names)]
        if files:
            below = [s._resolved(only=tuple(files)) if hasattr(s, "only") else s for s in below]
        narrowed = self.of_chains([[*below, *later]])
        assert isinstance(narrowed, Windows)
        return narrowed

    def __repr__(self) -> str:
        options = [f"stride={self.stride}"] if self.stride is not None else []
        options += [f"within={self.within!r}"] if self.within is not None else []
        (chain,) = self.chains
        return f"windows({'.'.join(map(repr, chain))}, {', '.join([str(self.length), *options])})"


def _only_chooses(stage: Stage) -> bool:
    """Whether a stage leaves out columns, and no more."""
    return stage.traits.gives == "choice" and "columns" in stage.options


class WindowRows(RowSource):
    """The windows of some rows. A block has those that begin in a block of the rows.

    ``starts``: the first row of each series, and the end, int64 ``[series + 1]``, if known.
    """

    def __init__(self, stage: Windows, rows: JoinedRows, starts: IntArray | None = None) -> None:
        self.stage, self.rows = stage, rows
        self.joined_inputs = rows.joined_inputs
        self.is_local, self.file_of_block = rows.is_local, rows.file_of_block
        self.starts = _series(stage, rows) if starts is None else starts
        sizes, length = np.diff(self.starts), stage.length
        self._counts = np.where(sizes < length, 0, (sizes - length) // stage.step + 1)
        self._before: IntArray = np.append(0, np.cumsum(self._counts)).astype(np.int64)
        self._first: IntArray = self._windows_before(rows.edges)
        self.lengths = np.diff(self._first)
        self.row_bytes = None if rows.row_bytes is None else rows.row_bytes * length
        if starts is None:
            self._warn_of_short(sizes)

    def __reduce__(self) -> Any:
        return self.stage.opened, ([part.source for part in self.rows.parts], self.starts)

    def _windows_before(self, rows: IntArray) -> IntArray:
        """How many windows begin before each of these rows."""
        if len(self.starts) < 2:
            return np.zeros_like(rows)
        series = np.clip(
            np.searchsorted(self.starts, rows, side="right") - 1, 0, len(self.starts) - 2
        )
        within = -(-(rows - self.starts[series]) // self.stage.step)
        before: IntArray = self._before[series] + np.minimum(within, self._counts[series])
        return before

    def _starts_of(self, windows: IntArray) -> IntArray:
        """The first row of each window."""
        series = np.searchsorted(self._before, windows, side="right") - 1
        starts: IntArray = self.starts[series] + (windows - self._before[series]) * self.stage.step
        return starts

    def _warn_of_short(self, sizes: IntArray) -> None:
        short = int(np.count_nonzero(sizes < self.stage.length))
        if short and short == len(sizes):
            raise DataError(
                "windows(length) must be no more than the rows of a series that stand together, got "
                f"{self.stage.length:,}, and the longest of {short:,} series has {sizes.max():,} rows: sort "
                "rows by series first, or give a smaller length or another within=",
                stage="windows()",
            )
        if short:
            said = f"{short:,} of {len(sizes):,} series are shorter than that, and give no window"
            _log_once(f"windows({self.stage.length}): {said}")

    def made_of(self, table: Any, firsts: IntArray) -> pa.Table:
        """Windows that begin at rows of a table, by column."""
        table = table_of(table, self.stage)
        length = self.stage.length
        rows = (firsts[:, None] + np.arange(length)).reshape(-1)
        columns = {}
        for name in table.column_names:
            column = arrays.one_chunk(table.column(name))
            once = name in self.stage.names
            columns[name] = (
                arrays.gathered(column, firsts)
                if once
                else _grouped(arrays.gathered(column, rows), length)
            )
        return pa.table(columns)

    def reader(self) -> Reader:
        return _WindowReader(self)

    def read_rows(self, reader: Reader, block: int, start: int, stop: int) -> pa.Table:
        first = int(self._first[block])
        firsts = self._starts_of(np.arange(first + start, first + stop, dtype=np.int64))
        if not len(firsts):
            return self.made_of(reader.read(0, 0, 0), firsts)
        low, high = int(firsts[0]), int(firsts[-1]) + self.stage.length
        edges = self.rows.edges
        blocks = range(
            int(np.searchsorted(edges, low, side="right")) - 1, int(np.searchsorted(edges, high))
        )
        parts = []
        for number in blocks:
            begin, end = edges[number : number + 2].tolist()
            if max(low, begin) < min(high, end):
                parts.append(reader.read(number, max(low, begin) - begin, min(high, end) - begin))
        return self.made_of(parts[0] if len(parts) == 1 else join_payloads(parts), firsts - low)

    def fingerprint(self) -> dict[str, Any]:
        digest = short_digest(np.ascontiguousarray(self.starts, "<i8").tobytes())
        return {"windows": int(self._before[-1]), **self.rows.fingerprint(), "series": digest}

    def relative_names(self) -> list[str]:
        return self.rows.relative_names()

    def block_key(self, block: int) -> Any:
        first, stop = self._first[block : block + 2].tolist()
        if first == stop:
            return [[], []]
        last = int(self._starts_of(np.array([stop - 1], dtype=np.int64))[0])
        edges = self.rows.edges
        high = int(np.searchsorted(edges, last + self.stage.length))
        keys = [self.rows.block_key(number) for number in range(block, high)]
        starts = self._starts_of(np.arange(first, stop, dtype=np.int64)) - int(edges[block])
        where = short_digest(np.ascontiguousarray(starts, "<i8").tobytes())
        return None if None in keys else [keys, where, self.stage.length, self.stage.names]

    def place(self, block: int, row: int) -> Place:
        return self.rows.place(*self._rows_of(block, row)[0])

    def places(self, block: int, row: int) -> list[Place]:
        return [place for below in self._rows_of(block, row) for place in self.rows.places(*below)]

    def _rows_of(self, block: int, row: int) -> list[tuple[int, int]]:
        """The block of each row of a window, and the row there."""
        window, edges = int(self._first[block]) + row, self.rows.edges
        rows = self._starts_of(np.array([window])) + np.arange(self.stage.length)
        blocks = np.searchsorted(edges, rows, side="right") - 1
        return [*zip(blocks.tolist(), (rows - edges[blocks]).tolist(), strict=True)]

    def holding(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """The windows that hold some rows, and which of ``rows`` each holds."""
        series = self.starts[np.searchsorted(self.starts, rows, side="right") - 1]
        first = self._windows_before(np.maximum(series, rows - self.stage.length + 1))
        counts = self._windows_before(rows + 1) - first
        return arrays.stretches(first, counts), np.repeat(np.arange(len(rows)), counts)

    def describe(self) -> list[tuple[str, str]]:
        length, step = self.stage.length, self.stage.step
        rows, series = int(self.starts[-1]), len(self.starts) - 1
        covered = np.where(
            self._counts > 0, (self._counts - 1) * min(step, length) + length, 0
        ).sum()
        within = " and ".join(self.stage.names) or "file"
        short = int(np.count_nonzero(self._counts == 0))
        lines = [
            ("windows", f"{int(self._before[-1]):,} of {length:,} rows, every {step:,}"),
            ("series", f"{series:,}, by {within}; {short:,} too short for a window"),
            ("rows", f"{rows:,}, {rows - int(covered):,} of them in no window"),
        ]
        return [*lines, *self.rows.describe()[2:]]


class WindowsByNumber(WindowRows, RandomAccessSource):
    """The same where rows can be read by number."""

    def take(self, index: IntArray) -> pa.Table:
        rows: Any = self.rows
        firsts, length = self._starts_of(index), self.stage.length
        taken = rows.take((firsts[:, None] + np.arange(length)).reshape(-1))
        return self.made_of(taken, np.arange(len(index), dtype=np.int64) * length)


class _WindowReader:
    def __init__(self, source: WindowRows) -> None:
        self._source, self._reader = source, source.rows.reader()

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        return self._source.read_rows(self._reader, block, start, stop)

    def expect(
        self, blocks: Sequence[int], turns: Sequence[float] = (), most: float = math.inf
    ) -> None:
        if isinstance(self._reader, LooksAhead):
            self._reader.expect(blocks, turns, most)

    def close(self) -> None:
        self._reader.close()


def _grouped(values: pa.Array, length: int) -> pa.Array:
    """Values in lists of ``length``: of numbers, arrays ``[length, ...]`` where rows become Python."""
    kind, count = values.type, len(values) // length
    shape = () if arrays.is_number(kind) else fixed_shape(kind)
    if shape is None:
        offsets = arrays.to_arrow(np.arange(count + 1, dtype=np.int32) * np.int32(length))
        return pa.ListArray.from_arrays(offsets, values)
    numbers = (array_of if shape else _without_nulls)(values)
    if numbers is not None:
        return lists_of(numbers.reshape(count, length, *shape))
    if isinstance(kind, pa.FixedShapeTensorType):
        kind, values = kind.storage_type, values.storage
    return pa.FixedSizeListArray.from_arrays(values, type=pa.list_(pa.field(CELL, kind), length))


def _without_nulls(values: pa.Array) -> arrays.Array | None:
    return None if values.null_count else arrays.to_numpy(values)


def _series(stage: Windows, rows: JoinedRows) -> IntArray:
    """The first row of each series, and the end, int64 ``[series + 1]``."""
    files = rows.file_of_block
    assert files is not None
    edges, total = rows.edges, int(rows.edges[-1])
    new_file = np.flatnonzero(np.diff(files, prepend=-1))
    starts = [edges[new_file]]
    if stage.names:
        telling = stage.telling(rows.parts[0].source.epoch_files)
        narrow = rows if telling is None else JoiningSource.opened(telling, [None])
        starts += _changes(stage, narrow)
    firsts = np.unique(np.concatenate(starts)).astype(np.int64)
    return np.append(firsts[firsts < total], total)


def _changes(stage: Windows, rows: Any) -> Iterator[IntArray]:
    """The rows whose values in the columns ``within`` are not those of the row before."""
    reader, before = rows.reader(), None
    try:
        for block, count in enumerate(rows.lengths.tolist()):
            if not count:
                continue
            table = table_of(reader.read(block, 0, count), stage)
            messages.need_columns(table.column_names, stage.names, stage)
            whole = table.select(stage.names)
            _check_values(stage, whole, lambda row, block=block: rows.place(block, row))
            joined = whole if before is None else pa.concat_tables([before, whole])
            changed = np.zeros(len(joined) - 1, dtype=np.bool_)
            for column in joined.columns:
                values = arrays.one_chunk(column)
                values = values.storage if isinstance(values, pa.ExtensionArray) else values
                changed |= arrays.to_numpy(pc.not_equal(values[1:], values[:-1]))
            first = int(rows.edges[block]) + (1 if before is None else 0)
            yield np.flatnonzero(changed) + first
            before = whole.slice(count - 1)
    finally:
        reader.close()


def _check_values(stage: Windows, table: pa.Table, place: Any) -> None:
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind, is_ = column.type, pa.types
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        if any(of(kind) for of in (is_.is_nested, is_.is_floating, is_.is_null, is_.is_interval)):
            rule = f"column {name!r} tells series apart by integers or texts, got {column.type}"
            raise SchemaError(f"windows(within={stage.within!r}): {rule}", stage="windows()")
        if column.null_count:
            at = place(int(np.flatnonzero(arrays.to_numpy(column.is_null()))[0]))
            way = "fill it with map_batches(), or give another column"
            said = f"column {name!r} is null, which tells no series: {way} (at {at})"
            raise DataError(f"windows(within={stage.within!r}): {said}", stage="windows()")
