"""Rows on disk in the order of their places: each run is a file that is sorted, and all together are read as
one sequence.

A run is made of rows that fit into memory: they are sorted by where they are to go, and written in pieces,
with the first and the last place of each. Rows ``first`` to ``stop`` of the result are then the pieces of all
runs that overlap with them. So every reader takes what it needs, in any order, and any number at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trainpipes.arrays import one_chunk, to_arrow, to_numpy
from trainpipes.errors import DataError
from trainpipes.order import IntArray
from trainpipes.prepare.repack.row_bytes import ROW_COST, row_bytes
from trainpipes.writers.output_file import writing

__all__ = [
    "Places",
    "RunReader",
    "damaged",
    "gathered",
    "save_array",
    "taken",
    "write_batches",
    "write_run",
]

#: Where rows go: given the number of the first one and how many, an int64 array; below 0 for none.
Places: TypeAlias = Callable[[int, int], IntArray]

#: Bytes of a piece, at least and at most.
LEAST_PIECE, MOST_PIECE = 64 << 10, 4 << 20
#: What files are compressed with while they are needed, and how many one reader keeps open.
CODEC = "lz4"
OPEN_FILES = 64


def save_array(path: Path, array: Any, asker: str) -> None:
    """Keep an array; the file is there when it is whole."""
    part = path.with_name(f".{path.name}")
    with writing(path, asker), open(part, "wb") as file:
        np.save(file, array)
    os.replace(part, path)


def write_batches(path: Path, batches: Iterator[pa.RecordBatch], asker: str) -> None:
    """Keep rows; the file is there when it is whole."""
    part = path.with_name(f".{path.name}")
    with writing(path, asker), open(part, "wb") as file:
        options = pa.ipc.IpcWriteOptions(compression=CODEC)
        writer = None
        for batch in batches:
            if writer is None:
                writer = pa.ipc.new_file(file, batch.schema, options=options)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
    os.replace(part, path)


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
    stem: Path, tables: Sequence[pa.Table], places: IntArray, cuts: IntArray, piece: int, asker: str
) -> None:
    """Sort rows by their places, and keep them: ``stem.arrow``, and ``stem.npy`` with the first place, the
    last one and the bytes of each piece.

    Args:
        stem: path of both files, without their ends.
        tables: the rows; those whose place is below 0 are left out.
        places: of each row over all tables, int64.
        cuts: places before which a new piece begins, ascending.
        piece: bytes of a piece, about.
        asker: for messages.
    """
    kept = np.flatnonzero(places >= 0)
    order = kept[np.argsort(places[kept], kind="stable")]
    if not len(order):
        save_array(stem.with_suffix(".npy"), np.empty((0, 3), dtype=np.int64), asker)
        return
    table, places = gathered(tables, order), places[order]
    sizes = np.cumsum(row_bytes(table) + ROW_COST)
    bucket = np.searchsorted(cuts, places, side="right")
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    before = np.concatenate([[0], sizes])[starts]
    within = (sizes - np.repeat(before, np.diff(np.append(starts, len(places))))) // max(1, piece)
    new = (np.diff(bucket, prepend=-1) != 0) | (np.diff(within, prepend=-1) != 0)
    edges = np.append(np.flatnonzero(new), len(places))
    fences = np.stack([
        places[edges[:-1]], places[edges[1:] - 1], np.diff(np.concatenate([[0], sizes])[edges]),
    ], axis=1)  # fmt: skip
    table = table.append_column("place", to_arrow(places))

    def pieces() -> Iterator[pa.RecordBatch]:
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            yield table.slice(start, stop - start).combine_chunks().to_batches()[0]

    write_batches(stem.with_suffix(".arrow"), pieces(), asker)
    save_array(stem.with_suffix(".npy"), fences, asker)


class RunReader:
    """Reads the rows of all runs in the order of their places. For one thread; more may read the same files.

    Args:
        stems: of the runs' files.
        asker: for messages.
    """

    def __init__(self, stems: Sequence[Path], asker: str) -> None:
        self._stems, self._asker = stems, asker
        found = [np.load(stem.with_suffix(".npy")) for stem in stems]
        fences = np.concatenate([*found, np.empty((0, 3), dtype=np.int64)])
        run = np.repeat(np.arange(len(found)), [len(own) for own in found])
        number = np.concatenate([np.arange(0), *(np.arange(len(own)) for own in found)])
        order = np.argsort(fences[:, 0], kind="stable")
        self._first, self._last, sizes = fences[order].T
        self._run, self._number = run[order], number[order]
        self._sizes = np.concatenate([[0], np.cumsum(sizes)])
        by_last = np.argsort(self._last, kind="stable")
        self._lasts = self._last[by_last]
        self._sizes_by_last = np.concatenate([[0], np.cumsum(sizes[by_last])])
        self._opened: dict[int, Any] = {}

    def windows(self, first: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
        """Cut places into stretches of at most so many bytes, if pieces are small enough for that."""
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

    def read(self, first: int, stop: int) -> pa.Table:
        """The rows of places ``first`` to ``stop``.

        Raises:
            DataError: they are not all there, or one is there twice.
        """
        pieces = np.flatnonzero((self._first < stop) & (self._last >= first))
        tables, places = [], []
        for run, number in zip(
            self._run[pieces].tolist(), self._number[pieces].tolist(), strict=True
        ):
            batch = self._batch(run, number)
            own = to_numpy(batch.column(batch.num_columns - 1))
            low, high = np.searchsorted(own, [first, stop])
            rows = batch.slice(low, high - low)
            names = batch.schema.names[:-1]
            columns = [rows.column(n) for n in range(len(names))]
            tables.append(pa.Table.from_arrays(columns, schema=_without_last(batch.schema)))
            places.append(own[low:high])
        found = np.concatenate([*places, np.empty(0, dtype=np.int64)])
        order = np.argsort(found, kind="stable")
        if len(found) != stop - first or (found[order] != np.arange(first, stop)).any():
            raise damaged(self._asker, f"rows {first:,} to {stop:,} are not all there once")
        return gathered(tables, order)

    def close(self) -> None:
        """Close all files."""
        self._opened.clear()

    def _batch(self, run: int, number: int) -> Any:
        path = self._stems[run].with_suffix(".arrow")
        try:
            if run not in self._opened:
                if len(self._opened) >= OPEN_FILES:
                    del self._opened[next(iter(self._opened))]
                self._opened[run] = pa.ipc.open_file(pa.OSFile(str(path), "rb"))
            return self._opened[run].get_batch(number)
        except (OSError, pa.ArrowException) as error:
            raise damaged(self._asker, f"{path} cannot be read ({error})") from error


def damaged(asker: str, what: str) -> DataError:
    """What to raise over temporary files that are not what was written."""
    return DataError(
        f"{asker}(): the temporary files are damaged: {what}; begin anew with overwrite=True"
    )


def _without_last(schema: pa.Schema) -> pa.Schema:
    return pa.schema([schema.field(n) for n in range(len(schema) - 1)])
