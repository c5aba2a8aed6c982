"""Reads rows of NumPy files in order.

A ``NumpyReader`` is one place in the files, for one thread at a time.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.kinds.source import Place
from trainpipes.sources.files.block_reader import explained
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.file_bytes import FetchedBytes, FileBytes, open_bytes
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.numpy.layout import StoredArray, loaded
from trainpipes.sources.remote.ahead import Ahead
from trainpipes.sources.remote.retry import Requests

if TYPE_CHECKING:
    from trainpipes.sources.numpy.read_numpy import NumpyFiles


#: Errors for which a file is damaged.
BAD = (BadFileError, ValueError, zipfile.BadZipFile, EOFError)


class NumpyReader:
    """One place in NumPy files. Not for two threads at once.

    Args:
        source: the files and blocks.
    """

    def __init__(self, source: NumpyFiles) -> None:
        self._source = source
        self._requests = Requests(source.files.retry_seconds)
        self._whole: tuple[int, dict[str, Any]] = -1, {}  # the file that was read whole
        self._block: int = -1  # whose bytes these are
        self._data: FileBytes | None = None
        self._ahead = Ahead(self._fetch, self._size, source.files.prefetch_bytes)

    def expect(self, blocks: Sequence[int]) -> None:
        """Say which blocks will be read next, in order: those on other machines are fetched, several side by
        side."""
        self._ahead.expect([b for b in blocks if b != self._block and self._ranges(b)])

    def _ranges(self, block: int) -> list[tuple[int, int]]:
        """Where the rows of a block of a file on another machine lie; none if it is read whole."""
        source = self._source
        file, begin = int(source.file_of_block[block]), int(source.begins[block])
        if is_local(source.files.system(file)):
            return []
        arrays = [source.arrays[file][name] for name in source.names]
        if any(array.start is None or array.fortran for array in arrays):
            return []
        return [array.span(begin, begin + int(source.lengths[block])) for array in arrays]

    def _size(self, block: int) -> float:
        return float(sum(stop - start for start, stop in self._ranges(block)))

    def _fetch(self, block: int) -> FileBytes:
        """The bytes of a block, which are here; in any thread."""
        file = int(self._source.file_of_block[block])
        data = open_bytes(self._source.files, file, self._requests)
        return FetchedBytes(data, self._ranges(block))

    def read(self, block: int, start: int, stop: int) -> TensorRows:
        """Rows ``start`` to ``stop`` of a block.

        Raises:
            DataError: they cannot be had, or not decompressed.
            UnreachableError: the server does not answer, or denies access.
        """
        source = self._source
        begin = int(source.begins[block])
        place = source.place(block, start)
        rows = begin + start, begin + stop
        with explained(place, kept_in=source.kept_in, kinds=BAD):
            found = [self._rows(block, name, *rows, place) for name in source.names]
        kinds = [source.arrays[0][name].row_dtype for name in source.names]
        return source.rows_of(
            [np.array(a, k, order="C") for a, k in zip(found, kinds, strict=True)]
        )

    def _rows(self, block: int, name: str, start: int, stop: int, place: Place) -> Any:
        source, file = self._source, int(self._source.file_of_block[block])
        array = source.arrays[file][name]
        if array.start is None or (array.fortran and not is_local(source.files.system(file))):
            return self._read_whole(file)[name][start:stop]
        if is_local(source.files.system(file)):
            return source.mapped(file, place)[name][start:stop]
        if self._data is None or block != self._block:
            self._data = self._ahead.take(block)
            self._data = self._data or open_bytes(source.files, file, self._requests)
            self._block = block
        content = self._data.read([array.span(start, stop)])[0]
        rows = np.frombuffer(content, array.dtype).reshape(stop - start, *array.shape[1:])
        return rows if array.field is None else rows[array.field]

    def _read_whole(self, file: int) -> dict[str, Any]:
        """All arrays of a file, decompressed."""
        if self._whole[0] != file:
            source = self._source
            self._whole = -1, {}  # two would take twice the memory
            found = {}
            data = open_bytes(source.files, file, self._requests)
            data.check()
            with data.stream() as opened:
                for name in source.names:
                    found[name] = _decoded(opened, source.arrays[file][name])
            self._whole = file, found
        return self._whole[1]

    def close(self) -> None:
        """Let go of what was decompressed last."""
        self._whole = -1, {}
        self._block, self._data = -1, None


def _decoded(file: BinaryIO, array: StoredArray) -> Any:
    """An array of a file, which is read whole."""
    if array.member is None:
        file.seek(0)
        whole = loaded(file.read())
    else:
        with zipfile.ZipFile(file) as archive:
            whole = loaded(archive.read(f"{array.member}.npy"))
    if whole.shape != array.shape or whole.dtype != array.dtype:
        raise BadFileError("it holds another array than it did")
    return whole if array.field is None else whole[array.field]
