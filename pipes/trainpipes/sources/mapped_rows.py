"""What a memory map holds, and the folder that it stands in.

documents.memmap/
    _manifest.json                  the parts, and the CRC-32 of each header; appears last
    part-00000.json                 the header of a part: rows, columns, the CRC-32 of each column's bytes
    part-00000.image.npy            uint8 [rows, 3, 224, 224]
    part-00000.tokens.npy           uint16 [values]: the rows of a ragged column, in turn
    part-00000.tokens.offsets.npy   int64 [rows + 1]: where each starts, and the end of the last
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from glob import escape, glob
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from trainpipes._internal.checks import IntArray, refuse_special
from trainpipes.columns.arrays import stretches
from trainpipes.columns.tensor_rows import rows_of
from trainpipes.errors import DataError, UnreadableError
from trainpipes.filesystems.places import MANIFEST
from trainpipes.interfaces.read_columns import Ragged
from trainpipes.interfaces.source import Place
from trainpipes.sources.files.file_bytes import changed

#: What the names of headers end with.
HEADER = ".json"
#: What columns can hold, in this machine's byte order.
DTYPES = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
    "float32", "float64",
)  # fmt: skip

Array = npt.NDArray[Any]
#: What a row is: columns by name, or by place.
Layout = Literal["dict", "tuple"]


@dataclass(frozen=True)
class Column:
    """The dtype and shape of a column of a memory map."""

    name: str
    dtype: str  # "" as long as it is not known
    shape: tuple[int, ...]  # of a row; of each element of a ragged column
    ragged: bool
    values: int = 0  # of that shape, in all rows
    crc32: int = 0
    offsets_crc32: int = 0

    @property
    def type(self) -> str:
        shape = ["L"] * self.ragged + [str(n) for n in self.shape]
        return f"{self.dtype}[{', '.join(shape)}]"

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True)
class Header:
    """A part's file of JSON, about the ``.npy`` files beside it."""

    rows: int
    layout: Layout
    columns: tuple[Column, ...]

    def pack(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"


def file_endings(names: Sequence[str]) -> list[str]:
    """Endings of columns' file names, distinct also where case does not matter."""
    stems: list[str] = []
    for name in names:
        stem = re.sub(r"\W", "_", name, flags=re.ASCII)[:80] or "_"
        while stem.lower() in map(str.lower, stems):
            stem += "_"
        stems.append(stem)
    return [f".{stem}.npy" for stem in stems]


def offsets_ending(ending: str) -> str:
    return f"{ending.removesuffix('.npy')}.offsets.npy"


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """A ``.npy`` header, of the same length for any number of rows."""
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}"
    room = len(text) + 21 - len(str(shape[0]))
    size = (10 + room) // 64 * 64 + 64 - 10
    return b"\x93NUMPY\1\0" + size.to_bytes(2, "little") + f"{text:<{size - 1}}\n".encode()


def is_memmap(folder: str) -> bool:
    """Whether a folder holds a memory map, even if it is unfinished or damaged."""
    inside = f"{escape(folder)}/part-[0-9]*"
    return bool(glob(f"{inside}{HEADER}") and glob(f"{inside}.*.npy"))


def read_headers(folder: str) -> dict[str, Header]:
    """The headers of all parts by path."""
    headers: dict[str, Header] = {}
    manifest = path = os.path.join(folder, MANIFEST)
    try:
        about = json.loads(_content(path))
        if about["options"]["format"] != "memmap":
            raise ValueError(f"it is of files of {about['options']['format']!r:.40}")
        for part in about["files"]:
            if not re.fullmatch(r"part-\d+\.json", part["file"]):
                raise ValueError(f"it names other files, such as {part['file']!r:.80}")
            path = os.path.join(folder, part["file"])
            text = _content(path)
            if f"{zlib.crc32(text):08x}" != part["crc32"]:
                raise ValueError("its checksum differs")
            header = json.loads(text)
            columns = tuple(Column(**{**c, "shape": tuple(c["shape"])}) for c in header["columns"])
            headers[path] = Header(header["rows"], header["layout"], columns)
            path = manifest
    except FileNotFoundError as error:
        if path != manifest:
            raise damaged(path, "it is missing") from error
        why = f"it has no {MANIFEST}, which write_memmap() writes last"
        raise damaged(folder, f"{why}") from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise damaged(path, f"it cannot be understood: {error!r:.200}") from error
    return headers


def _content(path: str) -> bytes:
    refuse_special(path)
    with open(path, "rb") as file:
        return file.read()


def damaged(path: str, why: str) -> UnreadableError:
    return UnreadableError(
        f"{path} cannot be read as a memory map: {why}. Write it again, or copy its whole folder again",
        path=path,
    )


def no_memmap(path: str) -> UnreadableError:
    with open(path, "rb") as file:
        magic = file.read(8)
    return UnreadableError(
        f"{path} is not a memory map, a folder that write_memmap() writes: it is a file that starts with "
        f"{magic!r}. A file of bare numbers is read with read_memmap(path, dtype=..., length=...)",
        path=path,
    )


#: Offsets that are compared at a time.
CHECK_ROWS = 1 << 20
#: A map keeps its file open before Python 3.13, and then need not.
UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def mapped(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **UNTRACKED)


@dataclass(frozen=True)
class MappedColumn:
    """Values ``[rows, ...]``, which may be narrower than the rows that they give; of a ragged column
    ``[values, ...]``, with ``offsets`` ``[rows + 1]``.
    """

    about: Column
    values: Array
    offsets: IntArray | None = None

    def slice(self, start: int, stop: int) -> Array | Ragged:
        if self.offsets is None:
            return self.values[start:stop]
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], np.diff(offsets))

    def take(self, index: IntArray) -> Array | Ragged:
        if self.offsets is None:
            return rows_of(self.values, index)
        starts = self.offsets[index]
        lengths = self.offsets[index + 1] - starts
        return Ragged(values_at(self.values, starts, lengths), lengths)

    def will_need(self, start: int, stop: int) -> None:
        values, mapping = self.values, self.values.base
        if self.offsets is not None:
            start, stop = self.offsets[[start, stop]].tolist()
        if isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_WILLNEED"):
            begin = start * values.strides[0] // mmap.PAGESIZE * mmap.PAGESIZE
            mapping.madvise(mmap.MADV_WILLNEED, begin, stop * values.strides[0] - begin)

    def is_as_written(self) -> bool:
        about = ((self.values, self.about.crc32), (self.offsets, self.about.offsets_crc32))
        held: list[tuple[Any, int]] = [(array, said) for array, said in about if array is not None]
        return all(zlib.crc32(array.reshape(-1).view(np.uint8)) == said for array, said in held)


@dataclass(frozen=True)
class MappedRows:
    """A part of a memory map, or a file of bare numbers; a state knows it by ``identity``. ``sizes`` are the
    bytes of each of its files.
    """

    path: str
    rows: int
    layout: Layout
    columns: list[MappedColumn]
    row_bytes: float
    identity: list[Any]
    sizes: dict[str, int]

    def check(self) -> None:
        """Raise if a file has shrunk, since to read its map would then kill the process."""
        for path, size in self.sizes.items():
            try:
                now = os.stat(path).st_size
            except FileNotFoundError:
                continue  # its mapped parts stay
            if now < size:
                raise changed(Place(path), f"it had {size:,} bytes, and has {now:,}")

    @property
    def kinds(self) -> list[str]:
        return [str(column.about) for column in self.columns]


def values_at(values: Array, starts: IntArray, lengths: IntArray) -> Array:
    if int(lengths.sum()) <= 64 * len(lengths):
        gathered: Array = values[stretches(starts, lengths)]
        return gathered
    # A copy of a long range is cheaper than an index for each value.
    ends = (starts + lengths).tolist()
    return np.concatenate([values[a:b] for a, b in zip(starts.tolist(), ends, strict=True)])


def open_bare(path: str, dtype: str, length: int, labels: bool) -> MappedRows:
    """A file of bare numbers, cut in rows; ``labels`` are the same numbers, shifted by one."""
    stored = np.dtype(dtype).newbyteorder("<")
    refuse_special(path)
    with open(path, "rb") as file:
        magic, size = file.read(8), os.fstat(file.fileno()).st_size
        numbers, rest = divmod(size, stored.itemsize)
        rows = max(0, numbers - labels) // length
        content = mapped(file) if rows else b""
    if magic.startswith(b"\x93NUMPY"):
        raise UnreadableError(
            f"{path} is not a file of bare numbers, for it has a header. A memory map is read without dtype "
            "and length; to write the array of another .npy file bare, call its .tofile()",
            path=path,
        )
    if rest:
        raise UnreadableError(
            f"{path} has {size:,} bytes, which is no whole number of {dtype}: give the dtype it was written "
            "with",
            path=path,
        )
    if numbers and not rows:
        raise DataError(
            f"{path} holds {numbers:,} numbers, fewer than the {length + labels:,} of one row: give a "
            "smaller length, or leave the file out",
            path=path,
        )
    columns, digest = [], hashlib.sha256()
    for place, name in enumerate(("input_ids", "labels")[: 1 + labels]):
        values = np.ndarray((rows, length), stored, content, place * stored.itemsize * bool(rows))
        columns.append(MappedColumn(Column(name, "int64", (length,), False), values))
        for row in (0, rows // 2, rows - 1) if rows else ():
            digest.update(values[row].tobytes())
    identity = [dtype, length, labels, numbers, digest.hexdigest()[:16]]
    row_bytes = float(length * stored.itemsize)
    return MappedRows(path, rows, "dict", columns, row_bytes, identity, {path: size})


def open_folder(path: str) -> list[MappedRows]:
    headers = read_headers(path)
    return [
        _opened(path if len(headers) == 1 else part, part, header)
        for part, header in headers.items()
    ]


def _opened(name: str, part: str, header: Header) -> MappedRows:
    mapped_columns, rows, nbytes, sizes = [], header.rows, 0, {}
    stem, endings = part.removesuffix(HEADER), file_endings([c.name for c in header.columns])
    for c, ending in zip(header.columns, endings, strict=True):
        file = f"{stem}{ending}"
        offsets, values = None, _npy(file, c.dtype, (c.values, *c.shape))
        nbytes, sizes[file] = nbytes + values.nbytes, os.stat(file).st_size
        if c.ragged:
            file = f"{stem}{offsets_ending(ending)}"
            offsets = _npy(file, "int64", (rows + 1,))
            _check_offsets(file, offsets, c.values)
            nbytes, sizes[file] = nbytes + 8 * rows, os.stat(file).st_size
        mapped_columns.append(MappedColumn(c, values, offsets))
    identity = [[str(c), c.values, c.crc32, c.offsets_crc32] for c in header.columns]
    return MappedRows(
        name, rows, header.layout, mapped_columns, nbytes / max(1, rows), identity, sizes
    )


def _check_offsets(path: str, offsets: IntArray, values: int) -> None:
    bad = [n for n, must in ((0, 0), (len(offsets) - 1, values)) if offsets[n] != must]
    for start in range(0, len(offsets), CHECK_ROWS):
        down = np.diff(offsets[start : start + CHECK_ROWS + 1]) < 0
        if not bad and down.any():
            bad = [start + int(np.argmax(down)) + 1]
    if bad:
        raise damaged(path, f"offset {bad[0]} is {offsets[bad[0]]}; they go up from 0 to {values}")


def _npy(path: str, dtype: str, shape: tuple[int, ...]) -> Array:
    must = npy_header(dtype, shape)
    try:
        refuse_special(path)
        with open(path, "rb") as file:
            if (head := file.read(len(must))) != must:
                raise damaged(
                    path, f"it must begin as {must[10:].rstrip()!r}, and does as {head[10:]!r:.80}"
                )
            size = os.fstat(file.fileno()).st_size
            if size != (whole := len(must) + np.dtype(dtype).itemsize * math.prod(shape)):
                change = "has grown" if size > whole else "was cut short"
                raise damaged(path, f"it {change}: it has {size:,} bytes of {whole:,}")
            # A plain array: rows of np.memmap cost more than twice as much.
            return np.ndarray(shape, dtype, mapped(file), len(must))
    except (FileNotFoundError, IsADirectoryError) as error:
        raise damaged(path, "it is missing, or a folder") from error
