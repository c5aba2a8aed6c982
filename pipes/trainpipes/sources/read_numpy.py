"""``read_numpy``: arrays in ``.npy`` and ``.npz`` files, and where they lie."""

from __future__ import annotations

import io
import json
import os
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, astuple, dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.checks import ColumnName, IntArray
from trainpipes._internal.messages import need_columns
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.errors import SchemaError, cut
from trainpipes.interfaces.stage import Stage
from trainpipes.sources.files import formats
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.sources.files.file_reader import FileReader, cut_evenly
from trainpipes.sources.files.file_source import NumberedFiles
from trainpipes.sources.files.formats import BadFileError
from trainpipes.sources.files.index_store import IndexStore
from trainpipes.sources.files.list_files import FileList

MAGIC = b"\x93NUMPY"
#: Bytes of a header, at most.
MOST = 1 << 20
#: Bytes that are unpacked at once.
PIECE = 1 << 20
#: Dimensions that NumPy knows, at most, and rows of an array that holds no values.
MOST_DIMENSIONS, MOST_EMPTY = 64, 1 << 31
#: Numbers that tensors do not hold.
WIDE = ("float96", "float128", "complex192", "complex256")
#: Python 3.11 fails with a SystemError where two threads parse at once: python/cpython issue 106905.
_parsing = threading.Lock()


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, or a field of an array; ``start`` is in its member, if that is compressed.
    ``stored`` has the bytes and CRC-32 of a member that is not, ``crc32`` that of each.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    member: str | None = None
    stored: tuple[int, int, int] | None = None
    crc32: int | None = None

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def row_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("=")

    @property
    def kind(self) -> str:
        return f"{self.row_dtype}{list(self.shape[1:])}"

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.row_dtype.itemsize

    @property
    def compressed(self) -> bool:
        return self.member is not None and self.stored is None

    @property
    def _extent(self) -> int:
        steps = zip(self.shape[1:], self.strides[1:], strict=True)
        return self.row_dtype.itemsize + sum((count - 1) * step for count, step in steps)

    @property
    def interleaved(self) -> bool:
        """Whether a row's numbers lie between those of others, as in Fortran's order."""
        return self._extent > self.strides[0]

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Where the bytes of some rows lie."""
        begin = self.start + start * self.strides[0]
        return begin, begin + (stop - start - 1) * self.strides[0] + self._extent

    def view(self, content: Any, rows: int, start: int = 0) -> Any:
        return np.ndarray((rows, *self.shape[1:]), self.dtype, content, start, self.strides)

    def unpacked(self, content: memoryview) -> Any:
        if self.compressed:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                about = archive.getinfo(f"{self.member}.npy")
                with archive.open(about) as member:  # which compares the checksum at its end
                    member.read(self.start)
                    numbers = np.empty(about.file_size - self.start, np.uint8)
                    for at in range(0, len(numbers), PIECE):
                        piece = member.read(min(PIECE, len(numbers) - at))
                        numbers[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                    member.read(1)
            return self.view(numbers, self.rows)
        self.check_sum(content)
        return self.view(content, self.rows, self.start)

    def check_sum(self, content: memoryview) -> None:
        start, stop, reported = self.stored or (0, 0, 0)
        if zlib.crc32(content[start:stop]) != reported:
            raise BadFileError(
                f"array {self.member!r}: its bytes have changed since it was written: their checksum differs"
            )


def kept(size: int, arrays: Mapping[str, StoredArray]) -> bytes:
    return formats.packed(
        size=size, arrays={name: astuple(array) for name, array in arrays.items()}
    )


@lru_cache(maxsize=4096)
def arrays_of(content: bytes) -> tuple[int, dict[str, StoredArray]]:
    layout = formats.unpacked(content)
    each = {
        name: StoredArray(dtype, tuple(shape), tuple(strides), *rest)
        for name, (dtype, shape, strides, *rest) in layout["arrays"].items()
    }
    return layout["size"], each


def read_arrays(
    file: BinaryIO, size: int, column: str, columns: Sequence[str] | None, caller: str
) -> dict[str, StoredArray]:
    """The wanted arrays of a file by name; ``column`` names that of an ``.npy`` file."""

    def wanted(names: Sequence[str]) -> Sequence[str]:
        if columns is not None:
            need_columns(names, columns, caller, file.name)
        return [name for name in names if columns is None or name in columns]

    if size == 0:
        raise BadFileError("empty: 0 bytes")
    head = file.read(6)
    file.seek(0)
    if head == MAGIC:
        header = _Header(file, size)
        if header.end < size and not header.dtype.hasobject:
            raise BadFileError(
                f"it goes on behind its array, at byte {header.end:,} of {size:,}, as where numpy.save() "
                "wrote several arrays to one file: save one array a file, or all by numpy.savez()"
            )
        fields = header.dtype.names
        return {name: header.array(name, bool(fields)) for name in wanted(fields or [column])}
    if head[:2] == b"PK":
        return _of_zip(file, size, wanted)
    if head[:1] == b"\x80":
        raise BadFileError("a pickle, which is not read, since loading one runs code")
    raise BadFileError(f"neither .npy nor .npz (starts with {head!r})")


def _of_zip(
    file: BinaryIO, size: int, wanted: Callable[[Sequence[str]], Sequence[str]]
) -> dict[str, StoredArray]:
    arrays = {}
    try:
        with zipfile.ZipFile(file) as archive:
            named = {}
            for member in archive.infolist():
                if member.filename.endswith(".npy"):
                    named[member.filename.removesuffix(".npy")] = member
                else:
                    archive.open(member).close()  # whose name may be damaged: it stands there twice
            if not named:
                raise BadFileError("there are no arrays in it")
            for name in wanted(list(named)):
                member = named[name]
                with archive.open(member) as inner:
                    array = _Header(inner, member.file_size, f"array {name!r}: ").array(name)
                arrays[name] = replace(array, member=name, crc32=member.CRC)
                if member.compress_type == zipfile.ZIP_STORED:
                    file.seek(member.header_offset + 26)
                    start = file.tell() + 4 + sum(struct.unpack("<HH", file.read(4)))  # name, more
                    stored = start, start + member.file_size, member.CRC
                    if stored[1] > size:
                        raise BadFileError("damaged: an array would lie behind the file's end")
                    arrays[name] = replace(arrays[name], start=start + array.start, stored=stored)
    except (zipfile.BadZipFile, struct.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise BadFileError(f"damaged, or no .npz: {error}") from error
    return arrays


class _Header:
    """What the header of a file of ``size`` bytes, or of a member, says of its array."""

    def __init__(self, file: Any, size: int, where: str = "") -> None:
        try:
            form = np.lib.format
            version = form.read_magic(file)
            header = file if version < (3, 0) else _as_latin(file)
            read = form.read_array_header_2_0 if version > (1, 0) else form.read_array_header_1_0
            with _parsing:
                shape, self._fortran, self.dtype = read(header, max_header_size=MOST)
            self._begin = file.tell()
        except Exception as error:
            raise BadFileError(
                f"{where}damaged header, or cut short: {cut(str(error), 200)}"
            ) from error
        said = cut(str(list(shape)), 80)
        if not shape:
            way = "a file that is one row is read by read_bytes() and numpy.load in a map()"
            raise BadFileError(f"{where}a single value, and rows need a first dimension: {way}")
        odd = {*map(type, shape)} != {int} or min(shape) < 0 or len(shape) > MOST_DIMENSIONS
        if odd or (shape[0] > MOST_EMPTY and not prod(shape[1:])):
            raise BadFileError(f"{where}damaged header: no array has the shape {said}")
        self.end = self._begin + prod(shape) * self.dtype.itemsize
        if self.end > size:
            raise BadFileError(
                f"{where}cut short: an array of shape {said} needs {self.end:,} bytes, and there are {size:,}"
            )
        self._shape = shape

    def array(self, name: str, is_field: bool = False) -> StoredArray:
        dtype, offset = self.dtype, 0
        if is_field:
            assert self.dtype.fields is not None
            dtype, offset = self.dtype.fields[name][:2]
        if self.dtype.hasobject:
            raise BadFileError(
                f"array {name!r} holds Python objects, pickled, which are not read, since loading them runs "
                "code: save numbers"
            )
        base = dtype.base
        if base.kind not in "biufc" or base.newbyteorder("=").name in WIDE:
            raise BadFileError(
                f"array {name!r} is of {base.newbyteorder('=')}, and rows are of integers, floats, complex "
                "numbers or bools: save it as one of these, leave it out by columns=[...], or write text to "
                "Parquet"
            )
        strides = _strides(self._shape, self.dtype.itemsize, self._fortran)
        inner = _strides(dtype.shape, base.itemsize)
        return StoredArray(
            base.str, (*self._shape, *dtype.shape), (*strides, *inner), self._begin + offset
        )


def _strides(shape: tuple[int, ...], size: int, fortran: bool = False) -> tuple[int, ...]:
    """Bytes between consecutive elements in each dimension."""
    if fortran:
        return _strides(shape[::-1], size)[::-1]
    return tuple(size * prod(shape[n + 1 :]) for n in range(len(shape)))


def _as_latin(file: Any) -> BinaryIO:
    """A header of version 3 (UTF-8) as version 2 (Latin-1), which NumPy reads."""
    (length,) = struct.unpack("<I", file.read(4))
    text = file.read(min(length, MOST)).decode().encode("latin-1", "backslashreplace")
    return io.BytesIO(struct.pack("<I", len(text)) + text)


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
class NumpyFormat(formats.Format):
    """Files of NumPy as a format: a block is a range of rows."""

    name = "NumPy"
    random_access = by_number = True
    fit = "NumPy files that are on this machine and not compressed"
    otherwise = "write it with np.savez, or shuffle within a buffer"

    stage: ReadNumpy

    def rows_of_block(self, arrays: Mapping[str, StoredArray]) -> int:
        row_bytes = sum(array.row_bytes for array in arrays.values())
        return self.stage.block_rows or min(BLOCK_ROWS, max(1, BLOCK_BYTES // max(1, row_bytes)))

    def scan(self, file: FileBytes) -> formats.Layout:
        with file.stream() as opened:
            stage = self.stage
            about = opened, file.size, stage.output_column, stage.columns, str(stage)
            arrays = read_arrays(*about)
        rows = max((array.rows for array in arrays.values()), default=0)
        whole = _is_whole(arrays.values(), file.local)
        edges = cut_evenly(rows, max(1, rows) if whole else self.rows_of_block(arrays))
        nowhere = np.zeros(len(edges) - 1, dtype=np.int64)  # of each array somewhere else
        return formats.Layout(
            np.diff(edges), nowhere, nowhere, pa.schema([]), kept(file.size, arrays)
        )

    def content(self, layout: formats.Layout) -> str:
        sums = {name: array.crc32 for name, array in arrays_of(layout.extra)[1].items()}
        return "" if None in sums.values() else str(sums)

    def ranges(
        self, layout: formats.Layout, block: int, columns: Sequence[str] | None
    ) -> list[tuple[int, int]]:
        size, arrays = _wanted(layout, columns)
        if _is_whole(arrays, False):
            return [(0, size)]
        return [array.span(*_rows(layout, block)) for array in arrays]

    def decode(
        self, data: FileBytes, layout: formats.Layout, block: int, columns: Sequence[str] | None
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
        self,
        data: FileBytes,
        layout: formats.Layout,
        rows: IntArray | slice,
        columns: Sequence[str] | None,
    ) -> TensorRows:
        _, arrays = _wanted(layout, columns)
        return _as_tensors([array[rows] for array in _mapped(data, arrays)], arrays, columns)

    def unfit(self, layout: formats.Layout, local: bool) -> bool:
        return not local or _is_whole(arrays_of(layout.extra)[1].values(), local)

    def describe(self, layouts: Sequence[formats.Layout]) -> list[tuple[str, str]]:
        _, arrays = arrays_of(layouts[0].extra)
        return [
            ("arrays", ", ".join(f"{n} {arrays[n].kind}" for n in self.stage.columns or arrays))
        ]


def _wanted(layout: formats.Layout, columns: Sequence[str] | None) -> tuple[int, list[StoredArray]]:
    size, arrays = arrays_of(layout.extra)
    return size, [arrays[name] for name in columns or arrays]


def _rows(layout: formats.Layout, block: int) -> tuple[int, int]:
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
        is_usable = rows.flags.writeable and rows.flags.c_contiguous and rows.dtype == kind
        tensors.append(torch.from_numpy(rows if is_usable else np.array(rows, kind, order="C")))
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
            formats.same_names(first_path, names, path, list(stored), caller)
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
