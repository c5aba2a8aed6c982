"""Rows on disk in the order of their places: each run is a file that is sorted, and all together are read as
one sequence.

A run is made of rows that fit into memory: they are sorted by where they are to go, and written in pieces,
with the first and the last place of each, and where in the file it lies. Rows ``first`` to ``stop`` of the
result are then the pieces of all runs that overlap with them. So every reader takes what it needs, in any
order, and any number at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import one_chunk, to_arrow, to_numpy
from trainpipes.engine.layout import IntArray
from trainpipes.prepare.repack.row_bytes import ROW_COST, row_bytes
from trainpipes.prepare.repack.temporary import TemporaryFiles, damaged

#: Where rows go: given the number of the first one and how many, an int64 array; below 0 for none.
Places: TypeAlias = Callable[[int, int], IntArray]

#: Bytes of a piece, at least and at most.
LEAST_PIECE, MOST_PIECE = 64 << 10, 4 << 20
#: What files are compressed with while they are needed.
CODEC = "lz4"
#: What is kept of a piece: its first and last place, bytes in memory, where it begins in its file, and ends.
FENCE = 5
#: The last column of a run.
PLACE = pa.field("place", pa.int64())


def save_pieces(
    files: TemporaryFiles, name: str, batches: Iterable[pa.RecordBatch], schema: pa.Schema
) -> IntArray:
    """Keep rows in pieces that can be read one by one.

    Args:
        files: temporary files.
        name: of the file.
        batches: one for each piece.
        schema: of all.

    Returns:
        Where each piece begins in the file, and where it ends: int64 ``[pieces, 2]``.
    """
    options = pa.ipc.IpcWriteOptions(compression=CODEC)
    with files.saving(name) as file:
        counted = pa.PythonFile(file, mode="w")
        if _alone(schema):
            edges = [0]
            for batch in batches:
                with pa.ipc.new_stream(counted, schema, options=options) as writer:
                    writer.write_batch(batch)
                edges.append(counted.tell())
        else:
            with pa.ipc.new_stream(counted, schema, options=options) as writer:
                writer.write_batch(_none_of(schema))  # the schema stands before it
                edges = [counted.tell()]
                for batch in batches:
                    writer.write_batch(batch)
                    edges.append(counted.tell())
    return np.stack([edges[:-1], edges[1:]], axis=1).astype(np.int64)


def read_pieces(
    files: TemporaryFiles,
    names: Sequence[str],
    starts: Sequence[int],
    stops: Sequence[int],
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """Pieces of files, in order.

    Args:
        files: temporary files.
        names: of the file of each piece.
        starts: where each begins in its file.
        stops: where it ends.
        schema: of all.
    """
    contents, alone = files.ranges(names, starts, stops), _alone(schema)
    for name, content in zip(names, contents, strict=True):
        try:
            if alone:
                yield pa.ipc.open_stream(pa.py_buffer(content)).read_next_batch()
            else:
                yield pa.ipc.read_record_batch(pa.py_buffer(content), schema)
        except (OSError, pa.ArrowException, StopIteration) as error:
            raise files.damaged(name, error) from error


def _alone(schema: pa.Schema) -> bool:
    """Whether each piece is a stream of its own, twice as dear: where values are in dictionaries, which a
    batch without its stream does not have."""
    return any(map(_has_dictionary, schema.types))


def _none_of(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in schema.types], schema=schema)


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return pa.types.is_dictionary(kind) or any(map(_has_dictionary, inner))


def gathered(tables: Sequence[pa.Table], index: IntArray) -> pa.Table:
    """Rows of several tables, numbered over all of them, in the order of ``index``; each column in one
    piece."""
    schema, rows = tables[0].schema, to_arrow(index)
    columns = []
    for number in range(len(schema)):
        chunks = [chunk for table in tables for chunk in table.column(number).chunks]
        column = one_chunk(pa.chunked_array(chunks, schema.field(number).type))
        columns.append(taken(column, rows))
    return pa.Table.from_arrays(columns, schema=schema)


def taken(column: Any, rows: pa.Array) -> Any:
    """Values of a column in another order; also of views, which Arrow takes only as texts.

    Raises:
        pa.ArrowException: they are of a type that cannot be taken.
    """
    kind = column.type
    plain = _without_views(kind)
    return column.take(rows) if plain == kind else column.cast(plain).take(rows).cast(kind)


def _without_views(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_struct(kind):
        fields = (kind.field(number) for number in range(kind.num_fields))
        return pa.struct([field.with_type(_without_views(field.type)) for field in fields])
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_views(kind.value_type)))
    return kind


def write_run(
    files: TemporaryFiles,
    stem: str,
    tables: Sequence[pa.Table],
    places: IntArray,
    cuts: IntArray,
    size: int,
) -> None:
    """Sort rows by their places, and keep them: ``stem.arrow``, and ``stem.npy`` with what is kept of each
    piece (``FENCE``).

    Args:
        files: temporary files.
        stem: name of both files, without their ends.
        tables: the rows; those whose place is below 0 are left out.
        places: of each row over all tables, int64.
        cuts: places before which a new piece begins, ascending.
        size: bytes of a piece, about.
    """
    kept = np.flatnonzero(places >= 0)
    order = kept[np.argsort(places[kept], kind="stable")]
    if not len(order):
        files.save_array(f"{stem}.npy", np.empty((0, FENCE), dtype=np.int64))
        return
    table, places = gathered(tables, order), places[order]
    sizes = np.cumsum(row_bytes(table) + ROW_COST)
    bucket = np.searchsorted(cuts, places, side="right")
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    before = np.concatenate([[0], sizes])[starts]
    within = (sizes - np.repeat(before, np.diff(np.append(starts, len(places))))) // max(1, size)
    new = (np.diff(bucket, prepend=-1) != 0) | (np.diff(within, prepend=-1) != 0)
    edges = np.append(np.flatnonzero(new), len(places))
    fences = np.stack([
        places[edges[:-1]], places[edges[1:] - 1], np.diff(np.concatenate([[0], sizes])[edges]),
    ], axis=1)  # fmt: skip
    table = table.append_column(PLACE, to_arrow(places))

    def pieces() -> Iterator[pa.RecordBatch]:
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            yield table.slice(start, stop - start).combine_chunks().to_batches()[0]

    lies = save_pieces(files, f"{stem}.arrow", pieces(), table.schema)
    files.save_array(f"{stem}.npy", np.concatenate([fences, lies], axis=1))


class RunReader:
    """Reads the rows of a stretch of places, of all runs, in their order. For one thread; more may read the
    same files.

    Args:
        files: temporary files.
        stems: names of the runs' files, without their ends.
        schema: of their rows.
        first: the first place.
        stop: the place after the last.
    """

    def __init__(
        self,
        files: TemporaryFiles,
        stems: Sequence[str],
        schema: pa.Schema,
        first: int,
        stop: int,
    ) -> None:
        self._files, self._stems = files, stems
        self._schema, self._kept = schema, schema.append(PLACE)
        found = [np.empty((0, FENCE), dtype=np.int64)]
        for own in files.arrays([f"{stem}.npy" for stem in stems]):
            low = int(np.searchsorted(own[:, 1], first))
            high = int(np.searchsorted(own[:, 0], stop))
            found.append(np.array(own[low:high]))
        fences = np.concatenate(found)
        run = np.repeat(np.arange(len(stems)), [len(own) for own in found[1:]])
        order = np.argsort(fences[:, 0], kind="stable")
        self._first, self._last, sizes, *self._lies = fences[order].T
        self._run = run[order]
        self._sizes = np.concatenate([[0], np.cumsum(sizes)])
        by_last = np.argsort(self._last, kind="stable")
        self._lasts = self._last[by_last]
        self._sizes_by_last = np.concatenate([[0], np.cumsum(sizes[by_last])])
        self._whole = (first, stop)

    def tables(self, most: int) -> Iterator[pa.Table]:
        """All rows, of at most so many bytes at a time, if pieces are small enough for that.

        Raises:
            DataError: they are not all there, or one is there twice.
        """
        for first, stop in self._windows(most):
            yield self._read(first, stop)

    def _windows(self, most: int) -> Iterator[tuple[int, int]]:
        first, stop = self._whole
        while first < stop:
            gone = self._sizes_by_last[np.searchsorted(self._lasts, first)]
            # Up to which piece the bytes fit that begin there or before, and end later.
            fits = int(np.searchsorted(self._sizes, gone + most, side="right")) - 1
            end = stop if fits >= len(self._first) else int(self._first[fits])
            if end <= first:
                after = int(np.searchsorted(self._first, first, side="right"))
                end = stop if after >= len(self._first) else int(self._first[after])
            end = min(end, stop)
            yield first, end
            first = end

    def _read(self, first: int, stop: int) -> pa.Table:
        pieces = np.flatnonzero((self._first < stop) & (self._last >= first))
        names = [f"{self._stems[run]}.arrow" for run in self._run[pieces].tolist()]
        starts, stops = (edge[pieces].tolist() for edge in self._lies)
        tables, places = [], []
        for batch in read_pieces(self._files, names, starts, stops, self._kept):
            own = to_numpy(batch.column(batch.num_columns - 1))
            low, high = np.searchsorted(own, [first, stop])
            rows = batch.slice(low, high - low)
            tables.append(pa.Table.from_arrays(rows.columns[:-1], schema=self._schema))
            places.append(own[low:high])
        found = np.concatenate([*places, np.empty(0, dtype=np.int64)])
        order = np.argsort(found, kind="stable")
        if len(found) != stop - first or (found[order] != np.arange(first, stop)).any():
            raise damaged(self._files.asker, f"rows {first:,} to {stop:,} are not all there once")
        return gathered(tables, order)
