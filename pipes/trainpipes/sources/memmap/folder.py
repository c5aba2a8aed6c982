"""A folder of ``write_memmap``, which is found to be whole when it is opened."""

from __future__ import annotations

import math
import os
import re
import stat

import numpy as np

from trainpipes.engine.layout import IntArray
from trainpipes.errors import UnreadableError
from trainpipes.sources.memmap.manifest import Array, Manifest, damaged, read_manifest
from trainpipes.sources.memmap.mapped_rows import MappedRows, mapped

#: Offsets that are compared in one step.
CHECK_ROWS = 1 << 20
#: The header of a ``.npy`` file. NumPy reads it by ``ast``, which may fail where threads do so at once.
HEADER = re.compile(
    rb"\x93NUMPY\x01\0..\{'descr': '([^']+)', 'fortran_order': (True|False), 'shape': "
    rb"\(([0-9, ]*)\), \} *\n",
    re.DOTALL,
)


def open_folder(path: str) -> MappedRows:
    """Map all columns of a memory map. Headers and offsets are read.

    Raises:
        UnreadableError: the manifest is damaged, or a file is missing or not what the manifest says.
    """
    while True:
        manifest = read_manifest(path)
        try:
            return _opened(path, manifest)
        except UnreadableError:  # its files go after its manifest where it is written anew
            if read_manifest(path) == manifest:
                raise


def _opened(path: str, manifest: Manifest) -> MappedRows:
    values, offsets, total = [], [], 0
    for c in manifest.columns:
        values.append(_npy(os.path.join(path, c.file), c.dtype, (c.values, *c.shape)))
        offsets.append(np.empty(0, np.int64))
        if c.ragged:
            file = os.path.join(path, c.offsets_file)
            offsets[-1] = _npy(file, "int64", (manifest.rows + 1,))
            _check_offsets(file, offsets[-1], c.values)
        total += values[-1].nbytes + 8 * manifest.rows * c.ragged
    row_bytes = total / max(1, manifest.rows)
    return MappedRows(
        path, manifest.rows, manifest.layout, manifest.columns, values, offsets, row_bytes
    )


def _check_offsets(path: str, offsets: IntArray, values: int) -> None:
    """Raise unless offsets go up from 0 to the number of values."""
    bad = [n for n, must in ((0, 0), (len(offsets) - 1, values)) if offsets[n] != must]
    for start in range(0, len(offsets), CHECK_ROWS):
        part = offsets[start : start + CHECK_ROWS + 1]
        if not bad and (down := part[1:] < part[:-1]).any():
            bad = [start + int(np.argmax(down)) + 1]
    if bad:
        raise damaged(path, f"offset {bad[0]} is {offsets[bad[0]]}; they go up from 0 to {values}")


def _npy(path: str, name: str, shape: tuple[int, ...]) -> Array:
    """The array in a ``.npy`` file, which is found to hold just that."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise damaged(path, "it is a link or a folder, and must be a file")
        with open(path, "rb") as file:
            head = file.read(10)
            head += file.read(int.from_bytes(head[8:], "little"))
            parts = HEADER.fullmatch(head)
            if parts is None:
                raise damaged(path, f"it has no header of a .npy file, but {head!r:.60}")
            dtype = np.dtype(name)
            found = f"{parts[1].decode()}[{', '.join(re.findall('[0-9]+', parts[3].decode()))}]"
            must = f"{np.lib.format.dtype_to_descr(dtype)}{list(shape)}"
            if found != must or parts[2] == b"True":
                order = " in Fortran's order" * (parts[2] == b"True")
                raise damaged(path, f"it holds {found}{order}, and by the manifest {must}")
            size = os.fstat(file.fileno()).st_size
            if size != (whole := len(head) + dtype.itemsize * math.prod(shape)):
                what = "has grown" if size > whole else "was cut short"
                raise damaged(path, f"it {what}: it has {size:,} bytes of {whole:,}")
            return mapped(file, dtype, shape, len(head))
    except FileNotFoundError as error:
        raise damaged(path, "it is missing") from error
