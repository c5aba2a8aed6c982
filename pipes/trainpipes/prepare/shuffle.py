"""Rows in another order, by files on disk, in passes that are lists of tasks.

Places in the result are cut into buckets that fit into memory. A file has pieces, Arrow streams (lz4) of rows
of a single bucket each, whose last column says where each row goes; the manifest says where they are.

Scatter writes a part of the input bucket by bucket; gather sorts the rows of a bucket, and writes them. Where
its reads would be small, scatter writes groups of buckets, which a pass in between takes apart.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isqrt
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes import errors
from trainpipes._internal.checks import IntArray
from trainpipes.columns import arrays
from trainpipes.engine.processes.executors import Executor, Threads
from trainpipes.engine.processes.ray_cluster import Ray
from trainpipes.filesystems.places import WORK, OutputFile, Place, clean_up, place_at
from trainpipes.order.permutation import Permutation
from trainpipes.pipeline.chain import Pipeline
from trainpipes.pipeline.starts import list_files
from trainpipes.state.cursor import checksum
from trainpipes.writers import output_folder
from trainpipes.writers.epoch_rows import EpochRows, TableGroups, check_columns
from trainpipes.writers.formats import FILE_BYTES, arrow_form
from trainpipes.writers.write import ANY, Format, Output, write

CALLER = "repack"
#: Which bytes pieces are: int64 ``[pieces, 3]`` of the number of the file, where it begins, where it ends.
Pieces: TypeAlias = IntArray
#: Bytes of rows that are compressed at a time.
BATCH_BYTES = 4 << 20
#: The last column of rows between the passes: where each goes.
PLACE = "place"
#: The description of temporary files: the folder that they lie in says all.
ABOUT: dict[str, Any] = {"options": {}}


def piece_file(number: int) -> str:
    return f"part-{number:05d}.pieces"


def cut(edges: IntArray, most: int) -> IntArray:
    """All of these edges, and others evenly between, so that at most so many rows lie between two.

    >>> cut(np.array([0, 4, 11]), 3).tolist()
    [0, 2, 4, 6, 8, 11]
    """
    counts = -(-np.diff(edges) // most)
    each = zip(pairwise(edges.tolist()), counts.tolist(), strict=True)
    return np.append(
        np.concatenate([a + np.arange(n) * (b - a) // n for (a, b), n in each]), edges[-1]
    )


def scatter(
    edges: IntArray, rows: Iterable[tuple[list[pa.Table], IntArray]], file: OutputFile
) -> output_folder.FileInfo:
    """Write a piece for each bucket between ``edges``, of all tables that come together with their places.
    The lists of tables are emptied.
    """
    sizes, count, bits = [], 0, 0
    for tables, places in rows:
        order = np.argsort(places, kind="stable")
        sorted_places = places[order]
        table = _taken(tables, order).append_column(PLACE, arrays.to_arrow(sorted_places))
        cuts = pairwise(np.searchsorted(sorted_places, edges).tolist())
        sizes.append([_write(table.slice(a, b - a), file) for a, b in cuts])
        count += len(table)
        bits += sum(_bits(chunk) for column in table.columns for chunk in column.chunks)
        file.advance(len(places))
        del table  # before the next rows are read
        pa.default_memory_pool().release_unused()
    return output_folder.FileInfo(count, {}, notes={"pieces": sizes, "bits": bits})


def _bits(array: Any) -> int:
    """Bits of values, the same however rows are cut: without what says which are null."""
    if isinstance(array, pa.ExtensionArray):
        return _bits(array.storage)
    array = arrays.laid_out(array)
    kind, rows = array.type, len(array)
    if pa.types.is_struct(kind):
        return sum(_bits(array.field(n)) for n in range(kind.num_fields))
    if pa.types.is_map(kind):
        return 32 * rows + _bits(arrays.apart(array)[0])
    if hasattr(kind, "value_field"):
        return 32 * rows + _bits(array.flatten())
    with suppress(ValueError):
        return int(kind.bit_width) * rows
    with suppress(pa.ArrowNotImplementedError):
        plain = array.cast(arrays.type_without_views(kind))
        return 32 * rows + 8 * int(pc.sum(pc.binary_length(plain)).as_py() or 0)
    return 8 * int(array.nbytes)


def _write(piece: pa.Table, file: Any) -> int:
    start: int = file.tell()
    if len(piece):
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_stream(file, piece.schema, options=options) as writer:
            writer.write_table(piece, max(1, BATCH_BYTES * len(piece) // max(1, piece.nbytes)))
    size: int = file.tell() - start
    return size


def pieces_of(files: Iterable[tuple[int, output_folder.FileInfo]]) -> list[Pieces]:
    """The pieces of each bucket in some of the files, which come with their numbers."""
    parts = []
    for number, info in files:
        sizes = np.array(info.notes["pieces"], dtype=np.int64)
        ends = np.cumsum(sizes).reshape(sizes.shape)
        parts.append(np.stack([np.full_like(ends, number), ends - sizes, ends], axis=2))
    buckets = np.concatenate(parts).swapaxes(0, 1)
    return [some[some[:, 1] < some[:, 2]] for some in buckets]


def read_pieces(place: Place, pieces: Pieces) -> tuple[list[pa.Table], IntArray]:
    """The rows of pieces, and where they go."""
    ranges = [(piece_file(number), start, stop) for number, start, stop in pieces.tolist()]
    try:
        tables = [pa.ipc.open_stream(content).read_all() for content in place.read_all(ranges)]
    except errors.UnreachableError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise damaged(place, f"what is in {place.root} cannot be read ({error})") from error
    places = [arrays.to_numpy(table.column(-1)) for table in tables]
    return [table.remove_column(table.num_columns - 1) for table in tables], np.concatenate(places)


def gather(place: Place, pieces: Pieces, first: int, stop: int) -> pa.Table:
    """The rows of a bucket in order."""
    tables, places = read_pieces(place, pieces)
    order = np.argsort(places, kind="stable")
    if not np.array_equal(places[order], np.arange(first, stop)):
        raise damaged(place, f"rows {first:,} to {stop:,} are not all there, once")
    return _taken(tables, order)


def _taken(tables: list[pa.Table], order: IntArray) -> pa.Table:
    schema = tables[0].schema
    chunks = [[c for table in tables for c in table.column(n).chunks] for n in range(len(schema))]
    tables.clear()
    columns = []
    for number, kind in enumerate(schema.types):
        column = arrays.one_chunk(pa.chunked_array(chunks[number], kind))
        chunks[number] = []
        columns.append(arrays.gathered(column, order))
        del column
    return pa.Table.from_arrays(columns, schema=schema)


def few_tables(rows: EpochRows, first: int, stop: int, size: int) -> Iterator[list[pa.Table]]:
    """Rows from ``start`` to before ``stop``, as tables that have that many bytes together, about."""
    held: list[pa.Table] = []
    held_bytes, at = 0, first
    for table in rows.tables(first, stop):
        held.append(table)
        held_bytes, at = held_bytes + table.nbytes, at + len(table)
        del table
        if held_bytes >= size:
            yield held
            held, held_bytes = [], 0
    if at != stop:
        raise errors.DataError(
            f"{CALLER}(): the input has {at - first:,} rows from row {first:,} on, and {stop - first:,} were "
            "counted before: it has changed; call again"
        )
    if held:
        yield held


def damaged(place: Place, why: str) -> errors.DataError:
    return errors.DataError(
        f"{CALLER}(): the temporary files are damaged: {why}; begin anew with overwrite=True",
        path=place.root,
    )


#: Bytes that a task works on at once, at most: more would not fit into the offsets of Arrow's texts.
MOST_UNIT = 512 << 20
#: Times that a task holds the rows that it works on, with the indices of lists' values and what the allocator
#: keeps.
COPIES = 6
#: Pieces that are read singly, however small they are; bytes of a piece, on average at least, where there
#: are more: of a file on this machine, and of a file that a server sends.
FEW, LEAST_HERE, LEAST_THERE = 64, 128 << 10, 1 << 20
#: Rows of the input that are worth a task of their own.
LEAST_PART = 8192
#: Rows at the start that say how large rows are, and bytes of them, at most.
FIRST_ROWS, FIRST_BYTES = 1000, 8 << 20
#: Where rows go, by their numbers.
Places: TypeAlias = Callable[[IntArray], IntArray]
#: Rows that come after each other in the result, from a first to before a last, and their pieces.
Bucket: TypeAlias = tuple[int, int, Place, Pieces]


class Task(NamedTuple):
    """A file to make, and its inputs."""

    name: str
    given: Any

    def __str__(self) -> str:
        return self.name


def scatter_part(
    schema: pa.Schema, places: Places, edges: IntArray, unit: int,
    task: Task, file: OutputFile, rows: EpochRows,
) -> output_folder.FileInfo:  # fmt: skip
    """Cut rows of the input into the buckets between ``edges``, so many bytes at once."""
    first, stop = task.given

    def placed() -> Iterator[tuple[list[pa.Table], IntArray]]:
        at = first
        for tables in few_tables(rows, first, stop, unit):
            check_columns(schema, tables[0].schema, CALLER, f" from row {at:,} on")
            count = sum(map(len, tables))
            yield tables, places(np.arange(at, at + count))
            at += count

    return scatter(edges, placed(), file)


def scatter_group(place: Place, task: Task, file: OutputFile, _: None) -> output_folder.FileInfo:
    edges, pieces = task.given
    return scatter(edges, iter([read_pieces(place, pieces)]), file)


class _Gathered(TableGroups):
    """The rows of buckets that come after each other."""

    caller = CALLER

    def __init__(self, buckets: list[Bucket]) -> None:
        self._buckets = iter(buckets)

    def next_run(self) -> pa.Table | None:
        self._table = None  # before the next rows are read
        pa.default_memory_pool().release_unused()
        for first, stop, place, pieces in self._buckets:
            return gather(place, pieces, first, stop)
        return None


def gather_file(
    schema: pa.Schema, form: Format, group: int, task: Task, file: OutputFile, _: None
) -> output_folder.FileInfo:
    rows, done = _Gathered(task.given), 0
    with closing(form.open(file, schema)) as writer:
        while part := rows.group(group, ANY):
            writer.write(part[0], done)
            done += len(part[0])
            file.advance(len(part[0]))
            del part
    return output_folder.FileInfo(done, writer.columns)


def temporary_place(
    out: Place, temp_dir: Any, storage_options: Mapping[str, Any] | None, shared: bool
) -> Place:
    if temp_dir is None and (shared or out.is_local):
        return out.below(f"{WORK}/{CALLER}")
    root = os.fspath(temp_dir or tempfile.gettempdir()).rstrip("/")
    # Several outputs may have their temporary files in the same folder.
    name = f"{root}/trainpipes-{CALLER}-{checksum(out.root)}"
    same = root.partition("://")[0] == out.root.partition("://")[0]
    return place_at(name, CALLER, storage_options if same else None, out.retry)


@dataclass(frozen=True)
class Shuffle:
    """The job of ``shuffle_files``: the passes, and their files."""

    pipeline: Pipeline
    rows: EpochRows
    form: Format
    seed: int
    output: Output
    memory: int
    temporary: Place

    def run(self, out: output_folder.OutputFolder, executor: Executor) -> output_folder.Manifest:
        if out.finished is not None:
            self._remove_temporary()  # Ctrl-C, or a kill, may have left it
            return out.finished
        if self.output.overwrite:  # an earlier run's rows may be an earlier function's
            self.temporary.remove_folder()
        # Who does the work changes which rows are worked on together.
        how = self.memory, executor.workers, type(executor).__name__
        name = checksum(json.dumps(out.about), *how)
        for other in self.temporary.sizes():
            if other != name:
                self.temporary.remove_folder(other)
        place = self.temporary.below(name)
        try:
            rows = self.rows if self.rows.plan.counted else self._counted(place)
            first, row_bytes = first_rows(rows)
            self.form.open(pa.BufferOutputStream(), first.schema).close()
            self.output.check(rows.count or 0, CALLER)
        except (errors.ConfigError, errors.SchemaError):
            self._remove_temporary()  # nothing could go on with it
            raise
        done = self._moved(rows, first.schema, row_bytes, place, out, executor)
        self._remove_temporary()
        return done

    def _remove_temporary(self) -> None:
        with clean_up(self.temporary.root):
            self.temporary.remove_folder()

    def _counted(self, place: Place) -> EpochRows:
        output = self.output
        options: dict[str, Any] = {"storage_options": output.storage_options, "retry": output.retry}
        to = Output(place.at("rows"), None, None, False, **options)
        written = write(EpochRows(self.pipeline, CALLER), arrow_form(CALLER, None, "lz4"), to, None)
        return EpochRows(list_files(list(written.files), **options).read_arrow(), CALLER)

    def _moved(
        self, rows: EpochRows, schema: pa.Schema, row_bytes: float, temporary: Place,
        out: output_folder.OutputFolder, executor: Executor,
    ) -> output_folder.Manifest:  # fmt: skip
        alone = isinstance(executor, Threads) and rows.plan.runs_user_code
        readers = Threads(1) if alone else executor
        workers = 1 if isinstance(executor, Ray) else executor.workers
        unit = max(1, min(MOST_UNIT, self.memory // (COPIES * workers)))  # bytes of rows at once
        unit_rows = max(1, int(unit / row_bytes))
        count, blocks = int(rows.count or 0), rows.plan.inputs.blocks
        size, places = row_bytes * count, Permutation(count, self.seed, CALLER)
        share = max(LEAST_PART, -(-count // readers.workers))
        lengths = None if blocks is None else blocks.lengths
        parts = part_edges(count, min(unit_rows, share), lengths).tolist()
        files = max(1, min(count, round(size / FILE_BYTES)))
        starts = self.output.edges(count, files)
        least = LEAST_HERE if temporary.is_local else LEAST_THERE
        groups = grouped(cut(starts, unit_rows), len(parts) - 1, size, least)
        tasks = [Task(piece_file(n), edge) for n, edge in enumerate(pairwise(parts))]
        scatter_all: Any = partial(scatter_part, schema, places, groups, unit)
        with output_folder.OutputFolder(temporary.below("scattered rows"), ABOUT) as first:
            manifest = output_folder.run(
                tasks, scatter_all, first, readers, open_state=partial(copy.copy, rows), total=count,
                job="making",
            )  # fmt: skip
        size = sum(info.notes["bits"] for info in manifest.entries) / 8
        with output_folder.OutputFolder(temporary.below("smaller pieces"), ABOUT) as second:
            buckets = taken_apart(
                manifest, size, first.place, groups, starts, unit, second, executor
            )
        group_rows = max(
            1, min(self.form.group_rows, int(self.form.group_bytes * count / max(1.0, size)))
        )
        cuts = pairwise(np.searchsorted([bucket[0] for bucket in buckets], starts).tolist())
        tasks = [Task(self.form.name_of(n), buckets[a:b]) for n, (a, b) in enumerate(cuts)]
        make = partial(gather_file, schema, self.form, group_rows)
        return output_folder.run(tasks, make, out, executor, total=count)


def part_edges(rows: int, part_rows: int, blocks: IntArray | None) -> IntArray:
    """The first row of each part of the input, where a block begins if possible, and the end."""
    edges = np.cumsum([0, rows] if blocks is None else [0, *blocks.tolist()])
    wanted = np.arange(0, rows, part_rows)
    begun = edges[np.searchsorted(edges, wanted, side="right") - 1]
    return cut(np.unique([*begun[begun < rows].tolist(), 0, rows]), 2 * part_rows)


def grouped(buckets: IntArray, parts: int, size: float, least: int) -> IntArray:
    """The edges of buckets, or of groups: as many as each has buckets, where pieces would be small."""
    count = len(buckets) - 1
    if parts * count <= FEW or size >= least * parts * count:
        return buckets
    return np.append(buckets[:-1][:: -(-count // isqrt(count))], buckets[-1])


def taken_apart(
    manifest: output_folder.Manifest, size: float, place: Place, groups: IntArray, starts: IntArray,
    unit: int, folder: output_folder.OutputFolder, executor: Executor,
) -> list[Bucket]:  # fmt: skip
    """All buckets, once groups of several, or of more bytes than expected, are taken apart."""
    tasks: list[Task] = []
    apart: list[tuple[IntArray, slice]] = []
    buckets_of: list[Bucket] = []
    whole = pieces_of(enumerate(manifest.entries))
    for (first, stop), pieces in zip(pairwise(groups.tolist()), whole, strict=True):
        units = np.cumsum(pieces[:, 2] - pieces[:, 1]) * (size / manifest.bytes / unit)
        most = stop - first if units[-1] < 1.5 else int((stop - first) / units[-1]) + 1
        edges = cut(np.unique(np.clip(starts, first, stop)), most)
        if len(edges) == 2:
            buckets_of.append((first, stop, place, pieces))
            continue
        some = np.split(pieces, np.flatnonzero(np.diff(units.astype(np.int64))) + 1)
        apart.append((edges, slice(len(tasks), len(tasks) + len(some))))
        tasks += [Task(piece_file(n), (edges, each)) for n, each in enumerate(some, len(tasks))]
    if tasks:
        total = sum(int(edges[-1] - edges[0]) for edges, _ in apart)
        make = partial(scatter_group, place)
        again = list(
            enumerate(
                output_folder.run(tasks, make, folder, executor, total=total, job="making").entries
            )
        )
        for edges, numbers in apart:
            buckets = zip(pairwise(edges.tolist()), pieces_of(again[numbers]), strict=True)
            buckets_of += [(*edge, folder.place, pieces) for edge, pieces in buckets]
    return sorted(buckets_of, key=itemgetter(0))


def first_rows(rows: EpochRows) -> tuple[pa.Table, float]:
    """Some rows, and how many bytes a row has."""
    rows.know_columns()
    rows = copy.copy(rows)
    rows.open()
    with closing(rows):
        first = rows.group(FIRST_ROWS, FIRST_BYTES)
    if first is None:
        raise output_folder.no_rows(CALLER)
    known = getattr(rows.plan.inputs.source, "row_bytes", None) or 0.0
    return first[0], max(1.0, known, first[0].nbytes / len(first[0]))
