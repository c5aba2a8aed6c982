"""The passes of a shuffle on disk, each a list of tasks that make files; see ``shuffle`` for the
arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from trainpipes.engine.layout import IntArray
from trainpipes.engine.permutation import Permutation
from trainpipes.errors import DataError
from trainpipes.prepare.repack.pieces import (
    PieceIndex,
    Pieces,
    PieceWriter,
    below,
    damaged,
    discard,
    piece_file,
    read_pieces,
    read_ranges,
    size_of,
)
from trainpipes.prepare.repack.shuffle import (
    bucket_edges,
    drop_places,
    gather,
    group_edges,
    groups_of,
    inner_edges,
    part_edges,
    scatter,
)
from trainpipes.state.cursor import checksum
from trainpipes.storage.executor import Executor
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.output_folder import FileInfo, Manifest, OutputFolder, run
from trainpipes.storage.places import LocalPlace, Place
from trainpipes.storage.writers.epoch_rows import EpochRows, check_columns
from trainpipes.storage.writers.formats import ParquetForm

CALLER = "repack"
#: Bytes that a task works on at once, at most: more would not fit into the offsets of Arrow's texts.
MOST_UNIT = 512 << 20
#: Bytes of a piece, on average at least: of a file on this machine, and of one that a server sends.
LEAST_HERE, LEAST_THERE = 128 << 10, 1 << 20
#: Rows of the input that are worth a task of their own.
LEAST_PART = 8192
#: The file that says where rows go.
PLACES_FILE = "part-00000.places"


@dataclass(frozen=True)
class Places:
    rows: int
    seed: int
    listed: Place | None = (
        None  # the folder of a file that says it; None where it follows from the seed
    )

    @cached_property
    def _order(self) -> Permutation:
        return Permutation(self.rows, self.seed, CALLER)

    def __call__(self, first: int, stop: int) -> IntArray:
        if self.listed is None:
            return self._order(np.arange(first, stop, dtype=np.int64))
        (content,) = read_ranges(self.listed, [PLACES_FILE], [8 * first], [8 * stop])
        if len(content) != 8 * (stop - first):
            raise damaged(self.listed, f"{self.listed.at(PLACES_FILE)} is too short")
        return np.frombuffer(content, dtype=np.int64)


@dataclass(frozen=True)
class PartTask:
    name: str
    first: int
    stop: int

    def __str__(self) -> str:
        return f"rows {self.first:,} to {self.stop:,} of the input"


@dataclass(frozen=True)
class ScatterPart:
    schema: pa.Schema
    places: Places
    edges: IntArray  # of the buckets
    unit: int  # bytes of rows that are worked on at once

    def __call__(self, task: PartTask, file: OutputFile, rows: EpochRows) -> FileInfo:
        writer = PieceWriter(file)
        at = task.first
        rows.open_part(task.first, task.stop)
        with closing(rows):
            for tables in few_rows(rows, task.stop - task.first, self.unit):
                check_columns(self.schema, tables[0].schema, CALLER, f" from row {at:,} on")
                count = sum(map(len, tables))
                writer.write(scatter(tables, self.places(at, at + count), self.edges))
                pa.default_memory_pool().release_unused()
                file.advance(count)
                at += count
        if at != task.stop:
            raise changed(task, at)
        return writer.info()


def changed(task: PartTask, at: int) -> DataError:
    return DataError(
        f"{CALLER}(): the input has {at - task.first:,} rows from row {task.first:,} on, and "
        f"{task.stop - task.first:,} were counted before: it has changed; call again"
    )


def few_rows(rows: EpochRows, count: int, size: int) -> Iterator[list[pa.Table]]:
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


@dataclass(frozen=True)
class GroupTask:
    name: str
    edges: IntArray
    pieces: Pieces

    def __str__(self) -> str:
        return f"rows that go to {self.edges[0]:,} to {self.edges[-1]:,}"


@dataclass(frozen=True)
class ScatterGroup:
    place: Place

    def __call__(self, task: GroupTask, file: OutputFile, _: None) -> FileInfo:
        tables = read_pieces(self.place, task.pieces)
        places = drop_places(tables)
        file.advance(len(places))
        writer = PieceWriter(file)
        writer.write(scatter(tables, places, task.edges))
        return writer.info()


class Bucket(NamedTuple):
    """Rows that come after each other in the result: the places of the first and after the last, and the
    pieces that they are in, of the files in one of several folders."""

    first: int
    stop: int
    folder: int
    pieces: Pieces


@dataclass(frozen=True)
class FileTask:
    name: str
    buckets: list[Bucket]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class GatherFile:
    folders: Sequence[Place]
    schema: pa.Schema
    form: ParquetForm

    def __call__(self, task: FileTask, file: OutputFile, _: None) -> FileInfo:
        writer = self.form.open(file, self.schema)
        rows = 0
        with closing(writer):
            for group in groups_of(self._tables(task), self.form.rows):
                writer.write(group, rows)
                rows += len(group)
                file.advance(len(group))
        return FileInfo(rows, writer.columns)

    def _tables(self, task: FileTask) -> Iterator[pa.Table]:
        for bucket in task.buckets:
            place = self.folders[bucket.folder]
            table = gather(read_pieces(place, bucket.pieces), bucket.first, bucket.stop)
            if table is None:
                what = f"rows {bucket.first:,} to {bucket.stop:,} are not all there, once"
                raise damaged(place, what)
            yield table
            del table  # before the next rows are read
            pa.default_memory_pool().release_unused()


@dataclass(frozen=True)
class Shuffle:
    """A shuffle on disk: ``blocks`` are rows of each block of the input, where these are read in order;
    ``starts`` the place of the first row of each output file, and the end."""

    rows: EpochRows
    blocks: IntArray | None
    row_bytes: float
    schema: pa.Schema
    places: Places
    starts: IntArray
    unit: int
    temporary: Place
    form: ParquetForm

    def run(self, out: OutputFolder, readers: Executor, executor: Executor) -> Manifest:
        count, rows = int(self.rows.count or 0), self.places.rows
        unit_rows = max(1, int(self.unit / self.row_bytes))
        share = max(LEAST_PART, -(-count // readers.workers))
        parts = part_edges(count, min(unit_rows, share), self.blocks)
        least = LEAST_HERE if isinstance(self.temporary, LocalPlace) else LEAST_THERE
        buckets = bucket_edges(self.starts, unit_rows)
        groups = group_edges(buckets, len(parts) - 1, self.row_bytes * rows, least)
        key = checksum(self.unit, *parts.tolist(), *groups.tolist())
        tasks = [PartTask(piece_file(n), *edge) for n, edge in enumerate(pairwise(parts.tolist()))]
        with self._folder(f"scattered-{key}") as first:
            made = run(
                tasks, ScatterPart(self.schema, self.places, groups, self.unit), first, readers,
                open_state=partial(copy.copy, self.rows), total=count, job="reading for",
            )  # fmt: skip
        with self._folder(f"regrouped-{key}") as second:
            found = self._regrouped(made, first.place, groups, second, executor)
        form = self.form.even(size_of(made) / rows)
        cuts = np.searchsorted([bucket.first for bucket in found], self.starts)
        files = (
            FileTask(f"part-{n:05d}.parquet", found[a:b])
            for n, (a, b) in enumerate(pairwise(cuts.tolist()))
        )
        gather_file = GatherFile([first.place, second.place], self.schema, form)
        return run(files, gather_file, out, executor, total=rows, notes={"rows_in": count})

    def _regrouped(
        self,
        made: Manifest,
        place: Place,
        groups: IntArray,
        folder: OutputFolder,
        executor: Executor,
    ) -> list[Bucket]:
        """All buckets, once groups are taken apart that hold more than one, or more bytes than expected."""
        whole, ratio = PieceIndex(made), size_of(made) / made.bytes
        tasks: list[GroupTask] = []
        apart: list[tuple[IntArray, range]] = []
        found: list[Bucket] = []
        for number, (first, stop) in enumerate(pairwise(groups.tolist())):
            pieces = whole.of(number)
            ends = ratio * np.cumsum(pieces[:, 2] - pieces[:, 1])
            edges = inner_edges(first, stop, self.starts, ends[-1] / self.unit)
            if len(edges) == 2:
                found.append(Bucket(first, stop, 0, pieces))
                continue
            cuts = np.flatnonzero(np.diff(ends // self.unit)) + 1
            some = np.split(pieces, cuts)
            numbers = range(len(tasks), len(tasks) + len(some))
            apart.append((edges, numbers))
            tasks += [
                GroupTask(piece_file(n), edges, s) for n, s in zip(numbers, some, strict=True)
            ]
        if tasks:
            total = sum(int(edges[-1] - edges[0]) for edges, _ in apart)
            again = run(
                tasks, ScatterGroup(place), folder, executor, total=total, job="sorting for"
            )
            for edges, numbers in apart:
                index = PieceIndex(again, numbers)
                found += [
                    Bucket(a, b, 1, index.of(n))
                    for n, (a, b) in enumerate(pairwise(edges.tolist()))
                ]
        return sorted(found, key=attrgetter("first"))

    def _folder(self, name: str) -> OutputFolder:
        for other in self.temporary.sizes():
            if other.partition("-")[0] == name.partition("-")[0] and other != name:
                discard(below(self.temporary, other))
        return OutputFolder(below(self.temporary, name), CALLER, {})
