from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.checks import ColumnName
from trainpipes._internal.types import IntArray
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.errors import SchemaError
from trainpipes.interfaces.stage import Stage
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.sources.files.file_list import FileList
from trainpipes.sources.files.file_reader import FileReader, cut_evenly
from trainpipes.sources.files.file_source import NumberedFiles
from trainpipes.sources.files.format import Format, Layout
from trainpipes.sources.files.index_store import IndexStore
from trainpipes.sources.files.schema import same_names
from trainpipes.sources.numpy.arrays import StoredArray, arrays_of, kept, read_arrays

#: Bytes and rows of a block, at most, unless the user says.
BLOCK_BYTES, BLOCK_ROWS = 1 << 20, 8192


class ReadNumpy(FileReader, random_access=True):
    """Reads the rows of arrays in ``.npy`` and ``.npz`` files: the first dimension is the rows.

    Rows are dicts of tensors: one for each array of an ``.npz`` file, for each field of a structured array,
    else ``output_column``. Rows of local, uncompressed files can be chosen by number
    (``shuffle(scope="global")``); other ``.npz`` files are read whole. Python objects are never loaded.

    Args:
        columns: names of arrays or fields; None for all, which all files must then have.
        output_column: the column of a plain ``.npy`` file.
        block_rows: rows in a block (a shuffle permutes blocks first); if left out, up to 1 MiB.
        storage_options: more options of fsspec; never shown or saved.
        index: where to keep the headers for later starts; see ``read_parquet``.

    Raises:
        UnreadableError: names all files that cannot be read.
        SchemaError: a file's arrays differ from the first's.
        DataChangedError: a file has changed since it was listed.

    >>> import numpy as np, pathlib, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "squares.npz"
    >>> np.savez(path, x=np.arange(4), y=np.arange(4) ** 2)
    >>> list(tp.list_files(path).read_numpy().batch(2).collate())[1]
    {'x': tensor([2, 3]), 'y': tensor([4, 9])}
    """

    columns: Sequence[str] | None = None
    _: KW_ONLY
    output_column: ColumnName = "array"
    block_rows: int | None = None
    storage_options: Mapping[str, Any] | None = None
    index: str | os.PathLike[str] | bool | None = None

    def _open_on(self, files: Sequence[Stage]) -> NumberedFiles:
        format = NumpyFormat(self)
        listed = self.listed(files)
        key = json.dumps([self.output_column, self.columns, self.block_rows])
        store = IndexStore(listed, self.name, format.name, key, self.options["index"])
        store.complete(lambda job: format.scan(job.data), str(self))
        layouts = store.layouts()
        arrays = [arrays_of(layout.extra)[1] for layout in layouts]
        _check_alike(listed, arrays, self.columns, str(self))
        first = arrays[0]
        names = list(first if self.columns is None else self.columns)
        return NumberedFiles(
            store,
            format,
            edges=[
                cut_evenly(int(each.rows.sum()), format.rows_of_block(first)) for each in layouts
            ],
            columns=names,
            row_bytes=float(sum(first[name].row_bytes for name in names)),
        )


@dataclass(eq=False)
class NumpyFormat(Format):
    """Files of NumPy as a format: a block is a range of rows."""

    name = "NumPy"
    random_access = by_number = True
    fit = "NumPy files that are on this machine and not compressed"
    otherwise = "write it with np.savez, or shuffle within a buffer"

    stage: ReadNumpy

    def rows_of_block(self, arrays: Mapping[str, StoredArray]) -> int:
        row_bytes = sum(array.row_bytes for array in arrays.values())
        return self.stage.block_rows or min(BLOCK_ROWS, max(1, BLOCK_BYTES // max(1, row_bytes)))

    def scan(self, file: FileBytes) -> Layout:
        with file.stream() as opened:
            stage = self.stage
            about = opened, file.size, stage.output_column, stage.columns, str(stage)
            arrays = read_arrays(*about)
        rows = max((array.rows for array in arrays.values()), default=0)
        whole = _is_whole(arrays.values(), file.local)
        edges = cut_evenly(rows, max(1, rows) if whole else self.rows_of_block(arrays))
        nowhere = np.zeros(len(edges) - 1, dtype=np.int64)  # of each array somewhere else
        return Layout(np.diff(edges), nowhere, nowhere, pa.schema([]), kept(file.size, arrays))

    def content(self, layout: Layout) -> str:
        sums = {name: array.crc32 for name, array in arrays_of(layout.extra)[1].items()}
        return "" if None in sums.values() else str(sums)

    def ranges(
        self, layout: Layout, block: int, columns: Sequence[str] | None
    ) -> list[tuple[int, int]]:
        size, arrays = _wanted(layout, columns)
        if _is_whole(arrays, False):
            return [(0, size)]
        return [array.span(*_rows(layout, block)) for array in arrays]

    def decode(
        self, data: FileBytes, layout: Layout, block: int, columns: Sequence[str] | None
    ) -> Iterator[TensorRows]:
        size, arrays = _wanted(layout, columns)
        start, stop = _rows(layout, block)
        if _is_whole(arrays, data.local):
            content = data.read([(0, size)])[0]
            yield _as_tensors([array.unpacked(content) for array in arrays], arrays, columns)
        elif data.local:  # beside others that are not
            yield self.take(data, layout, slice(start, stop), columns)
        else:
            parts = data.read(self.ranges(layout, block, columns))
            views = [a.view(part, stop - start) for a, part in zip(arrays, parts, strict=True)]
            yield _as_tensors(views, arrays, columns)

    def take(
        self, data: FileBytes, layout: Layout, rows: IntArray | slice, columns: Sequence[str] | None
    ) -> TensorRows:
        _, arrays = _wanted(layout, columns)
        return _as_tensors([array[rows] for array in _mapped(data, arrays)], arrays, columns)

    def unfit(self, layout: Layout, local: bool) -> bool:
        return not local or _is_whole(arrays_of(layout.extra)[1].values(), local)

    def describe(self, layouts: Sequence[Layout]) -> list[tuple[str, str]]:
        _, arrays = arrays_of(layouts[0].extra)
        return [
            ("arrays", ", ".join(f"{n} {arrays[n].kind}" for n in self.stage.columns or arrays))
        ]


def _wanted(layout: Layout, columns: Sequence[str] | None) -> tuple[int, list[StoredArray]]:
    size, arrays = arrays_of(layout.extra)
    return size, [arrays[name] for name in columns or arrays]


def _rows(layout: Layout, block: int) -> tuple[int, int]:
    start = block * int(layout.rows[0])
    return start, start + int(layout.rows[block])


def _is_whole(arrays: Iterable[StoredArray], local: bool) -> bool:
    return any(array.compressed or (array.interleaved and not local) for array in arrays)


def _mapped(data: FileBytes, arrays: Sequence[StoredArray]) -> list[Any]:
    content = data.mapped()
    assert content is not None
    for array in arrays:
        if array.stored is not None:
            data.once(array.member, partial(array.check_sum, memoryview(content)))
    return [array.view(content, array.rows, array.start) for array in arrays]


def _as_tensors(
    views: Sequence[Any], arrays: Sequence[StoredArray], columns: Sequence[str] | None
) -> TensorRows:
    assert columns is not None
    tensors = []
    for rows, array in zip(views, arrays, strict=True):
        kind = array.row_dtype
        own = rows.flags.writeable and rows.flags.c_contiguous and rows.dtype == kind
        tensors.append(torch.from_numpy(rows if own else np.array(rows, kind, order="C")))
    return TensorRows(tuple(tensors), tuple(columns))


def _check_alike(
    files: FileList,
    arrays: Sequence[dict[str, StoredArray]],
    columns: Sequence[str] | None,
    caller: str,
) -> None:
    first, first_path = arrays[0], files.names[0]
    names = list(columns or first)
    for path, stored in zip(files.names, arrays, strict=True):
        if columns is None:
            same_names(first_path, names, path, list(stored), caller)
        lengths, said = {name: stored[name].rows for name in names}, ""
        if len(set(lengths.values())) > 1:
            said = (
                f"arrays of a file have as many rows as each other, and {path} has {lengths}; choose some by "
                "columns=[...]"
            )
        for name in names:
            if first[name].kind != stored[name].kind:
                said = (
                    f"rows of {name!r} are {first[name].kind} in {first_path} and {stored[name].kind} in "
                    f"{path}; save them alike, leave the array out by columns=[...], or read the files in "
                    "pipelines of their own"
                )
        if said:
            raise SchemaError(f"{caller}: {said}", path=path, stage=caller)
