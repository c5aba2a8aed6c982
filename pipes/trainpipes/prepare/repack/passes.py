"""The passes of a shuffle on disk, each a list of tasks that make files.

What a file holds follows from its task alone, so tasks are done in any order, by threads, processes or a
cluster, and again after a kill. See ``shuffle`` for the arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes.engine.layout import IntArray
from trainpipes.engine.permutation import Permutation
from trainpipes.errors import DataError, SchemaError
from trainpipes.prepare.repack.pieces import (
    PieceIndex,
    Pieces,
    PieceWriter,
    damaged,
    piece_file,
    read_pieces,
    read_ranges,
    size_of,
)
from trainpipes.prepare.repack.shuffle import (
    bucket_edges,
    gather,
    group_edges,
    groups_of,
    part_edges,
    scatter,
    take_rows,
)
from trainpipes.storage.executor import Executor
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.output_folder import FileInfo, Manifest, OutputFolder, run
from trainpipes.storage.places import LocalPlace, Place
from trainpipes.storage.writers.epoch_rows import EpochRows

CALLER = "repack"
#: Bytes of a row group in memory, and its rows, at most, where the user does not count them.
GROUP_BYTES, GROUP_ROWS = 8 << 20, 16_384
#: Bytes that a task works on at once, at most: more would not fit into the offsets of Arrow's texts.
MOST_UNIT = 512 << 20
#: Bytes of a piece, on average at least: of a file on this machine, and of one that a server sends.
LEAST_HERE, LEAST_THERE = 128 << 10, 1 << 20


@dataclass(frozen=True)
class Places:
    """Where rows go, by their numbers.

    Attributes:
        rows: how many go somewhere.
        seed: of the shuffle.
        listed: the folder with the file that says it row by row; None where they follow from the seed.
    """

    rows: int
    seed: int
    listed: Place | None = None

    @cached_property
    def _order(self) -> Permutation:
        return Permutation(self.rows, self.seed, CALLER)

    def __call__(self, first: int, stop: int) -> IntArray:
        """The places of rows ``first`` to ``stop``; -1 for those that are dropped."""
        if self.listed is None:
            return self._order(np.arange(first, stop, dtype=np.int64))
        (content,) = read_ranges(self.listed, [PLACES_FILE], [8 * first], [8 * stop])
        if len(content) != 8 * (stop - first):
            raise damaged(self.listed, f"{self.listed.at(PLACES_FILE)} is too short")
        return np.frombuffer(content, dtype=np.int64)


#: The file that says where rows go.
PLACES_FILE = "part-00000.places"


@dataclass(frozen=True)
class PartTask:
    """Rows of the input that one task reads."""

    number: int
    first: int
    stop: int

    @property
    def name(self) -> str:
        return piece_file(self.number)

    def __str__(self) -> str:
        return f"rows {self.first:,} to {self.stop:,} of the input"


@dataclass(frozen=True)
class ScatterPart:
    """Makes a file of pieces of a part of the input.

    Attributes:
        schema: of the rows.
        places: where they go.
        edges: of the buckets.
        unit: bytes of rows that are worked on at once.
    """

    schema: pa.Schema
    places: Places
    edges: IntArray
    unit: int

    def __call__(self, task: PartTask, file: OutputFile, rows: EpochRows) -> FileInfo:
        writer = PieceWriter(file)
        at = task.first
        rows.open_part(task.first, task.stop)
        with closing(rows):
            for tables in few_rows(rows, task.stop - task.first, self.unit):
                check_columns(self.schema, tables[0].schema, at)
                count = sum(map(len, tables))
                writer.write(scatter(tables, self.places(at, at + count), self.edges))
                file.advance(count)
                at += count
        if at != task.stop:
            raise DataError(
                f"{CALLER}(): the input has {at - task.first:,} rows from row {task.first:,} on, and "
                f"{task.stop - task.first:,} were counted before: it has changed; call again"
            )
        return writer.info()


def few_rows(rows: EpochRows, count: int, size: int) -> Iterator[list[pa.Table]]:
    """Up to so many rows, as lists of tables of so many bytes, about."""
    held: list[pa.Table] = []
    held_bytes = 0
    while count and (table := rows.some()) is not None:
        table = table.slice(0, count)
        held.append(table)
        count, held_bytes = count - len(table), held_bytes + table.nbytes
        del table
        if held_bytes >= size:
            yield held
            held, held_bytes = [], 0
    if held:
        yield held


def check_columns(schema: pa.Schema, found: pa.Schema, row: int) -> None:
    """Raise SchemaError where rows have other columns than the first ones."""
    if not found.equals(schema):
        raise SchemaError(
            f"{CALLER}(): rows must all have the same columns, got {_said(found)} from row {row:,} on, after "
            f"{_said(schema)}; bring them in line by map(), select() or map_batches()",
            stage=CALLER,
        )


def _said(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


@dataclass(frozen=True)
class GroupTask:
    """Pieces of a group of buckets that one task takes apart."""

    number: int
    pieces: Pieces
    edges: IntArray

    @property
    def name(self) -> str:
        return piece_file(self.number)

    def __str__(self) -> str:
        return f"rows that go to {self.edges[0]:,} to {self.edges[-1]:,}"


@dataclass(frozen=True)
class ScatterGroup:
    """Makes a file of pieces of some of a group's pieces."""

    place: Place

    def __call__(self, task: GroupTask, file: OutputFile) -> FileInfo:
        writer = PieceWriter(file)
        tables = read_pieces(self.place, task.pieces)
        file.advance(0)
        writer.write(take_rows(tables, task.edges))
        return writer.info()


@dataclass(frozen=True)
class FileTask:
    """An output file: for each bucket of its rows, where the bucket begins and ends, and its pieces."""

    number: int
    buckets: list[tuple[int, int, Pieces]]

    @property
    def name(self) -> str:
        return f"part-{self.number:05d}.parquet"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class GatherFile:
    """Makes an output file.

    Attributes:
        place: of the files of pieces.
        group_rows: rows of a row group.
        options: of the Parquet files.
        metadata: of their schema.
    """

    place: Place
    group_rows: int
    options: dict[str, Any]
    metadata: dict[bytes, bytes] | None

    def __call__(self, task: FileTask, file: OutputFile) -> FileInfo:
        writer = None
        rows = groups = 0
        columns: dict[str, str] = {}
        try:
            for group in groups_of(self._tables(task), self.group_rows):
                if writer is None:
                    schema = group.schema.with_metadata(self.metadata)
                    writer = pq.ParquetWriter(file, schema, **self.options)
                    columns = {field.name: str(field.type) for field in schema}
                writer.write_table(group, row_group_size=len(group))
                file.advance(len(group))
                rows, groups = rows + len(group), groups + 1
        finally:
            if writer is not None:
                writer.close()
        return FileInfo(rows, columns, notes={"row_groups": groups})

    def _tables(self, task: FileTask) -> Iterator[pa.Table]:
        for first, stop, pieces in task.buckets:
            table = gather(read_pieces(self.place, pieces), first, stop)
            if table is None:
                raise damaged(self.place, f"rows {first:,} to {stop:,} are not all there once")
            yield table
            del table


@dataclass(frozen=True)
class Job:
    """A shuffle on disk.

    Attributes:
        rows: of the input, counted.
        count: how many there are.
        blocks: rows of each block that the input is read by, where these are read in their order.
        row_bytes: of a row in memory, about.
        schema: of the rows.
        places: where they go.
        starts: the place of the first row of each output file, and the end.
        unit: bytes of rows that a task works on at once.
        temporary: where files are in between.
        about: what is done, so that a next call knows whether it can go on.
    """

    rows: EpochRows
    count: int
    blocks: IntArray | None
    row_bytes: float
    schema: pa.Schema
    places: Places
    starts: IntArray
    unit: int
    temporary: Place
    about: dict[str, Any]

    def run(
        self, out: OutputFolder, executor: Executor, readers: Executor, form: GatherFile, group_rows: int | None
    ) -> Manifest:
        """Do it.

        Args:
            out: the folder, entered.
            executor: does the tasks, but for those that read the input; these do
            readers.
            form: of the output files.
            group_rows: rows of a row group, where the user counts them.
        """
        parts = part_edges(self.count, int(self.unit // self.row_bytes), self.blocks)
        buckets = bucket_edges(self.starts, max(1, int(self.unit // self.row_bytes)))
        least = LEAST_HERE if isinstance(self.temporary, LocalPlace) else LEAST_THERE
        size = self.row_bytes * self.count
        edges = group_edges(buckets, len(parts) - 1, size, least)
        tasks = [PartTask(n, a, b) for n, (a, b) in enumerate(pairwise(parts.tolist()))]
        with self._folder("scattered") as folder:
            found = run(
                tasks, ScatterPart(self.schema, self.places, edges, self.unit), folder, readers,
                open_state=partial(copy.copy, self.rows), total=self.count, job="reading for",
            )  # fmt: skip
        size = size_of(found)
        rows = self.places.rows
        real = max(1, int(self.unit * rows // max(1, size)))  # rows of a bucket
        index: dict[int, PieceIndex] = {}
        if len(edges) < len(buckets) or 2 * real < np.diff(buckets).max():
            fine = np.union1d(bucket_edges(self.starts, real), edges)
            ...
