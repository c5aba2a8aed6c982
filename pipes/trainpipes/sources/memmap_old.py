"""Memory maps in one file, as older releases wrote them: read to be written as folders.

bytes 0..8      b"TPMEMMAP"
bytes 8..16     size of the header in bytes, uint64
bytes 16..20    CRC-32 of the header's text, uint32; four zero bytes follow
bytes 24..      the header: JSON, filled up with spaces
from there      for each column its values, little-endian, and the rows' offsets of a ragged one
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator

import numpy as np

from trainpipes.errors import UnreadableError
from trainpipes.order import IntArray
from trainpipes.sources.memmap_files import MappedRows, mapped
from trainpipes.sources.memmap_manifest import OLD_MAGIC, Array, Column, damaged
from trainpipes.sources.memmap_rows import BLOCK_BYTES, Part

__all__ = ["OldFile"]


class OldFile(MappedRows):
    """Rows of such a file.

    Raises:
        UnreadableError: it is none, or damaged.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            prefix, self._size = file.read(24), os.fstat(file.fileno()).st_size
            end = min(int.from_bytes(prefix[8:16], "little"), self._size)
            text = file.read(max(0, end - 24)).rstrip(b" ")
        if not prefix.startswith(OLD_MAGIC):
            raise UnreadableError(
                f"convert(old) is a memory map in one file, and {path} starts with {prefix[:8]!r}",
                path=path,
            )
        if not text or zlib.crc32(text) != int.from_bytes(prefix[16:20], "little"):
            raise damaged(path, "the checksum of its header differs")
        header = json.loads(text)
        if header["size"] != self._size:
            raise damaged(path, f"it has {self._size:,} bytes of {header['size']:,}")
        self.path, self.rows, self.layout = path, header["rows"], header["layout"]
        self._at = [(c.pop("offset"), c.pop("offsets_at")) for c in header["columns"]]
        self.columns = tuple(Column(**{**c, "shape": tuple(c["shape"])}) for c in header["columns"])

    def values(self, number: int) -> Array:
        column = self.columns[number]
        dtype, shape = np.dtype(column.dtype).newbyteorder("<"), (column.values, *column.shape)
        return mapped(self.path, dtype, shape, self._at[number][0])

    def offsets(self, number: int) -> IntArray:
        return mapped(self.path, "<i8", (self.rows + 1,), self._at[number][1])

    def parts(self) -> Iterator[Part]:
        """The rows, a few megabytes at a time."""
        names, columns = tuple(c.name for c in self.columns), range(len(self.columns))
        step = max(1, BLOCK_BYTES * self.rows // self._size)
        for start in range(0, max(1, self.rows), step):
            stop = min(start + step, self.rows)
            yield Part(self.layout, names, tuple(self.slice(n, start, stop) for n in columns))
