"""Rows of memory-mapped files by number. The pages that maps touch are shared by all processes."""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import zlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from trainpipes.errors import DataChangedError, MissingFilesError, UnreadableError
from trainpipes.order import IntArray
from trainpipes.sources.memmap_manifest import OLD_MAGIC, Array, Column, Layout, damaged
from trainpipes.stages.pad_columns import Ragged

__all__ = ["BareFile", "MappedRows", "crc32_of", "mapped", "stretches"]

CHECK_BYTES = 16 << 20
#: A map keeps its file open before Python 3.13, and then need not.
UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def mapped(path: str, dtype: Any, shape: tuple[int, ...], start: int = 0, step: int = 0) -> Array:
    """An array in a file, from byte ``start`` on; ``step`` bytes from row to row where that is not a row's
    size. A plain array: rows of a ``np.memmap`` cost more than twice as much."""
    if 0 in shape:
        return np.empty(shape, dtype)
    with open(path, "rb") as file:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **UNTRACKED)
    return np.ndarray(
        shape, dtype, whole, start, (step, np.dtype(dtype).itemsize) if step else None
    )


class MappedRows(ABC):
    """The rows of one file or folder, ``path``; what a row is (``layout``), and the ``columns``."""

    path: str
    rows: int
    layout: Layout
    columns: tuple[Column, ...]

    @abstractmethod
    def values(self, number: int) -> Array:
        """A column's values, in the file: ``[rows, ...]``, of a ragged one ``[values, ...]``."""

    def offsets(self, number: int) -> IntArray:
        """Where the rows of a ragged column start in its values, and their end: int64 ``[rows + 1]``."""
        raise NotImplementedError

    def identity(self) -> list[Any]:
        """What tells its content, of JSON types."""
        return [[str(c), c.values, c.crc32, c.offsets_crc32] for c in self.columns]

    def verify(self) -> None:
        """Read all of it; raise UnreadableError if it is not what was written."""
        for number, column in enumerate(self.columns):
            same = crc32_of(self.values(number)) == column.crc32
            if not same or (
                column.ragged and crc32_of(self.offsets(number)) != column.offsets_crc32
            ):
                raise damaged(self.path, f"the checksum of column {column.name!r} differs")

    @property
    def row_bytes(self) -> float:
        """Bytes of an average row."""
        total = sum(c.value_bytes * c.values + 8 * self.rows * c.ragged for c in self.columns)
        return float(total / max(1, self.rows))

    def slice(self, number: int, start: int, stop: int) -> Array | Ragged:
        """Rows ``start`` to ``stop`` of a column, in the file."""
        if not self.columns[number].ragged:
            return self.values(number)[start:stop]
        offsets = self.offsets(number)[start : stop + 1]
        return Ragged(self.values(number)[offsets[0] : offsets[-1]], np.diff(offsets))

    def take(self, number: int, index: IntArray) -> Array | Ragged:
        """The rows at ``index`` of a column, copied."""
        values = self.values(number)
        if not self.columns[number].ragged:
            first, count = int(index[0]) if len(index) else 0, len(index)
            if count > 1 and int(index[-1]) - first + 1 == count and (np.diff(index) == 1).all():
                return np.array(values[first : first + count])
            return values[index]
        offsets = self.offsets(number)
        starts = offsets[index]
        lengths = offsets[index + 1] - starts
        return Ragged(stretches(values, starts, lengths), lengths)

    def will_need(self, number: int, start: int, stop: int) -> None:
        """Let the system read rows ``start`` to ``stop`` of a column ahead, but for a header's length."""
        if self.columns[number].ragged:
            start, stop = self.offsets(number)[[start, stop]].tolist()
        values = self.values(number)
        if isinstance(values.base, mmap.mmap) and hasattr(mmap, "MADV_WILLNEED"):
            begin = start * values.strides[0] // mmap.PAGESIZE * mmap.PAGESIZE
            values.base.madvise(mmap.MADV_WILLNEED, begin, stop * values.strides[0] - begin)


def stretches(values: Array, starts: IntArray, lengths: IntArray) -> Array:
    """Ranges of values, one after the other."""
    total = int(lengths.sum())
    if total > 64 * len(lengths):  # a copy of a long range is cheaper than an index for each value
        ends = starts + lengths
        parts = [values[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        return np.concatenate(parts)
    before = np.cumsum(lengths) - lengths
    found: Array = values[np.arange(total, dtype=np.int64) + np.repeat(starts - before, lengths)]
    return found


def crc32_of(array: Array, found: int = 0) -> int:
    """The CRC-32 of an array's bytes, after those of which it was ``found``."""
    data: Any = array.reshape(-1).view(np.uint8)
    for start in range(0, len(data), CHECK_BYTES):
        found = zlib.crc32(data[start : start + CHECK_BYTES], found)
    return found


class BareFile(MappedRows):
    """A file of numbers without a header (token ids, as nanoGPT and others write them), cut in rows.

    Args:
        path: the file.
        dtype: of the numbers.
        length: numbers in a row.
        more: numbers after a row that are read with it, the first ones of the next row.
    """

    layout = "dict"

    def __init__(self, path: str, dtype: str, length: int, more: int) -> None:
        self.path = path
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._step = length * self._dtype.itemsize
        try:
            with open(path, "rb") as file:
                magic, self._size = file.read(8), os.fstat(file.fileno()).st_size
        except FileNotFoundError as error:
            raise MissingFilesError(f"there is no file {path}", path=path) from error
        if magic.startswith((OLD_MAGIC, b"\x93NUMPY")):
            raise UnreadableError(
                f"{path} is no file of bare numbers: it says itself what it holds. A memory map is read "
                "without dtype and length; the array of another .npy file is written bare by .tofile()",
                path=path,
            )
        self._numbers, rest = divmod(self._size, self._dtype.itemsize)
        if rest:
            raise UnreadableError(
                f"{path} has {self._size:,} bytes, which is no whole number of {dtype}: give the dtype it "
                "was written with",
                path=path,
            )
        self.rows = max(0, self._numbers - more) // length
        self.columns = (Column("input_ids", dtype, (length + more,), False, self.rows),)
        self._values: Array | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_values": None}

    @property
    def row_bytes(self) -> float:
        return float(self._step)

    def values(self, number: int) -> Array:
        if self._values is None:
            if (size := os.path.getsize(self.path)) != self._size:
                raise DataChangedError(
                    f"{self.path} had {self._size:,} bytes when it was opened, and has {size:,} now: open "
                    "it again",
                    path=self.path,
                )
            shape = self.rows, *self.columns[0].shape
            self._values = mapped(self.path, self._dtype, shape, step=self._step)
        return self._values

    def identity(self) -> list[Any]:
        rows, digest = self.values(0), hashlib.sha256()
        for row in (0, self.rows // 2, self.rows - 1):
            if 0 <= row < self.rows:
                digest.update(rows[row].tobytes())
        return [str(self.columns[0]), self._numbers, digest.hexdigest()[:16]]

    def verify(self) -> None:
        """There is nothing to hold it against."""
