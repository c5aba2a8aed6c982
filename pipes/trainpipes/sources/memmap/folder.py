from __future__ import annotations

import math
import os
import stat

import numpy as np

from trainpipes.engine.layout import IntArray
from trainpipes.sources.memmap.manifest import (
    HEADER,
    Array,
    Header,
    damaged,
    file_endings,
    npy_header,
    offsets_ending,
    read_headers,
)
from trainpipes.sources.memmap.mapped_rows import MappedRows, mapped

#: Offsets that are compared in one step.
CHECK_ROWS = 1 << 20


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
