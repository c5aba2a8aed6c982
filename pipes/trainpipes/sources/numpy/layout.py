"""Where the arrays of ``.npy`` and ``.npz`` files lie, and of what type and shape they are, by their headers.

See numpy.lib.format for the one, and zipfile for the other, which is a zip archive of the first. Called by
any thread.
"""

from __future__ import annotations

import ast
import io
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from trainpipes._internal.messages import need_columns
from trainpipes._internal.text import cut
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.format import Layout, packed, unpacked

MAGIC = b"\x93NUMPY"
KEYS = {"descr", "fortran_order", "shape"}
#: Bytes of a header, at most.
MOST = 1 << 20
#: Dimensions that NumPy knows, at most, and rows of an array that holds no values.
MOST_DIMENSIONS, MOST_EMPTY = 64, 1 << 31
#: Numbers that tensors do not hold.
WIDE = ("float96", "float128", "complex192", "complex256")
#: Bytes of which the checksum is told at once.
SUMMED = 1 << 20
#: Python 3.11 fails with a SystemError where two threads parse at once: python/cpython issue 106905.
_parsing = threading.Lock()


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, or a field of one.

    Args:
        dtype: of its elements as they are stored, of all fields.
        shape: with the rows first.
        fortran: whether elements are stored column by column.
        start: where they are in the file; None where they are compressed.
        member: the name in an ``.npz`` file; None in an ``.npy`` file.
        field: which field of a structured array; None for all of a plain one.
        stored: of a member that is not compressed: where its bytes, with its header, begin and end in the
            file, and the CRC-32 that the archive has of them.
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

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as it is stored, of all fields."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Where rows ``start`` to ``stop`` begin and end in the file."""
        assert self.start is not None
        return self.start + start * self.row_bytes, self.start + stop * self.row_bytes

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The type of a row's elements."""
        own = self.dtype if self.field is None else self.dtype[self.field]
        return own.base.newbyteorder("=")

    @property
    def row_shape(self) -> tuple[int, ...]:
        inner = () if self.field is None else self.dtype[self.field].shape
        return (*self.shape[1:], *inner)


def read_arrays(
    file: BinaryIO, size: int, column: str, columns: Sequence[str] | None, asker: str
) -> dict[str, StoredArray]:
    """The arrays of a file by their names, in order.

    Args:
        file: the file, open.
        size: its bytes.
        column: what the array of an ``.npy`` file is called.
        columns: which arrays are wanted; None for all.
        asker: the stage, for messages.

    Raises:
        BadFileError: it is of neither kind, is damaged, or holds what cannot be rows.
        SchemaError: it lacks an array.
    """

    def wanted(names: Sequence[str]) -> Sequence[str]:
        if columns is not None:
            need_columns(names, columns, asker, file.name)
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
        return {name: _checked(name, _field(array, name)) for name in wanted(fields)}
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
                start: int | None = None
                if member.compress_type == zipfile.ZIP_STORED:
                    file.seek(member.header_offset)
                    local = file.read(30)
                    start = member.header_offset + 30 + sum(struct.unpack_from("<HH", local, 26))
                with archive.open(member) as inner:
                    array = _header(inner, member.file_size, name, start)
                if start is not None:
                    stored = start, start + member.file_size, member.CRC
                    array = replace(array, stored=stored)
                found[name] = _checked(name, array)
    except (zipfile.BadZipFile, struct.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise BadFileError(f"damaged, or no .npz: {error}") from error
    if any(one.stored is not None and one.stored[1] > size for one in found.values()):
        raise BadFileError("damaged: an array would lie behind the file's end")
    return found


def _header(file: Any, size: int, member: str | None, offset: int | None = 0) -> StoredArray:
    """The header of an array.

    Args:
        file: at its first byte.
        size: bytes from there to the array's end.
        member: its name in an archive.
        offset: of its first byte in the file; None if it is compressed.
    """
    where = "" if member is None else f"array {member!r}: "
    head = file.read(8)
    if head[:6] != MAGIC:
        raise BadFileError(f"{where}not an .npy header (starts with {head[:6]!r})")
    wide = head[6] > 1
    length_bytes = file.read(4 if wide else 2)
    if len(length_bytes) < (4 if wide else 2):
        raise BadFileError(f"{where}cut short: {size:,} bytes")
    (length,) = struct.unpack("<I" if wide else "<H", length_bytes)
    text = file.read(min(length, MOST))
    if len(text) < length:
        raise BadFileError(f"{where}cut short, or its header is damaged: {size:,} bytes")
    try:
        with _parsing:
            told = ast.literal_eval(text.decode("utf-8" if head[6] > 2 else "latin-1"))
        shape, fortran = told["shape"], told["fortran_order"]
        kinds = type(shape), type(fortran), *map(type, shape)
        if told.keys() != KEYS or kinds != (tuple, bool, *[int] * len(shape)):
            raise ValueError(f"it says {cut(str(told), 80)}")
        dtype = np.lib.format.descr_to_dtype(told["descr"])
    except (
        ValueError,
        SyntaxError,
        LookupError,
        TypeError,
        MemoryError,
        RecursionError,
        AttributeError,
    ) as error:
        raise BadFileError(f"{where}damaged header: {error}") from error
    begin = len(head) + len(length_bytes) + length
    if not shape:
        raise BadFileError(f"{where}a single value, and rows need a first dimension")
    if len(shape) > MOST_DIMENSIONS or (shape[0] > MOST_EMPTY and not prod(shape[1:])):
        raise BadFileError(
            f"{where}damaged header: no array has the shape {cut(str(list(shape)), 80)}"
        )
    if any(n < 0 for n in shape) or begin + prod(shape) * dtype.itemsize > size:
        needed = f"{begin + prod(shape) * dtype.itemsize:,}"
        raise BadFileError(
            f"{where}cut short: an array of shape {cut(str(list(shape)), 80)} needs {needed} bytes, and "
            f"there are {size:,}"
        )
    start = None if offset is None else offset + begin
    return StoredArray(dtype, shape, fortran and len(shape) > 1, start, member)


def kept(arrays: Mapping[str, StoredArray], size: int) -> Layout:
    """What an index keeps of the arrays of a file of ``size`` bytes."""
    found = [
        [
            name,
            np.lib.format.dtype_to_descr(a.dtype),
            a.shape,
            a.fortran,
            a.start,
            a.member,
            a.field,
            a.stored,
        ]
        for name, a in arrays.items()
    ]
    rows = max((array.rows for array in arrays.values()), default=0)
    first, last = np.array([0]), np.array([size])
    return Layout(np.array([rows]), first, last, pa.schema([]), packed(arrays=found))


def arrays_of(layout: Layout) -> dict[str, StoredArray]:
    """The arrays of a file of which this was kept."""
    found = {}
    for name, descr, shape, fortran, start, member, field, stored in unpacked(layout.extra)[
        "arrays"
    ]:
        dtype = np.lib.format.descr_to_dtype(_tuples(descr))
        stored = None if stored is None else tuple(stored)
        found[name] = StoredArray(dtype, tuple(shape), fortran, start, member, field, stored)
    return found


def _tuples(descr: Any) -> Any:
    """A type's description as NumPy has it, of JSON's lists: a field is a tuple of name, type and, for an
    array within, its shape."""
    if isinstance(descr, str):
        return descr
    return [
        (
            tuple(field[0]) if isinstance(field[0], list) else field[0],
            _tuples(field[1]),
            *(tuple(shape) for shape in field[2:]),
        )
        for field in descr
    ]


def _field(array: StoredArray, name: str) -> StoredArray:
    return replace(array, field=name)


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


def loaded(content: bytes) -> Any:
    """A decompressed array."""
    with _parsing:
        return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)


def check_sum(content: memoryview, array: StoredArray) -> None:
    """Raise BadFileError unless the bytes of a member of an archive have the checksum that it says.

    Args:
        content: bytes of the file.
        array: the array.
    """
    if array.stored is None:
        return
    start, stop, told = array.stored
    found = 0
    for place in range(start, stop, SUMMED):
        found = zlib.crc32(content[place : min(stop, place + SUMMED)], found)
    if found != told:
        raise BadFileError(
            f"array {array.member!r}: its bytes have changed since it was written: their checksum differs"
        )
