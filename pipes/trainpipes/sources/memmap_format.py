"""The file that ``write_memmap`` writes and ``read_memmap`` maps: its header, and where columns lie.

    bytes 0..8      b"TPMEMMAP"
    bytes 8..16     size of the header in bytes, uint64: where the first column starts
    bytes 16..20    CRC-32 of the header's text, uint32; four zero bytes follow
    bytes 24..      the header: JSON, filled up with spaces
    from there      for each column its values, row by row, little-endian; for a ragged one also the
                    rows' offsets, int64 [rows + 1]; each starts at a multiple of 4096

Everything is where NumPy can map it: ``np.memmap(path, dtype, "r", offset, shape)``.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainpipes.errors import MissingFilesError, UnreadableError

__all__ = [
    "ALIGN",
    "Array",
    "Column",
    "Header",
    "Layout",
    "aligned",
    "as_bytes",
    "header_size",
    "pack",
    "read_header",
]

MAGIC = b"TPMEMMAP"
FORMAT = 1
#: Columns start at multiples of this.
ALIGN = 4096
#: Bytes before the header's text.
PREFIX = 24

Array = npt.NDArray[Any]
#: What a row is: columns by name, or by place.
Layout = Literal["dict", "tuple"]


@dataclass(frozen=True)
class Column:
    """One column, and where it lies.

    Args:
        name: its name; its place as text where rows are no dicts.
        dtype: NumPy's name of the values' dtype.
        shape: of a row; of each element of a row where the column is ragged.
        ragged: whether rows have each a length of their own.
        offset: first byte of the values.
        values: numbers of ``shape`` in all: rows, or the rows' lengths added up.
        crc32: of the values' bytes.
        offsets_at: first byte of the rows' offsets; 0 if it is not ragged.
        offsets_crc32: of these bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ragged: bool
    offset: int = 0
    values: int = 0
    crc32: int = 0
    offsets_at: int = 0
    offsets_crc32: int = 0

    @property
    def value_bytes(self) -> int:
        """Bytes of one number of ``shape``."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        shape = ["L"] * self.ragged + [str(n) for n in self.shape]
        return f"{self.name}: {self.dtype}[{', '.join(shape)}]"


@dataclass(frozen=True)
class Header:
    """What a file holds.

    Args:
        rows: N.
        layout: what a row is.
        columns: the columns, in order.
        size: bytes of the file.
    """

    rows: int
    layout: Layout
    columns: tuple[Column, ...]
    size: int

    def text(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":")).encode()


def header_size(columns: tuple[Column, ...], layout: Layout) -> int:
    """Bytes to keep free for a header of these columns, whatever their sizes will be."""
    most = 1 << 62
    largest = [
        Column(c.name, c.dtype, c.shape, c.ragged, most, most, most, most, most) for c in columns
    ]
    return aligned(PREFIX + len(Header(most, layout, tuple(largest), most).text()))


def aligned(position: int) -> int:
    """The next multiple of ``ALIGN``."""
    return -(-position // ALIGN) * ALIGN


def as_bytes(array: Array) -> memoryview:
    """The bytes of an array that lies in one piece, without a copy."""
    flat: Any = array.reshape(-1)
    return memoryview(flat).cast("B") if array.size else memoryview(b"")


def pack(header: Header, size: int) -> bytes:
    """The header's bytes, ``size`` of them."""
    text = header.text()
    prefix = MAGIC + size.to_bytes(8, "little") + zlib.crc32(text).to_bytes(8, "little")
    return (prefix + text).ljust(size, b" ")


def read_header(path: str) -> Header:
    """The header of a file, found to fit the file.

    Raises:
        MissingFilesError: there is no such file.
        UnreadableError: it is no file of ``write_memmap``, was cut short, or is damaged.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(PREFIX)
            if prefix[:8] != MAGIC:
                raise UnreadableError(
                    f"{path} is no file of write_memmap(): it starts with {prefix[:8]!r}. A file of "
                    "bare numbers is read with read_memmap(path, dtype=..., length=...)",
                    path=path,
                )
            long = int.from_bytes(prefix[8:16], "little")
            text = file.read(min(long, size) - len(prefix)).rstrip(b" ") if long <= size else b""
    except FileNotFoundError as error:
        raise MissingFilesError(f"there is no file {path}", path=path) from error
    except IsADirectoryError as error:
        raise UnreadableError(
            f"{path} is a folder, not a file of write_memmap()", path=path
        ) from error
    if zlib.crc32(text) != int.from_bytes(prefix[16:20], "little") or not text:
        raise UnreadableError(f"the header of {path} is damaged: write the file anew", path=path)
    header = _parsed(json.loads(text), path)
    if header.size != size:
        what = "was cut short" if size < header.size else "has grown"
        raise UnreadableError(
            f"{path} {what}: its header says {header.size:,} bytes, and it has {size:,}; copy or "
            "write it anew",
            path=path,
        )
    return header


def _parsed(found: dict[str, Any], path: str) -> Header:
    if found.get("format") != FORMAT:
        raise UnreadableError(
            f"{path} has format {found.get('format')}, and this version of trainpipes reads format "
            f"{FORMAT}: read it with the version that wrote it",
            path=path,
        )
    columns = (Column(**{**c, "shape": tuple(c["shape"])}) for c in found["columns"])
    return Header(int(found["rows"]), found["layout"], tuple(columns), int(found["size"]))
