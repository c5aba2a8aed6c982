from __future__ import annotations

import ast
import io
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, BinaryIO

import numpy as np

from trainpipes._internal.messages import need_columns
from trainpipes._internal.text import cut
from trainpipes.sources.files.each_file import BadFileError

MAGIC = b"\x93NUMPY"
#: Bytes of a header, at most.
MOST = 1 << 20
#: Dimensions that NumPy knows, at most, and rows of an array that holds no values.
MOST_DIMENSIONS, MOST_EMPTY = 64, 1 << 31
#: Numbers that tensors do not hold.
WIDE = ("float96", "float128", "complex192", "complex256")
#: Bytes of which the checksum is computed at once.
SUMMED = 1 << 20
#: Python 3.11 fails with a SystemError where two threads parse at once: python/cpython issue 106905.
_parsing = threading.Lock()


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, or a field of one; ``start`` is None if compressed, ``stored`` has bytes and
    CRC-32.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    start: int | None
    member: str | None = None
    field: str | None = None
    stored: tuple[int, int, int] | None = None

    @property
    def rows(self) -> int:
        return self.shape[0]

    def span(self, start: int, stop: int) -> tuple[int, int]:
        assert self.start is not None
        size = prod(self.shape[1:]) * self.dtype.itemsize
        return self.start + start * size, self.start + stop * size

    @cached_property
    def row_dtype(self) -> np.dtype[Any]:
        own = self.dtype if self.field is None else self.dtype[self.field]
        return own.base.newbyteorder("=")

    @property
    def row_shape(self) -> tuple[int, ...]:
        inner = () if self.field is None else self.dtype[self.field].shape
        return (*self.shape[1:], *inner)

    @property
    def kind(self) -> str:
        return f"{self.row_dtype}{list(self.row_shape)}"

    @property
    def row_bytes(self) -> int:
        return prod(self.row_shape) * self.row_dtype.itemsize

    def view(self, content: Any, rows: int, start: int = 0) -> Any:
        shape = (rows, *self.shape[1:])
        whole = np.ndarray(shape, self.dtype, content, start, order="F" if self.fortran else "C")
        return whole if self.field is None else whole[self.field]

    def unpacked(self, content: BinaryIO) -> Any:
        if self.member is not None:
            with zipfile.ZipFile(content) as archive:
                content = io.BytesIO(archive.read(f"{self.member}.npy"))
        content.seek(0)
        with _parsing:
            whole = np.lib.format.read_array(content, allow_pickle=False)
        if whole.shape != self.shape or whole.dtype != self.dtype:
            raise BadFileError("it holds another array than it did")
        return whole if self.field is None else whole[self.field]

    def check_sum(self, content: memoryview) -> None:
        start, stop, reported = self.stored or (0, 0, 0)
        found = 0
        for place in range(start, stop, SUMMED):
            found = zlib.crc32(content[place : min(stop, place + SUMMED)], found)
        if found != reported:
            raise BadFileError(
                f"array {self.member!r}: its bytes have changed since it was written: their checksum differs"
            )


def kept(size: int, arrays: Mapping[str, StoredArray]) -> bytes:
    each = {name: astuple(array) for name, array in arrays.items()}
    plain = {n: (np.lib.format.dtype_to_descr(dtype), *rest) for n, (dtype, *rest) in each.items()}
    return repr((size, plain)).encode()


@lru_cache(maxsize=4096)
def arrays_of(content: bytes) -> tuple[int, dict[str, StoredArray]]:
    with _parsing:
        size, each = ast.literal_eval(content.decode())
    to_dtype = np.lib.format.descr_to_dtype
    return size, {
        name: StoredArray(to_dtype(descr), *rest) for name, (descr, *rest) in each.items()
    }


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
        array = _header(file, size, None)
        fields = array.dtype.names
        if fields is None:
            return {name: _checked(name, array) for name in wanted([column])}
        return {name: _checked(name, replace(array, field=name)) for name in wanted(fields)}
    if head[:2] == b"PK":
        return _of_zip(file, size, wanted)
    if head[:1] == b"\x80":
        raise BadFileError("a pickle, which is not read, since loading one runs code")
    raise BadFileError(f"neither .npy nor .npz (starts with {head!r})")


def _of_zip(
    file: BinaryIO, size: int, wanted: Callable[[Sequence[str]], Sequence[str]]
) -> dict[str, StoredArray]:
    found = {}
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
                    array = _header(inner, member.file_size, name)
                if member.compress_type == zipfile.ZIP_STORED:
                    file.seek(member.header_offset)
                    lengths = struct.unpack_from("<HH", file.read(30), 26)  # of the name and more
                    start = member.header_offset + 30 + sum(lengths)
                    stored = start, start + member.file_size, member.CRC
                    if stored[1] > size:
                        raise BadFileError("damaged: an array would lie behind the file's end")
                    array = replace(array, start=start + (array.start or 0), stored=stored)
                else:
                    array = replace(array, start=None)
                found[name] = _checked(name, array)
    except (zipfile.BadZipFile, struct.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise BadFileError(f"damaged, or no .npz: {error}") from error
    return found


def _header(file: Any, size: int, member: str | None) -> StoredArray:
    where = "" if member is None else f"array {member!r}: "
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        if version > (1, 0):
            read = np.lib.format.read_array_header_2_0
        header = file if version < (3, 0) else _as_latin(file)
        with _parsing:
            shape, fortran, dtype = read(header, max_header_size=MOST)
        begin = file.tell()
    except Exception as error:
        raise BadFileError(
            f"{where}damaged header, or cut short: {cut(str(error), 200)}"
        ) from error
    said = cut(str(list(shape)), 80)
    if not shape:
        raise BadFileError(f"{where}a single value, and rows need a first dimension")
    odd = {*map(type, shape)} != {int} or min(shape) < 0 or len(shape) > MOST_DIMENSIONS
    if odd or (shape[0] > MOST_EMPTY and not prod(shape[1:])):
        raise BadFileError(f"{where}damaged header: no array has the shape {said}")
    needed = begin + prod(shape) * dtype.itemsize
    if needed > size:
        raise BadFileError(
            f"{where}cut short: an array of shape {said} needs {needed:,} bytes, and there are {size:,}"
        )
    return StoredArray(dtype, shape, fortran and len(shape) > 1, begin, member)


def _as_latin(file: Any) -> BinaryIO:
    """A header of version 3 (UTF-8) as version 2 (Latin-1), which NumPy reads."""
    (length,) = struct.unpack("<I", file.read(4))
    text = file.read(min(length, MOST)).decode().encode("latin-1", "backslashreplace")
    return io.BytesIO(struct.pack("<I", len(text)) + text)


def _checked(name: str, array: StoredArray) -> StoredArray:
    if array.dtype.hasobject:
        raise BadFileError(
            f"array {name!r} holds Python objects, pickled, which are not read, since loading them runs "
            "code: save numbers"
        )
    if array.row_dtype.kind not in "biufc" or array.row_dtype.name in WIDE:
        raise BadFileError(
            f"array {name!r} is of {array.row_dtype}, and rows are of integers, floats, complex numbers or "
            "bools: save it as one of these, leave it out by columns=[...], or write text to Parquet"
        )
    return array
