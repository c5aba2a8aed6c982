"""A folder of ``write_memmap``, which is found to be whole when it is opened."""

from __future__ import annotations

import math
import os
import stat
from contextlib import suppress
from typing import Any

import numpy as np

from trainpipes.errors import DataChangedError
from trainpipes.order import IntArray
from trainpipes.sources.memmap_files import MappedRows, mapped
from trainpipes.sources.memmap_manifest import Array, Manifest, damaged, read_manifest

__all__ = ["MemmapFolder"]

#: Offsets that are compared in one step.
CHECK_ROWS = 1 << 20


class MemmapFolder(MappedRows):
    """Rows of a folder. Opening it maps all columns, and reads headers and offsets; one that arrives pickled
    is mapped when it is read.

    Raises:
        UnreadableError: the manifest is damaged, or a file is missing or not what the manifest says.
    """

    def __init__(self, path: str) -> None:
        while not getattr(self, "_arrays", None):
            self.__setstate__({"path": path, "manifest": read_manifest(path)})
            with suppress(DataChangedError):  # between its manifest and its files
                self._map()
        for number, column in enumerate(self.columns):
            if column.ragged:
                file = os.path.join(path, column.offsets_file)
                _check_offsets(file, self.offsets(number), column.values)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self.manifest: Manifest = state["manifest"]
        self.rows, self.layout = self.manifest.rows, self.manifest.layout
        self.columns = self.manifest.columns
        self._arrays: list[tuple[Array, Array]] = []

    def values(self, number: int) -> Array:
        return (self._arrays or self._map())[number][0]

    def offsets(self, number: int) -> IntArray:
        return (self._arrays or self._map())[number][1]

    def _map(self) -> list[tuple[Array, Array]]:
        none, found = np.empty(0, np.int64), []
        try:
            for c in self.columns:
                values = _npy(os.path.join(self.path, c.file), c.dtype, (c.values, *c.shape))
                offsets = os.path.join(self.path, c.offsets_file)
                found.append(
                    (values, _npy(offsets, "int64", (self.rows + 1,)) if c.ragged else none)
                )
        finally:  # the files of one that was written anew go after its manifest has
            if read_manifest(self.path) != self.manifest:
                raise DataChangedError(
                    f"{self.path} was written anew since it was opened: open it again",
                    path=self.path,
                )
        self._arrays = found
        return found


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
    dtype = np.dtype(name)
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise damaged(path, "it is a link or a folder, and must be a file")
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            found, fortran, kind = np.lib.format.read_array_header_1_0(file)
            start, size = file.tell(), os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise damaged(path, "it is missing") from error
    except OSError:
        raise
    except Exception as error:  # the header is a literal of Python, and fails in as many ways
        raise damaged(path, f"it has no header of a .npy file ({error!r:.100})") from error
    if (version, kind, found, fortran) != ((1, 0), dtype, shape, False):
        order = ", in Fortran's order" * fortran
        raise damaged(
            path, f"it holds {kind}{list(found)}{order}, and by the manifest {dtype}{list(shape)}"
        )
    if size != (whole := start + dtype.itemsize * math.prod(shape)):
        what = "has grown" if size > whole else "was cut short"
        raise damaged(path, f"it {what}: it has {size:,} bytes of {whole:,}")
    return mapped(path, dtype, shape, start)
