from __future__ import annotations

import io
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, BinaryIO

import numpy as np

from trainpipes._internal.messages import need_columns
from trainpipes.errors.text import cut
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.format import packed, unpacked

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
    """An array in a file, or a field of one; ``start`` is in its member, if that is compressed. ``stored``
    has the bytes and CRC-32 of a member that is not, ``crc32`` that of each.
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
    return packed(size=size, arrays={name: astuple(array) for name, array in arrays.items()})


@lru_cache(maxsize=4096)
def arrays_of(content: bytes) -> tuple[int, dict[str, StoredArray]]:
    layout = unpacked(content)
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
            raise BadFileError(f"{where}a single value, and rows need a first dimension")
        odd = {*map(type, shape)} != {int} or min(shape) < 0 or len(shape) > MOST_DIMENSIONS
        if odd or (shape[0] > MOST_EMPTY and not prod(shape[1:])):
            raise BadFileError(f"{where}damaged header: no array has the shape {said}")
        needed = self._begin + prod(shape) * self.dtype.itemsize
        if needed > size:
            raise BadFileError(
                f"{where}cut short: an array of shape {said} needs {needed:,} bytes, and there are {size:,}"
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
    """Bytes from one element to the next in each dimension."""
    if fortran:
        return _strides(shape[::-1], size)[::-1]
    return tuple(size * prod(shape[n + 1 :]) for n in range(len(shape)))


def _as_latin(file: Any) -> BinaryIO:
    """A header of version 3 (UTF-8) as version 2 (Latin-1), which NumPy reads."""
    (length,) = struct.unpack("<I", file.read(4))
    text = file.read(min(length, MOST)).decode().encode("latin-1", "backslashreplace")
    return io.BytesIO(struct.pack("<I", len(text)) + text)
