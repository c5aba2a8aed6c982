"""Files of pieces between two passes: rows of one bucket each, as Arrow streams (lz4). The manifest says
where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trainpipes.engine.layout import IntArray
from trainpipes.errors import DataError, UnreachableError
from trainpipes.storage.output_folder import FileInfo, Manifest
from trainpipes.storage.places import Place

#: Which bytes pieces are: int64 ``[pieces, 3]`` of the number of the file, where it begins, where it ends.
Pieces: TypeAlias = IntArray
#: Bytes of rows that are compressed at a time.
BATCH_BYTES = 4 << 20
#: Requests to a server at once.
REQUESTS = 16


def piece_file(number: int) -> str:
    return f"part-{number:05d}.pieces"


class PieceWriter:
    def __init__(self, file: Any) -> None:
        self._file = file
        self._sizes: list[list[int]] = []
        self._rows = self._bytes = 0

    def write(self, pieces: Iterable[pa.Table]) -> None:
        """A run: a piece for each bucket."""
        sizes = []
        for piece in pieces:
            sizes.append(self._write(piece) if len(piece) else 0)
            self._rows, self._bytes = self._rows + len(piece), self._bytes + piece.nbytes
        self._sizes.append(sizes)

    def _write(self, piece: pa.Table) -> int:
        start: int = self._file.tell()
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_stream(self._file, piece.schema, options=options) as writer:
            writer.write_table(piece, max(1, BATCH_BYTES * len(piece) // max(1, piece.nbytes)))
        size: int = self._file.tell() - start
        return size

    def info(self) -> FileInfo:
        return FileInfo(self._rows, {}, notes={"pieces": self._sizes, "size": self._bytes})


class PieceIndex:
    def __init__(self, manifest: Manifest, numbers: Sequence[int] | None = None) -> None:
        numbers = range(len(manifest.entries)) if numbers is None else numbers
        files, edges = [], []
        for number in numbers:
            sizes = np.array(manifest.entries[number].notes["pieces"], dtype=np.int64)
            ends = np.cumsum(sizes).reshape(sizes.shape)
            edges.append(np.stack([ends - sizes, ends], axis=2))
            files += [number] * len(sizes)
        self._files, self._edges = np.array(files, dtype=np.int64), np.concatenate(edges)

    def of(self, bucket: int) -> Pieces:
        found = np.column_stack([self._files, self._edges[:, bucket]])
        return found[found[:, 1] < found[:, 2]]


def size_of(manifest: Manifest) -> int:
    return sum(int(entry.notes["size"]) for entry in manifest.entries)


def read_pieces(place: Place, pieces: Pieces) -> list[pa.Table]:
    files, starts, stops = pieces.T.tolist()
    names = [piece_file(number) for number in files]
    try:
        contents = read_ranges(place, names, starts, stops)
        return [pa.ipc.open_stream(content).read_all() for content in contents]
    except UnreachableError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise damaged(place, f"what is in {place.root} cannot be read ({error})") from error


def read_ranges(
    place: Place, names: Sequence[str], starts: Sequence[int], stops: Sequence[int]
) -> Iterator[bytes]:
    if place.is_local:
        yield from map(place.read, names, starts, stops)
        return
    with ThreadPoolExecutor(REQUESTS, "repack-requests") as pool:
        for first in range(0, len(names), REQUESTS):
            few = slice(first, first + REQUESTS)
            yield from pool.map(place.read, names[few], starts[few], stops[few])


def damaged(place: Place, what: str) -> DataError:
    return DataError(
        f"{place.caller}(): the temporary files are damaged: {what}; begin anew with overwrite=True",
        path=place.root,
    )
