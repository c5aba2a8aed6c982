"""``read_numpy``: rows of arrays in ``.npy`` and ``.npz`` files.

The stage and its source, made by the thread that plans; what is open is shared by the readers of a process,
which several threads use.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
import torch

from trainpipes._internal.messages import need_columns
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, SchemaError
from trainpipes.kinds.source import Place, RandomAccessSource
from trainpipes.kinds.stage import Stage
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.file_bytes import FileBytes, mapped
from trainpipes.sources.files.file_errors import check_unchanged, unreadable
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_rows import FileRows, cut_evenly
from trainpipes.sources.files.format import Layout
from trainpipes.sources.files.index_store import IndexStore
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.numpy.layout import StoredArray, arrays_of, check_sum, kept, read_arrays
from trainpipes.sources.numpy.reader import NumpyReader

SUFFIXES = (".npy", ".npz")
#: Bytes and rows of a block, at most, unless the user says.
BLOCK_BYTES, BLOCK_ROWS = 1 << 20, 8192
#: Files that stay mapped, at most.
MAPPED = 256


class ReadNumpy(FileReader):
    """Reads the rows of arrays in ``.npy`` and ``.npz`` files: the first dimension is the rows.

    In: files, from ``list_files``; a folder stands for its ``.npy`` and ``.npz`` files. Out: dicts of
    tensors, one for each array: by its name in an ``.npz`` file, by each field's name for a structured array,
    as ``output_column`` for any other ``.npy`` file. Cursor: which block, and how many rows of it.

    Local ``.npy`` files, and ``.npz`` files of ``np.savez``, are mapped into memory, and their rows can be
    chosen by number (``shuffle(scope="global")``, ``shuffle(sampler=...)``). Each process compares the
    checksum of each array of such an ``.npz`` once, when it first reads from the file: 0.4 to 1 s a GB.
    Files of ``np.savez_compressed`` are decompressed whole each time that a reader comes to them, which suits
    files of about 10 MB. Only the rows that are needed are fetched from remote files, so that of those which
    are not compressed no checksum is compared. Big-endian numbers come in this machine's byte order. Python
    objects are never loaded, since that runs code.

    Args:
        columns: names of arrays or fields; None for all; then all files must have the same names.
        output_column: name of the column that holds the rows of a plain ``.npy`` file.
        block_rows: rows in a block (a shuffle permutes blocks first); if left out, as many as make up to 1
            MiB.
        storage_options: more options for the fsspec file system, besides those of ``list_files``. They are
            neither shown nor part of a state.
        index: where to keep what the headers say: a file that ends in ".arrow", or a folder. True: in the
            cache folder (see ``tp.cache``). False: nowhere. If left out: in the cache folder, if the
            files are remote, or 64 or more.

    Raises:
        UnreadableError: names all files that cannot be read, each with the reason.
        SchemaError: a file has other arrays than the first, or of other types, shapes or lengths.
        DataChangedError: a file has changed since it was listed.

    >>> import numpy as np, pathlib, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "squares.npz"
    >>> np.savez(path, x=np.arange(4), y=np.arange(4) ** 2)
    >>> list(tp.list_files(path).read_numpy().batch(2).collate())[1]
    {'x': tensor([2, 3]), 'y': tensor([4, 9])}
    """

    random_access = True

    columns: Sequence[str] | None = None
    _: KW_ONLY
    output_column: str = "array"
    block_rows: int | None = None
    storage_options: Mapping[str, Any] | None = None
    index: str | os.PathLike[str] | bool | None = None

    def check(self) -> None:
        super().check()
        if not isinstance(self.output_column, str) or not self.output_column:
            raise ConfigError(
                f"read_numpy(output_column) is the name of an .npy file's rows, got {self.output_column!r}"
            )

    def open_files(self, files: Sequence[Stage]) -> NumpyFiles:
        """The rows of the files that the stages below list and let through."""
        listed = self.listed(files, SUFFIXES)
        key = json.dumps([self.output_column, self.columns])
        store = IndexStore(listed, self.name, "NumPy", key, self.options["index"])
        store.complete(lambda job: self._look(job.data), str(self))
        return NumpyFiles(store, self.block_rows, self.columns, str(self))

    def _look(self, data: FileBytes) -> Layout:
        """A file's arrays."""
        with data.stream() as opened:
            arrays = read_arrays(opened, data.size, self.output_column, self.columns, str(self))
        return kept(arrays, data.size)


class NumpyFiles(FileRows, RandomAccessSource):
    """Rows of arrays in files. Can be pickled; holds some 100 bytes an array.

    Args:
        store: the files, and their arrays.
        block_rows: rows of a block; None to tell by bytes.
        columns: the order of the arrays; None for that of the first file.
        asker: the stage, for messages.
    """

    def __init__(
        self,
        store: IndexStore,
        block_rows: int | None,
        columns: Sequence[str] | None,
        asker: str,
    ) -> None:
        files, self.kept_in = store.files, store.kept_in
        self.arrays = [arrays_of(layout) for layout in store.layouts()]
        _check_alike(files, self.arrays, columns, asker)
        first = self.arrays[0]
        self.names = list(first) if columns is None else list(columns)
        self.row_bytes = float(
            sum(int(np.prod(first[n].row_shape)) * first[n].row_dtype.itemsize for n in self.names)
        )
        if block_rows is None:
            block_rows = int(min(BLOCK_ROWS, max(1, BLOCK_BYTES // max(1.0, self.row_bytes))))
        rows = [arrays[self.names[0]].rows for arrays in self.arrays]
        super().__init__(files, [cut_evenly(count, block_rows) for count in rows])
        self.sizes = store.sizes
        self.first_rows: IntArray = np.cumsum([0, *rows], dtype=np.int64)
        self._open = OpenArrays()
        self._unmapped = next((n for n in range(len(files)) if not self._is_mapped(n)), None)
        self.by_number = self._unmapped is None

    def _is_mapped(self, file: int) -> bool:
        stored = all(self.arrays[file][name].start is not None for name in self.names)
        return stored and is_local(self.files.system(file))

    def reader(self) -> NumpyReader:
        return NumpyReader(self)

    def take(self, index: IntArray) -> TensorRows:
        if self._unmapped is not None:
            name = self.files.names[self._unmapped]
            raise ConfigError(
                "rows can be chosen by number in NumPy files that are on this machine and not compressed, "
                f"and {name} is not: write it with np.savez, or shuffle within a buffer",
                path=name,
            )
        first = self.arrays[0]
        found = [
            np.empty((len(index), *first[n].row_shape), first[n].row_dtype) for n in self.names
        ]
        which = np.searchsorted(self.first_rows, index, side="right") - 1
        for file in np.unique(which).tolist():
            places = np.flatnonzero(which == file)
            arrays = self.mapped(file, Place(self.files.names[file]))
            for out, name in zip(found, self.names, strict=True):
                out[places] = arrays[name][index[places] - self.first_rows[file]]
        return self.rows_of(found)

    def mapped(self, file: int, place: Place) -> dict[str, Any]:
        """The arrays of a local file, mapped."""
        return self._open.arrays(self, file, place)

    def rows_of(self, arrays: Sequence[Any]) -> TensorRows:
        """Rows of arrays that are nobody else's."""
        return TensorRows(tuple(torch.from_numpy(array) for array in arrays), tuple(self.names))

    def describe(self) -> list[tuple[str, str]]:
        first = self.arrays[0]
        shown = ", ".join(f"{n} {first[n].row_dtype}{list(first[n].row_shape)}" for n in self.names)
        return [*super().describe(), ("arrays", shown)]


def _check_alike(
    files: FileList,
    arrays: Sequence[dict[str, StoredArray]],
    columns: Sequence[str] | None,
    asker: str,
) -> None:
    """Raise unless all files have the same arrays, of the same types and rows of the same shape."""
    first = arrays[0]
    for path, found in zip(files.names, arrays, strict=True):
        need_columns(list(found), list(first), asker, path)
        more = [name for name in found if name not in first]
        if more and columns is None:
            raise SchemaError(
                f"{asker}: {path} has an array {more[0]!r}, and {files.names[0]} has not; choose arrays that "
                "all files have by columns=[...]",
                path=path,
                stage=asker,
            )
        for name in first if columns is None else columns:
            one, other = first[name], found[name]
            kinds = [f"{a.row_dtype}{list(a.row_shape)}" for a in (one, other)]
            if kinds[0] != kinds[1]:
                raise SchemaError(
                    f"{asker}: rows of {name!r} are {kinds[0]} in {files.names[0]} and {kinds[1]} in {path}; "
                    "save them alike, leave the array out by columns=[...], or read the files in "
                    "pipelines of their own",
                    path=path,
                    stage=asker,
                )
        names = list(first) if columns is None else list(columns)
        lengths = {name: found[name].rows for name in names}
        if len(set(lengths.values())) > 1:
            raise SchemaError(
                f"{asker}: arrays of a file have as many rows as each other, and {path} has {lengths}; "
                "choose some by columns=[...]",
                path=path,
                stage=asker,
            )


class OpenArrays:
    """Local files that are mapped, for all readers of a process. Pickled, it is empty."""

    def __init__(self) -> None:
        self._arrays: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._sums: dict[int, threading.Lock] = {}  # one who sums up a file keeps none from others
        self._sound: set[int] = set()

    def __reduce__(self) -> Any:
        return OpenArrays, ()

    def arrays(self, source: NumpyFiles, file: int, place: Place) -> dict[str, Any]:
        """The arrays of a file by name, which are those that were listed.

        Raises:
            UnreadableError: the checksum of an array in an archive is another; it is compared once.
        """
        check_unchanged(source.files, file, place)
        if file not in self._sound:
            with self._lock:
                alone = self._sums.setdefault(file, threading.Lock())
            with alone:
                self._check(source, file, place)
        with self._lock:
            found = self._arrays.get(file)
            if found is None:
                path = source.files.paths[file]
                stored = source.arrays[file]
                found = {name: _mapped(path, stored[name]) for name in source.names}
                self._arrays[file] = found
                while len(self._arrays) > MAPPED:
                    del self._arrays[next(iter(self._arrays))]
            return found

    def _check(self, source: NumpyFiles, file: int, place: Place) -> None:
        stored = [source.arrays[file][name] for name in source.names]
        if file in self._sound or all(array.stored is None for array in stored):
            self._sound.add(file)
            return
        try:
            with memoryview(mapped(source.files.paths[file])) as content:
                for array in stored:
                    check_sum(content, array)
        except BadFileError as error:
            raise unreadable(place, str(error)) from error
        self._sound.add(file)


def _mapped(path: str, array: StoredArray) -> Any:
    """An array of a local file."""
    order: Any = "F" if array.fortran else "C"
    if not array.rows or not array.row_bytes:  # nothing can be mapped
        whole: Any = np.empty(array.shape, array.dtype, order)
    else:
        assert array.start is not None
        # Not as a memmap: of that, a slice takes three times as long.
        mapped = np.memmap(path, array.dtype, "r", array.start, array.shape, order)
        whole = mapped.view(np.ndarray)
    return whole if array.field is None else whole[array.field]
