"""Files that lie in memory maps: what columns they have, and rows of them by number.

A file of ``write_memmap`` says itself what it holds; a file of bare numbers is cut in rows of one
length. Maps are made at the first read and shared by all readers of a process; the pages they
touch are shared by all processes.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import threading
import zlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from trainpipes.errors import ConfigError, DataChangedError, MissingFilesError, UnreadableError
from trainpipes.order import IntArray
from trainpipes.sources.memmap_format import Array, Column, Header, Layout, as_bytes, read_header
from trainpipes.sources.memmap_rows import Ragged

__all__ = ["BareFile", "HeadedFile", "MappedFile", "stretches"]

CHECK_BYTES = 16 << 20

_mapping = threading.Lock()


class _Mapped:
    """A whole file in memory.

    Args:
        path: the file, not empty.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        first = np.frombuffer(self.map, np.uint8, 1)
        self.address = int(first.__array_interface__["data"][0])


class MappedFile(ABC):
    """Rows of one file.

    Attributes:
        path: the file.
        rows: rows in it.
        layout: what a row is.
        columns: its columns.
    """

    path: str
    rows: int
    layout: Layout
    columns: tuple[Column, ...]
    _mapped: _Mapped | None = None

    @abstractmethod
    def values(self, number: int) -> Array:
        """All values of a column, in the file: ``[rows, ...]``, of a ragged one ``[values, ...]``."""

    @abstractmethod
    def offsets(self, number: int) -> IntArray:
        """Where the rows of a ragged column begin in its values, and end: int64 ``[rows + 1]``."""

    @abstractmethod
    def identity(self) -> list[Any]:
        """What tells its content, of JSON types."""

    @abstractmethod
    def verify(self) -> None:
        """Read all of it.

        Raises:
            UnreadableError: it is not what was written.
        """

    @property
    def row_bytes(self) -> float:
        """Bytes of an average row."""
        total = 0.0
        for column in self.columns:
            total += column.value_bytes * column.values + 8 * self.rows * column.ragged
        return total / max(1, self.rows)

    def slice(self, number: int, start: int, stop: int) -> Array | Ragged:
        """Rows ``start`` to ``stop`` of a column, in the file."""
        if not self.columns[number].ragged:
            return self.values(number)[start:stop]
        offsets = self.offsets(number)[start : stop + 1]
        return Ragged(self.values(number)[offsets[0] : offsets[-1]], np.diff(offsets))

    def will_need(self, number: int, start: int, stop: int) -> None:
        """Let the system read rows ``start`` to ``stop`` of a column ahead, if they are not in memory."""
        column = self.slice(number, start, stop)
        values = column.values if isinstance(column, Ragged) else column
        if self._mapped is None or not values.size or not hasattr(mmap, "MADV_WILLNEED"):
            return
        first = values.__array_interface__["data"][0] - self._mapped.address
        last = first + (values.shape[0] - 1) * values.strides[0] + values[0].nbytes
        first = first // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapped.map.madvise(mmap.MADV_WILLNEED, first, last - first)

    def _array(self, dtype: str, offset: int, shape: tuple[int, ...]) -> Array:
        """An array that lies in the file."""
        little = np.dtype(dtype).newbyteorder("<")
        if 0 in shape:
            return np.empty(shape, little)
        with _mapping:
            if self._mapped is None:
                self._check()
                self._mapped = _Mapped(self.path)
        return np.frombuffer(self._mapped.map, little, math.prod(shape), offset).reshape(shape)

    @abstractmethod
    def _check(self) -> None:
        """Raise if the file is another one since it was opened."""

    def take(self, number: int, index: IntArray) -> Array | Ragged:
        """The rows at ``index`` of a column, copied."""
        if not self.columns[number].ragged:
            first, count = int(index[0]) if len(index) else 0, len(index)
            if count > 1 and int(index[-1]) - first + 1 == count and (np.diff(index) == 1).all():
                return np.array(self.values(number)[first : first + count])
            return self.values(number)[index]
        offsets = self.offsets(number)
        starts = offsets[index]
        lengths = offsets[index + 1] - starts
        return Ragged(stretches(self.values(number), starts, lengths), lengths)


def stretches(values: Array, starts: IntArray, lengths: IntArray) -> Array:
    """Ranges of values, one after the other."""
    total = int(lengths.sum())
    if total > 64 * len(
        lengths
    ):  # long ranges: a copy each is cheaper than an index for each value
        ends = starts + lengths
        parts = [values[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        return np.concatenate(parts)
    before = np.cumsum(lengths) - lengths
    found: Array = values[np.arange(total, dtype=np.int64) + np.repeat(starts - before, lengths)]
    return found


class HeadedFile(MappedFile):
    """A file of ``write_memmap``.

    Args:
        path: the file.

    Raises:
        MissingFilesError, UnreadableError: see ``read_header``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._take_in(read_header(path))

    def _take_in(self, header: Header) -> None:
        self.header = header
        self.rows, self.layout, self.columns = header.rows, header.layout, header.columns
        self._arrays: dict[int, Array] = {}
        self._starts: dict[int, IntArray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "header": self.header}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._take_in(state["header"])

    def values(self, number: int) -> Array:
        if number not in self._arrays:
            column = self.columns[number]
            shape = (column.values, *column.shape)
            self._arrays[number] = self._array(column.dtype, column.offset, shape)
        return self._arrays[number]

    def offsets(self, number: int) -> IntArray:
        if number not in self._starts:
            at = self.columns[number].offsets_at
            offsets = self._array("int64", at, (self.rows + 1,))
            if offsets[0] or int(offsets[-1]) != self.columns[number].values:
                raise self._damaged(self.columns[number])
            self._starts[number] = offsets
        return self._starts[number]

    def _check(self) -> None:
        if read_header(self.path) != self.header:
            raise DataChangedError(
                f"{self.path} was written anew since it was opened: open it again", path=self.path
            )

    def identity(self) -> list[Any]:
        return [[str(c), c.values, c.crc32, c.offsets_crc32] for c in self.header.columns]

    def verify(self) -> None:
        for number, column in enumerate(self.columns):
            if _crc32(self.values(number)) != column.crc32:
                raise self._damaged(column)
            if column.ragged and _crc32(self.offsets(number)) != column.offsets_crc32:
                raise self._damaged(column)

    def _damaged(self, column: Column) -> UnreadableError:
        return UnreadableError(
            f"{self.path}: column {column.name!r} is not what was written (its checksum differs): copy "
            "or write the file anew",
            path=self.path,
        )


class BareFile(MappedFile):
    """A file of numbers without a header, cut in rows.

    Args:
        path: the file.
        dtype: of the numbers.
        length: numbers in a row.
        more: numbers after a row that are read with it, the first ones of the next row.
        name: of the column.

    Raises:
        MissingFilesError: there is no such file.
        UnreadableError: it holds no whole number of numbers, or a header.
    """

    layout = "dict"

    def __init__(self, path: str, dtype: str, length: int, more: int, name: str) -> None:
        self.path, self._dtype, self._length, self._more = path, dtype, length, more
        try:
            self.size = os.path.getsize(path)
        except FileNotFoundError as error:
            raise MissingFilesError(f"there is no file {path}", path=path) from error
        width = np.dtype(dtype).itemsize
        if self.size % width:
            raise UnreadableError(
                f"{path} has {self.size:,} bytes, which is no whole number of {dtype}: give the dtype it "
                "was written with",
                path=path,
            )
        with open(path, "rb") as file:
            if file.read(8) == b"TPMEMMAP":
                raise UnreadableError(
                    f"{path} is a file of write_memmap(), which says itself what it holds: read it "
                    "without dtype and length",
                    path=path,
                )
        self.numbers = self.size // width
        self.rows = max(0, self.numbers - more) // length
        self.columns = (Column(name, dtype, (length + more,), False, 0, self.rows),)
        self._map: Array | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_map": None, "_mapped": None}

    @property
    def row_bytes(self) -> float:
        return float(np.dtype(self._dtype).itemsize * self._length)

    def values(self, number: int) -> Array:
        if self._map is None:
            flat = self._array(self._dtype, 0, (self.numbers,))
            self._map = np.lib.stride_tricks.as_strided(
                flat,
                (self.rows, self._length + self._more),
                (flat.itemsize * self._length, flat.itemsize),
                writeable=False,
            )
        return self._map

    def _check(self) -> None:
        size = os.path.getsize(self.path)
        if size != self.size:
            raise DataChangedError(
                f"{self.path} had {self.size:,} bytes when it was opened, and has {size:,} now: open it "
                "again",
                path=self.path,
            )

    def offsets(self, number: int) -> IntArray:
        raise ConfigError(f"{self.path} has no ragged column")

    def identity(self) -> list[Any]:
        digest = hashlib.sha256()
        rows = self.values(0)
        for row in (0, self.rows // 2, self.rows - 1):
            if 0 <= row < self.rows:
                digest.update(rows[row].tobytes())
        return [str(self.columns[0]), self.numbers, digest.hexdigest()[:16]]

    def verify(self) -> None:
        """There is nothing to hold it against."""


def _crc32(array: Array) -> int:
    data = as_bytes(array)
    found = 0
    for start in range(0, len(data), CHECK_BYTES):
        found = zlib.crc32(data[start : start + CHECK_BYTES], found)
    return found
