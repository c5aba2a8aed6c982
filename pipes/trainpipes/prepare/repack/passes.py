"""The passes of a shuffle on disk, each a list of tasks that make files."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trainpipes.engine.layout import IntArray
from trainpipes.engine.permutation import Permutation
from trainpipes.errors import DataError
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
from trainpipes.storage.places import Place
from trainpipes.storage.writers.epoch_rows import EpochRows, check_columns
from trainpipes.storage.writers.write import Format

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
class Task:
    """A file to make of what is given."""

    name: str
    title: str
    given: tuple[Any, ...]

    def __str__(self) -> str:
        return self.title


def part_task(name: str, first: int, stop: int) -> Task:
    return Task(name, f"rows {first:,} to {stop:,} of the input", (first, stop))


def scatter_part(
    schema: pa.Schema,
    places: Places,
    edges: IntArray,
    unit: int,
    task: Task,
    file: OutputFile,
    rows: EpochRows,
) -> FileInfo:
    """Cut rows of the input into the buckets between ``edges``, so many bytes at once."""
    writer = PieceWriter(file)
    first, stop = task.given
    at = first
    rows.open_part(first, stop)
    with closing(rows):
        for tables in few_rows(rows, stop - first, unit):
            check_columns(schema, tables[0].schema, CALLER, f" from row {at:,} on")
            count = sum(map(len, tables))
            writer.write(scatter(tables, places(at, at + count), edges))
            pa.default_memory_pool().release_unused()
            file.advance(count)
            at += count
    if at != stop:
        raise DataError(
            f"{CALLER}(): the input has {at - first:,} rows from row {first:,} on, and {stop - first:,} were "
            "counted before: it has changed; call again"
        )
    return writer.info()


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


def scatter_group(place: Place, task: Task, file: OutputFile, _: None) -> FileInfo:
    edges, pieces = task.given
    tables = read_pieces(place, pieces)
    places = drop_places(tables)
    file.advance(len(places))
    writer = PieceWriter(file)
    writer.write(scatter(tables, places, edges))
    return writer.info()


class Bucket(NamedTuple):
    """Rows that come after each other in the result, from ``first`` to before ``stop``, and their pieces in
    files.
    """

    first: int
    stop: int
    place: Place
    pieces: Pieces


def gather_file(schema: pa.Schema, form: Format, task: Task, file: OutputFile, _: None) -> FileInfo:
    rows = 0
    with closing(form.open(file, schema)) as writer:
        for group in groups_of(_tables(task.given), form.group_rows):
            writer.write(group, rows)
            rows += len(group)
            file.advance(len(group))
    return FileInfo(rows, writer.columns)


def _tables(buckets: Iterable[Bucket]) -> Iterator[pa.Table]:
    for first, stop, place, pieces in buckets:
        table = gather(read_pieces(place, pieces), first, stop)
        if table is None:
            raise damaged(place, f"rows {first:,} to {stop:,} are not all there, once")
        yield table
        del table  # before the next rows are read
        pa.default_memory_pool().release_unused()


@dataclass(frozen=True)
class Shuffle:
    """A shuffle on disk; ``starts`` is the place of the first row of each output file, and the end."""

    rows: EpochRows
    row_bytes: float
    schema: pa.Schema
    places: Places
    starts: IntArray
    unit: int  # bytes of rows that are worked on at once
    temporary: Place
    form: Format

    def run(self, out: OutputFolder, readers: Executor, executor: Executor) -> Manifest:
        count, rows = int(self.rows.count or 0), self.places.rows
        unit_rows = max(1, int(self.unit / self.row_bytes))
        share = max(LEAST_PART, -(-count // readers.workers))
        blocks = self.rows.plan.inputs.blocks
        parts = part_edges(
            count, min(unit_rows, share), None if blocks is None else blocks.lengths
        ).tolist()
        least = LEAST_HERE if self.temporary.is_local else LEAST_THERE
        buckets = bucket_edges(self.starts, unit_rows)
        groups = group_edges(buckets, len(parts) - 1, self.row_bytes * rows, least)
        key = checksum(self.unit, *parts, *groups.tolist())
        tasks = [part_task(piece_file(n), *edge) for n, edge in enumerate(pairwise(parts))]
        with self._folder("scattered-", key) as first:
            made = run(
                tasks, partial(scatter_part, self.schema, self.places, groups, self.unit), first,
                readers, open_state=partial(copy.copy, self.rows), total=count, job="reading for",
            )  # fmt: skip
        with self._folder("regrouped-", key) as second:
            found = self._regrouped(made, first.place, groups, second, executor)
        even = max(1, int(self.form.group_bytes * rows / size_of(made)))
        form = replace(self.form, group_rows=min(self.form.group_rows, even))
        cuts = np.searchsorted([bucket.first for bucket in found], self.starts).tolist()
        files = (
            Task(form.name_of(n), form.name_of(n), (*found[a:b],))
            for n, (a, b) in enumerate(pairwise(cuts))
        )
        make = partial(gather_file, self.schema, form)
        return run(files, make, out, executor, total=rows, notes={"rows_in": count})

    def _regrouped(
        self,
        made: Manifest,
        place: Place,
        groups: IntArray,
        folder: OutputFolder,
        executor: Executor,
    ) -> list[Bucket]:
        """All buckets, once groups of more than one, or of more bytes than expected, are taken apart."""
        whole, ratio = PieceIndex(made), size_of(made) / made.bytes
        tasks: list[Task] = []
        apart: list[tuple[IntArray, range]] = []
        found: list[Bucket] = []
        for number, (first, stop) in enumerate(pairwise(groups.tolist())):
            pieces = whole.of(number)
            ends = ratio * np.cumsum(pieces[:, 2] - pieces[:, 1])
            edges = inner_edges(first, stop, self.starts, ends[-1] / self.unit)
            if len(edges) == 2:
                found.append(Bucket(first, stop, place, pieces))
                continue
            cuts, before = np.flatnonzero(np.diff(ends // self.unit)) + 1, len(tasks)
            title = f"rows that go to {first:,} to {stop:,}"
            for some in np.split(pieces, cuts):
                tasks.append(Task(piece_file(len(tasks)), title, (edges, some)))
            apart.append((edges, range(before, len(tasks))))
        if tasks:
            total = sum(int(edges[-1] - edges[0]) for edges, _ in apart)
            make = partial(scatter_group, place)
            again = run(tasks, make, folder, executor, total=total, job="sorting for")
            for edges, numbers in apart:
                index = PieceIndex(again, numbers)
                found += [
                    Bucket(a, b, folder.place, index.of(n))
                    for n, (a, b) in enumerate(pairwise(edges.tolist()))
                ]
        return sorted(found, key=attrgetter("first"))

    def _folder(self, kind: str, key: str) -> OutputFolder:
        remove_others(self.temporary, f"{kind}{key}", kind)
        return OutputFolder(self.temporary.below(f"{kind}{key}"), CALLER, {})


def remove_others(place: Place, name: str, beginning: str = "") -> None:
    """Remove the files in a folder whose names begin so, except the one of that name."""
    for other in place.sizes():
        if other.startswith(beginning) and other != name:
            place.remove(other, recursive=True)
