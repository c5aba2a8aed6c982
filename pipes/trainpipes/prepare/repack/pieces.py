"""Files of pieces between two passes: rows of one bucket each, as Arrow streams (lz4). The manifest says
where they are. A last column says where each row goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import gathered, one_chunk, to_arrow, to_numpy
from trainpipes.engine.layout import IntArray
from trainpipes.errors import DataError, UnreachableError
from trainpipes.storage.output_folder import FileInfo, Manifest
from trainpipes.storage.places import Place

CALLER = "repack"
#: Which bytes pieces are: int64 ``[pieces, 3]`` of the number of the file, where it begins, where it ends.
Pieces: TypeAlias = IntArray
#: Bytes of rows that are compressed at a time.
BATCH_BYTES = 4 << 20
#: The last column of rows between the passes: where each goes.
PLACE = "place"


def piece_file(number: int) -> str:
    return f"part-{number:05d}.pieces"


class PieceWriter:
    def __init__(self, file: Any, edges: IntArray) -> None:
        self._file, self._edges = file, edges
        self._sizes: list[list[int]] = []
        self._rows = self._bytes = 0

    def scatter(self, tables: list[pa.Table], places: IntArray) -> None:
        """Write a piece for each bucket; rows with negative places go. Empties ``tables``."""
        order = np.argsort(places, kind="stable")
        order = order[int(np.count_nonzero(places < 0)) :]
        places = places[order]
        table = _taken(tables, order).append_column(PLACE, to_arrow(places))
        cuts = np.searchsorted(places, self._edges).tolist()
        self._sizes.append([self._write(table.slice(a, b - a)) for a, b in pairwise(cuts)])

    def _write(self, piece: pa.Table) -> int:
        start: int = self._file.tell()
        if len(piece):
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            with pa.ipc.new_stream(self._file, piece.schema, options=options) as writer:
                writer.write_table(piece, max(1, BATCH_BYTES * len(piece) // max(1, piece.nbytes)))
        self._rows, self._bytes = self._rows + len(piece), self._bytes + piece.nbytes
        size: int = self._file.tell() - start
        return size

    def info(self) -> FileInfo:
        return FileInfo(self._rows, {}, notes={"pieces": self._sizes, "size": self._bytes})


def pieces_of(manifest: Manifest, numbers: Sequence[int]) -> list[Pieces]:
    """The pieces of each bucket in some of the files."""
    found = []
    for number in numbers:
        sizes = np.array(manifest.entries[number].notes["pieces"], dtype=np.int64)
        ends = np.cumsum(sizes).reshape(sizes.shape)
        found.append(np.stack([np.full_like(ends, number), ends - sizes, ends], axis=2))
    buckets = np.concatenate(found).swapaxes(0, 1)
    return [some[some[:, 1] < some[:, 2]] for some in buckets]


def size_of(manifest: Manifest) -> int:
    return sum(int(entry.notes["size"]) for entry in manifest.entries)


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


def few_tables(tables: Iterable[pa.Table], size: int) -> Iterator[list[pa.Table]]:
    """Tables that have that many bytes together, about."""
    held: list[pa.Table] = []
    held_bytes = 0
    for table in tables:
        held.append(table)
        held_bytes += table.nbytes
        del table
        if held_bytes >= size:
            yield held
            held, held_bytes = [], 0
    if held:
        yield held


def groups_of(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The same rows, so many together."""
    held: list[pa.Table] = []
    count = 0
    for table in tables:
        start = 0
        while start < len(table):
            held.append(table.slice(start, rows - count))
            start, count = start + len(held[-1]), count + len(held[-1])
            if count == rows:
                yield pa.concat_tables(held).combine_chunks()
                held, count = [], 0
        if held:  # a copy: a slice would keep all of the table in memory
            held[-1] = gathered(held[-1], np.arange(len(held[-1])))
        del table  # before the next rows are read
    if held:
        yield pa.concat_tables(held).combine_chunks()


def damaged(place: Place, what: str) -> DataError:
    return DataError(
        f"{place.caller}(): the temporary files are damaged: {what}; begin anew with overwrite=True",
        path=place.root,
    )
