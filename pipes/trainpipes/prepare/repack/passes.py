"""The passes of a shuffle on disk, each a list of tasks that make files."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import repeated
from trainpipes._internal.messages import need_columns
from trainpipes.columns.arrays import gathered
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.pipeline import Pipeline
from trainpipes.prepare.repack.edges import (
    bucket_edges,
    group_edges,
    inner_edges,
    part_edges,
)
from trainpipes.prepare.repack.keys import PLACES_FILE, Order, Places, find_places
from trainpipes.prepare.repack.pieces import (
    CALLER,
    Pieces,
    PieceWriter,
    few_tables,
    gather,
    groups_of,
    piece_file,
    pieces_of,
    read_pieces,
    size_of,
)
from trainpipes.sources.files.folders import WORK
from trainpipes.start import list_files
from trainpipes.state.cursor import checksum
from trainpipes.storage.executor import Executor, Threads
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.output_folder import FileInfo, Manifest, OutputFolder, run
from trainpipes.storage.places import Place, place_at
from trainpipes.storage.ray_cluster import Ray
from trainpipes.storage.writers.epoch_rows import EpochRows
from trainpipes.storage.writers.formats import FILE_BYTES, write_arrow
from trainpipes.storage.writers.table_groups import check_columns
from trainpipes.storage.writers.write import Format, Output

#: Bytes that a task works on at once, at most: more would not fit into the offsets of Arrow's texts.
MOST_UNIT = 512 << 20
#: Times that a task holds the rows that it works on, with the indices of lists' values and what the allocator
#: keeps.
COPIES = 6
#: Bytes of a piece, on average at least: of a file on this machine, and of one that a server sends.
LEAST_HERE, LEAST_THERE = 128 << 10, 1 << 20
#: Rows of the input that are worth a task of their own.
LEAST_PART = 8192
#: Rows at the start that say how large rows are, and bytes of them, at most.
FIRST_ROWS, FIRST_BYTES = 1000, 8 << 20
#: Rows that come after each other in the result, from one to before another, and their pieces.
Bucket: TypeAlias = tuple[int, int, Place, Pieces]


@dataclass(frozen=True)
class Task:
    """A file to make of what is given."""

    name: str
    title: str
    given: Any

    def __str__(self) -> str:
        return self.title


def part_task(name: str, first: int, stop: int) -> Task:
    return Task(name, f"rows {first:,} to {stop:,} of the input", (first, stop))


def scatter_part(
    schema: pa.Schema, places: Places, edges: IntArray, unit: int,
    task: Task, file: OutputFile, rows: EpochRows,
) -> FileInfo:  # fmt: skip
    """Cut rows of the input into the buckets between ``edges``, so many bytes at once."""
    writer = PieceWriter(file, edges)
    first, stop = task.given
    at = first
    for tables in few_tables(rows.tables(first, stop), unit):
        check_columns(schema, tables[0].schema, CALLER, f" from row {at:,} on")
        count = sum(map(len, tables))
        writer.scatter(tables, places(at, at + count))
        pa.default_memory_pool().release_unused()
        file.advance(count)
        at += count
    if at != stop:
        raise DataError(
            f"{CALLER}(): the input has {at - first:,} rows from row {first:,} on, and {stop - first:,} were "
            "counted before: it has changed; call again"
        )
    return writer.info()


def scatter_group(place: Place, task: Task, file: OutputFile, _: None) -> FileInfo:
    edges, pieces = task.given
    tables, places = read_pieces(place, pieces)
    file.advance(len(places))
    writer = PieceWriter(file, edges)
    writer.scatter(tables, places)
    return writer.info()


def gather_file(schema: pa.Schema, form: Format, task: Task, file: OutputFile, _: None) -> FileInfo:
    def tables() -> Iterator[pa.Table]:
        for first, stop, place, pieces in task.given:
            yield gather(place, pieces, first, stop)
            pa.default_memory_pool().release_unused()

    rows = 0
    with closing(form.open(file, schema)) as writer:
        for group in groups_of(tables(), form.group_rows):
            writer.write(group, rows)
            rows += len(group)
            file.advance(len(group))
    return FileInfo(rows, writer.columns)


def temporary_place(
    out: Place, given: Any, storage_options: Mapping[str, Any] | None, shared: bool
) -> Place:
    if given is None and (shared or out.is_local):
        return out.below(f"{WORK}/{CALLER}")
    root = os.fspath(given or tempfile.gettempdir()).rstrip("/")
    # More than one output may have its temporary files in one folder.
    name = f"{root}/trainpipes-{CALLER}-{checksum(out.root)}"
    same = root.partition("://")[0] == out.root.partition("://")[0]
    return place_at(name, CALLER, storage_options if same else None)


@dataclass(frozen=True)
class Shuffle:
    """Rows in another order, by files on disk."""

    pipeline: Pipeline
    rows: EpochRows
    form: Format
    order: Order
    output: Output
    memory: int
    temporary: Place

    def run(self, out: OutputFolder, executor: Executor) -> Manifest:
        name = checksum(json.dumps(out.about))
        remove_others(self.temporary, name)
        place = self.temporary.below(name)
        try:
            rows = self.rows if self.rows.plan.counted else self._counted(place)
            rows.know_columns()
            first, row_bytes = first_rows(rows)
            self._check(first)
            places = Places(rows.count or 0, self.order.seed or 0)
            if self.order.has_keys:
                places = self._places(rows, place)
            self.output.check(places.rows, CALLER)
        except (ConfigError, SchemaError):
            self.temporary.remove("", recursive=True)  # nothing could go on with it
            raise
        size = row_bytes * places.rows
        files = max(1, min(places.rows, round(size / FILE_BYTES)))
        starts = self.output.edges(places.rows, files)
        done = self._moved(rows, first.schema, size, places, starts, place, out, executor)
        self.temporary.remove("", recursive=True)
        return done

    def _counted(self, place: Place) -> EpochRows:
        options: dict[str, Any] = {"storage_options": self.output.storage_options}
        written = write_arrow(self.pipeline, place.at("rows"), compression="lz4", **options)
        return EpochRows(list_files(list(written.files), **options).read_arrow(), CALLER)

    def _check(self, first: pa.Table) -> None:
        schema = first.schema
        need_columns(schema.names, [*self.order.sort, *(self.order.once or [])], f"{CALLER}()")
        if twice := sorted(repeated(schema.names)):
            raise SchemaError(
                f"{CALLER}(): rows have the column {twice[0]!r} twice: give each a name of its own",
                stage=CALLER,
            )
        for field in schema:
            why = _obstacle(first.select([field.name]), self.form)
            if why is not None:
                raise SchemaError(
                    f"{CALLER}(): column {field.name!r} holds {field.type}, {why}: leave it out by "
                    "columns=[...], or make another column of it",
                    stage=CALLER,
                )

    def _places(self, rows: EpochRows, place: Place) -> Places:
        count, columns = int(rows.count or 0), self.order.columns
        if columns and rows is self.rows:  # columns that nothing depends on are not read
            rows = EpochRows(self.pipeline.select(*columns), CALLER)
        make = partial(find_places, self.order, self.memory, place)
        tasks, opened = [part_task(PLACES_FILE, 0, count)], partial(copy.copy, rows)
        with OutputFolder(place.below("placed"), {}) as placed:
            made = run(
                tasks,
                make,
                placed,
                Threads(1),
                open_state=opened,
                total=count,
                job="reading keys for",
            )
        return Places(made.rows, 0, placed.place)

    def _moved(
        self, rows: EpochRows, schema: pa.Schema, size: float, places: Places, starts: IntArray,
        temporary: Place, out: OutputFolder, executor: Executor,
    ) -> Manifest:  # fmt: skip
        one = isinstance(executor, Threads) and rows.plan.runs_user_code
        readers = Threads(1) if one else executor
        workers = 1 if isinstance(executor, Ray) else executor.workers
        unit = max(1, min(MOST_UNIT, self.memory // (COPIES * workers)))  # bytes of rows at once
        unit_rows = max(1, int(unit * places.rows / size))
        count, blocks = int(rows.count or 0), rows.plan.inputs.blocks
        share = max(LEAST_PART, -(-count // readers.workers))
        lengths = None if blocks is None else blocks.lengths
        parts = part_edges(count, min(unit_rows, share), lengths).tolist()
        least = LEAST_HERE if temporary.is_local else LEAST_THERE
        groups = group_edges(bucket_edges(starts, unit_rows), len(parts) - 1, size, least)

        def folder(kind: str) -> OutputFolder:
            name = f"{kind}-{checksum(unit, *parts, *groups.tolist())}"
            remove_others(temporary, name, kind)
            return OutputFolder(temporary.below(name), {})

        tasks = [part_task(piece_file(n), *edge) for n, edge in enumerate(pairwise(parts))]
        scatter = partial(scatter_part, schema, places, groups, unit)
        with folder("scattered") as first:
            made = run(
                tasks, scatter, first, readers, open_state=partial(copy.copy, rows), total=count,
                job="reading for",
            )  # fmt: skip
        with folder("regrouped") as second:
            found = regrouped(made, first.place, groups, starts, unit, second, executor)
        even = max(1, int(self.form.group_bytes * places.rows / size_of(made)))
        form = replace(self.form, group_rows=min(self.form.group_rows, even))
        cuts = np.searchsorted([bucket[0] for bucket in found], starts).tolist()
        files = (
            Task(form.name_of(n), form.name_of(n), (*found[a:b],))
            for n, (a, b) in enumerate(pairwise(cuts))
        )
        make, notes = partial(gather_file, schema, form), {"rows_in": count}
        return run(files, make, out, executor, total=places.rows, notes=notes)


def regrouped(
    made: Manifest, place: Place, groups: IntArray, starts: IntArray, unit: int,
    folder: OutputFolder, executor: Executor,
) -> list[Bucket]:  # fmt: skip
    """All buckets, once groups of more than one, or of more bytes than expected, are taken apart."""
    ratio = size_of(made) / made.bytes
    tasks: list[Task] = []
    apart: list[tuple[IntArray, range]] = []
    found: list[Bucket] = []
    whole = pieces_of(made, range(len(made.entries)))
    for (first, stop), pieces in zip(pairwise(groups.tolist()), whole, strict=True):
        ends = ratio * np.cumsum(pieces[:, 2] - pieces[:, 1])
        edges = inner_edges(first, stop, starts, ends[-1] / unit)
        if len(edges) == 2:
            found.append((first, stop, place, pieces))
            continue
        cuts, before = np.flatnonzero(np.diff(ends // unit)) + 1, len(tasks)
        title = f"rows that go to {first:,} to {stop:,}"
        for some in np.split(pieces, cuts):
            tasks.append(Task(piece_file(len(tasks)), title, (edges, some)))
        apart.append((edges, range(before, len(tasks))))
    if tasks:
        total = sum(int(edges[-1] - edges[0]) for edges, _ in apart)
        again = run(
            tasks, partial(scatter_group, place), folder, executor, total=total, job="sorting for"
        )
        for edges, numbers in apart:
            buckets = zip(pairwise(edges.tolist()), pieces_of(again, numbers), strict=True)
            found += [(*edge, folder.place, pieces) for edge, pieces in buckets]
    return sorted(found, key=itemgetter(0))


def remove_others(place: Place, name: str, beginning: str = "") -> None:
    """Remove the files in a folder whose names begin so, except the one of that name."""
    for other in place.sizes():
        if other.startswith(beginning) and other != name:
            place.remove(other, recursive=True)


def first_rows(rows: EpochRows) -> tuple[pa.Table, float]:
    """Some rows, and how many bytes a row has."""
    rows = copy.copy(rows)
    rows.open()
    with closing(rows):
        found = rows.group(FIRST_ROWS, FIRST_BYTES)
    if found is None:
        raise ConfigError(
            f"{CALLER}(): the pipeline has no rows, and nothing was written: check what filters it"
        )
    known = getattr(rows.plan.inputs.source, "row_bytes", None) or 0.0
    return found[0], max(1.0, known, found[0].nbytes / len(found[0]))


def _obstacle(rows: pa.Table, form: Format) -> str | None:
    try:
        form.open(pa.BufferOutputStream(), rows.schema).close()
    except (pa.ArrowException, TypeError) as error:
        return f"which Parquet cannot hold ({error})"
    try:
        gathered(rows, np.zeros(1, dtype=np.int64))
    except pa.ArrowException as error:
        return f"whose rows Arrow cannot put into another order ({error})"
    return None
