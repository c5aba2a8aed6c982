"""The files between the passes of a shuffle on disk.

Places in the result are cut into buckets that fit into memory. A file has pieces, Arrow streams (lz4) of rows
of one bucket each, whose last column says where each row goes; the manifest says where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trainpipes._internal.types import IntArray
from trainpipes.columns.arrays import gathered, one_chunk, to_arrow, to_numpy
from trainpipes.errors import DataError, UnreachableError
from trainpipes.filesystems.output_file import OutputFile
from trainpipes.filesystems.places import Place
from trainpipes.writers.epoch_rows import EpochRows
from trainpipes.writers.output_folder import FileInfo

CALLER = "repack"
#: Which bytes pieces are: int64 ``[pieces, 3]`` of the number of the file, where it begins, where it ends.
Pieces: TypeAlias = IntArray
#: Bytes of rows that are compressed at a time.
BATCH_BYTES = 4 << 20
#: The last column of rows between the passes: where each goes.
PLACE = "place"


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
) -> FileInfo:
    """Write a piece for each bucket between ``edges``, of all tables that come together with their places.
    The lists of tables are emptied.
    """
    sizes, count, size = [], 0, 0
    for tables, places in rows:
        order = np.argsort(places, kind="stable")
        sorted_places = places[order]
        table = _taken(tables, order).append_column(PLACE, to_arrow(sorted_places))
        cuts = pairwise(np.searchsorted(sorted_places, edges).tolist())
        sizes.append([_write(table.slice(a, b - a), file) for a, b in cuts])
        count, size = count + len(table), size + table.nbytes
        file.advance(len(places))
        del table  # before the next rows are read
        pa.default_memory_pool().release_unused()
    return FileInfo(count, {}, notes={"pieces": sizes, "size": size})


def _write(piece: pa.Table, file: Any) -> int:
    start: int = file.tell()
    if len(piece):
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_stream(file, piece.schema, options=options) as writer:
            writer.write_table(piece, max(1, BATCH_BYTES * len(piece) // max(1, piece.nbytes)))
    size: int = file.tell() - start
    return size


def pieces_of(files: Iterable[tuple[int, FileInfo]]) -> list[Pieces]:
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
    except UnreachableError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise damaged(place, f"what is in {place.root} cannot be read ({error})") from error
    places = [to_numpy(table.column(-1)) for table in tables]
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
        column = one_chunk(pa.chunked_array(chunks[number], kind))
        chunks[number] = []
        columns.append(gathered(column, order))
        del column
    return pa.Table.from_arrays(columns, schema=schema)


def few_tables(rows: EpochRows, first: int, stop: int, size: int) -> Iterator[list[pa.Table]]:
    """Rows from one to before another, as tables that have that many bytes together, about."""
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
        raise DataError(
            f"{CALLER}(): the input has {at - first:,} rows from row {first:,} on, and {stop - first:,} were "
            "counted before: it has changed; call again"
        )
    if held:
        yield held


def damaged(place: Place, what: str) -> DataError:
    return DataError(
        f"{CALLER}(): the temporary files are damaged: {what}; begin anew with overwrite=True",
        path=place.root,
    )
