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
from typing import BinaryIO

import numpy as np

from trainpipes.errors import UnreadableError
from trainpipes.sources.memmap.given_rows import BLOCK_BYTES, Part
from trainpipes.sources.memmap.manifest import OLD_MAGIC, Column, damaged
from trainpipes.sources.memmap.mapped_rows import MappedRows, mapped

__all__ = ["parts_of_old"]


def parts_of_old(path: str) -> Iterator[Part]:
    """The rows of such a file, which is found to be what was written.

    Raises:
        UnreadableError: it is not, or is no such file.
    """
    try:
        with open(path, "rb") as file:
            old = _opened(path, file, os.fstat(file.fileno()).st_size)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise damaged(path, f"it is no memory map of one file: {error.strerror}") from error
    old.verify()
    names, columns = tuple(column.name for column in old.columns), range(len(old.columns))
    step = max(1, BLOCK_BYTES // max(1, int(old.row_bytes)))
    for start in range(0, max(1, old.rows), step):
        stop = min(start + step, old.rows)
        yield Part(old.layout, names, tuple(old.slice(n, start, stop) for n in columns))


def _opened(path: str, file: BinaryIO, size: int) -> MappedRows:
    prefix = file.read(24)
    end = min(int.from_bytes(prefix[8:16], "little"), size)
    text = file.read(max(0, end - 24)).rstrip(b" ")
    if not prefix.startswith(OLD_MAGIC):
        raise UnreadableError(
            f"convert(old) is a memory map in one file, and {path} starts with {prefix[:8]!r}",
            path=path,
        )
    if not text or zlib.crc32(text) != int.from_bytes(prefix[16:20], "little"):
        raise damaged(path, "the checksum of its header differs")
    header = json.loads(text)
    if header["size"] != size:
        raise damaged(path, f"it has {size:,} bytes of {header['size']:,}")
    rows, columns, values, offsets = header["rows"], [], [], []
    for found in header["columns"]:
        at, offsets_at = found.pop("offset"), found.pop("offsets_at")
        columns.append(c := Column(**{**found, "shape": tuple(found["shape"])}))
        dtype = np.dtype(c.dtype).newbyteorder("<")
        values.append(mapped(file, dtype, (c.values, *c.shape), at))
        offsets.append(mapped(file, "<i8", ((rows + 1) * c.ragged,), offsets_at))
    row_bytes = size / max(1, rows)
    return MappedRows(path, rows, header["layout"], tuple(columns), values, offsets, row_bytes)
