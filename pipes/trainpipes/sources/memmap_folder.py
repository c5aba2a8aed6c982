"""A folder of ``write_memmap``, which is found to be whole when it is opened."""

from __future__ import annotations

import math
import os
import stat
from typing import Any

import numpy as np

from trainpipes.errors import DataChangedError
from trainpipes.order import IntArray
from trainpipes.sources.memmap_files import MappedRows, mapped
from trainpipes.sources.memmap_manifest import Array, Column, Manifest, damaged, read_manifest

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
        while True:
            self.__setstate__({"path": path, "manifest": read_manifest(path)})
            try:
                for number, column in enumerate(self.columns):
                    self.values(number)
                    if column.ragged:
                        self._check_offsets(column, self.offsets(number))
                return
            except DataChangedError:  # between its manifest and its files
                continue

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self.manifest: Manifest = state["manifest"]
        self.rows, self.layout = self.manifest.rows, self.manifest.layout
        self.columns = self.manifest.columns
        self._arrays: dict[str, Array] = {}

    def values(self, number: int) -> Array:
        column = self.columns[number]
        if column.file not in self._arrays:
            self._map(column.file, column.dtype, (column.values, *column.shape))
        return self._arrays[column.file]

    def offsets(self, number: int) -> IntArray:
        name = self.columns[number].offsets_file
        if name not in self._arrays:
            self._map(name, "int64", (self.rows + 1,))
        return self._arrays[name]

    def _map(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        path = os.path.join(self.path, name)
        try:
            self._arrays[name] = mapped(path, dtype, shape, _start(path, np.dtype(dtype), shape))
        finally:  # the files of one that was written anew go after its manifest has
            if read_manifest(self.path) != self.manifest:
                raise DataChangedError(
                    f"{self.path} was written anew since it was opened: open it again",
                    path=self.path,
                )

    def _check_offsets(self, column: Column, offsets: IntArray) -> None:
        bad = [n for n, must in ((0, 0), (self.rows, column.values)) if offsets[n] != must]
        for start in range(0, self.rows, CHECK_ROWS):
            part = offsets[start : start + CHECK_ROWS + 1]
            if not bad and (down := part[1:] < part[:-1]).any():
                bad = [start + int(np.argmax(down)) + 1]
        if bad:
            raise damaged(
                os.path.join(self.path, column.offsets_file),
                f"offset {bad[0]} is {offsets[bad[0]]}, and they go up from 0 to {column.values}",
            )


def _start(path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """The first byte of the numbers in a ``.npy`` file, which is found to hold just these."""
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
    return start
