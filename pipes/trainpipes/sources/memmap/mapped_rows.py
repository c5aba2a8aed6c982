from __future__ import annotations

import hashlib
import math
import mmap
import os
import stat
import sys
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from trainpipes._internal.checks import refuse_special
from trainpipes.columns.arrays import stretches
from trainpipes.columns.tensor_rows import rows_of
from trainpipes.engine.layout import IntArray
from trainpipes.errors import DataError, UnreadableError
from trainpipes.sources.memmap.manifest import (
    HEADER,
    Array,
    Column,
    Header,
    Layout,
    damaged,
    file_endings,
    npy_header,
    offsets_ending,
    read_headers,
)
from trainpipes.stages.read_columns import Ragged

CHECK_BYTES = 16 << 20
#: Offsets that are compared in one step.
CHECK_ROWS = 1 << 20
#: A map keeps its file open before Python 3.13, and then need not.
UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def mapped(
    file: BinaryIO, dtype: Any, shape: tuple[int, ...], start: int = 0, step: int = 0
) -> Array:
    """A plain array: rows of ``np.memmap`` cost more than twice as much."""
    if 0 in shape:
        return np.empty(shape, dtype)
    whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **UNTRACKED)
    return np.ndarray(
        shape, dtype, whole, start, (step, np.dtype(dtype).itemsize) if step else None
    )


@dataclass(frozen=True)
class MappedRows:
    """A memory map's columns: values ``[rows, ...]``; ragged ones ``[values, ...]`` with ``offsets`` ``[rows
    + 1]``.
    """

    path: str
    rows: int
    layout: Layout
    columns: tuple[Column, ...]
    values: list[Array]
    offsets: list[IntArray]
    row_bytes: float

    def identity(self) -> list[Any]:
        return [[str(c), c.values, c.crc32, c.offsets_crc32] for c in self.columns]

    def verify(self) -> None:
        for column, values, offsets in zip(self.columns, self.values, self.offsets, strict=True):
            same = crc32_of(values) == column.crc32
            if not same or (column.ragged and crc32_of(offsets) != column.offsets_crc32):
                raise damaged(self.path, f"the checksum of column {column.name!r} differs")

    def slice(self, number: int, start: int, stop: int) -> Array | Ragged:
        if not self.columns[number].ragged:
            return self.values[number][start:stop]
        offsets = self.offsets[number][start : stop + 1]
        return Ragged(self.values[number][offsets[0] : offsets[-1]], np.diff(offsets))

    def take(self, number: int, index: IntArray) -> Array | Ragged:
        values = self.values[number]
        if not self.columns[number].ragged:
            return rows_of(values, index)
        starts = self.offsets[number][index]
        lengths = self.offsets[number][index + 1] - starts
        return Ragged(values_at(values, starts, lengths), lengths)

    def will_need(self, number: int, start: int, stop: int) -> None:
        values = self.values[number]
        if self.columns[number].ragged:
            start, stop = self.offsets[number][[start, stop]].tolist()
        if isinstance(values.base, mmap.mmap) and hasattr(mmap, "MADV_WILLNEED"):
            begin = start * values.strides[0] // mmap.PAGESIZE * mmap.PAGESIZE
            values.base.madvise(mmap.MADV_WILLNEED, begin, stop * values.strides[0] - begin)


def values_at(values: Array, starts: IntArray, lengths: IntArray) -> Array:
    if int(lengths.sum()) <= 64 * len(lengths):
        found: Array = values[stretches(starts, lengths)]
        return found
    # A copy of a long range is cheaper than an index for each value.
    ends = (starts + lengths).tolist()
    return np.concatenate([values[a:b] for a, b in zip(starts.tolist(), ends, strict=True)])


def crc32_of(array: Array, found: int = 0) -> int:
    data: Any = array.reshape(-1).view(np.uint8)
    for start in range(0, len(data), CHECK_BYTES):
        found = zlib.crc32(data[start : start + CHECK_BYTES], found)
    return found


class BareRows(MappedRows):
    def identity(self) -> list[Any]:
        digest = hashlib.sha256()
        for row in (0, self.rows // 2, self.rows - 1):
            if 0 <= row < self.rows:
                digest.update(self.values[0][row].tobytes())
        return [str(self.columns[0]), self.columns[0].values, digest.hexdigest()[:16]]

    def verify(self) -> None:
        """Nothing to compare with: there are no checksums."""


def open_bare(path: str, dtype: str, length: int, more: int) -> BareRows:
    """A file of bare numbers, cut in rows; each is read with ``more`` numbers of the next."""
    stored = np.dtype(dtype).newbyteorder("<")
    refuse_special(path)
    with open(path, "rb") as file:
        magic, size = file.read(8), os.fstat(file.fileno()).st_size
        rows = max(0, size // stored.itemsize - more) // length
        values = mapped(file, stored, (rows, length + more), step=length * stored.itemsize)
    if magic.startswith(b"\x93NUMPY"):
        raise UnreadableError(
            f"{path} is not a file of bare numbers, for it has a header. A memory map is read without dtype "
            "and length; to write the array of another .npy file bare, call its .tofile()",
            path=path,
        )
    numbers, rest = divmod(size, stored.itemsize)
    if rest:
        raise UnreadableError(
            f"{path} has {size:,} bytes, which is no whole number of {dtype}: give the dtype it was written "
            "with",
            path=path,
        )
    if numbers and not rows:
        raise DataError(
            f"{path} holds {numbers:,} numbers, fewer than the {length + more:,} of one row: give a smaller "
            "length, or leave the file out",
            path=path,
        )
    column = Column("input_ids", dtype, (length + more,), False, numbers)
    row_bytes = float(length * stored.itemsize)
    return BareRows(path, rows, "dict", (column,), [values], [], row_bytes)


def open_folder(path: str) -> list[MappedRows]:
    headers = read_headers(path)
    if len(headers) == 1:
        return [_opened(path, part, header) for part, header in headers.items()]
    return [_opened(part, part, header) for part, header in headers.items()]


def _opened(name: str, part: str, header: Header) -> MappedRows:
    values, offsets, total = [], [], 0
    stem = part.removesuffix(HEADER)
    for c, ending in zip(
        header.columns, file_endings([c.name for c in header.columns]), strict=True
    ):
        values.append(_npy(f"{stem}{ending}", c.dtype, (c.values, *c.shape)))
        offsets.append(np.empty(0, np.int64))
        if c.ragged:
            file = f"{stem}{offsets_ending(ending)}"
            offsets[-1] = _npy(file, "int64", (header.rows + 1,))
            _check_offsets(file, offsets[-1], c.values)
        total += values[-1].nbytes + 8 * header.rows * c.ragged
    row_bytes = total / max(1, header.rows)
    return MappedRows(name, header.rows, header.layout, header.columns, values, offsets, row_bytes)


def _check_offsets(path: str, offsets: IntArray, values: int) -> None:
    bad = [n for n, must in ((0, 0), (len(offsets) - 1, values)) if offsets[n] != must]
    for start in range(0, len(offsets), CHECK_ROWS):
        part = offsets[start : start + CHECK_ROWS + 1]
        if not bad and (down := part[1:] < part[:-1]).any():
            bad = [start + int(np.argmax(down)) + 1]
    if bad:
        raise damaged(path, f"offset {bad[0]} is {offsets[bad[0]]}; they go up from 0 to {values}")


def _npy(path: str, dtype: str, shape: tuple[int, ...]) -> Array:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise damaged(path, "it is a link or a folder, and must be a file")
        must = npy_header(dtype, shape)
        with open(path, "rb") as file:
            if (head := file.read(len(must))) != must:
                raise damaged(
                    path, f"it must begin as {must[10:].rstrip()!r}, and does as {head[10:]!r:.80}"
                )
            size = os.fstat(file.fileno()).st_size
            if size != (whole := len(must) + np.dtype(dtype).itemsize * math.prod(shape)):
                what = "has grown" if size > whole else "was cut short"
                raise damaged(path, f"it {what}: it has {size:,} bytes of {whole:,}")
            return mapped(file, dtype, shape, len(must))
    except FileNotFoundError as error:
        raise damaged(path, "it is missing") from error
