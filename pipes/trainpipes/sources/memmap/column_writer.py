"""One column of a memory map that is being written, straight to its files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainpipes.sources.memmap.given_rows import bad_row
from trainpipes.sources.memmap.manifest import Array, Column
from trainpipes.sources.memmap.mapped_rows import crc32_of
from trainpipes.stages.pad_columns import Ragged


class NpyWriter:
    """A new ``.npy`` file; its header is written again when its length is known."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.rows = self.crc32 = 0
        self._path, self._descr, self._shape = path, np.lib.format.dtype_to_descr(dtype), shape
        path.touch(exist_ok=False)
        self.finish(sync=False)

    def write(self, array: Array) -> None:
        array = np.ascontiguousarray(array)
        data: Any = array.reshape(-1).view(np.uint8)
        with self._path.open("ab") as file:
            file.write(data)
        self.crc32 = crc32_of(array, self.crc32)
        self.rows += len(array)

    def finish(self, sync: bool = True) -> None:
        """Write the header. NumPy leaves room for a longer shape, so that its size stays the same."""
        shape = self.rows, *self._shape
        with self._path.open("r+b") as file:
            header = {"descr": self._descr, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.flush()
            if sync:
                os.fsync(file.fileno())


class ColumnWriter:
    """A column; of a ragged one, dtype and shape are those of the first row that is not empty.

    Args:
        folder: where its files will be.
        stem: what their names begin with.
        name: of the column.
        ragged: whether each row has a length of its own.
        dtype: that the user named; None for that of the values.
    """

    def __init__(
        self, folder: Path, stem: str, name: str, ragged: bool, dtype: np.dtype[Any] | None
    ) -> None:
        self._folder, self._dtype = folder, dtype
        self._column = Column(name, "", (), ragged, file=f"{stem}.npy")
        self._first = np.empty(0)
        self._values: NpyWriter | None = None
        self._offsets: NpyWriter | None = None
        if ragged:
            self._offsets = NpyWriter(folder / self._column.offsets_file, np.dtype(np.int64), ())
            self._offsets.write(np.zeros(1, np.int64))

    def write(self, given: Array | Ragged, row: int) -> None:
        """Append rows, of which the first has that number."""
        rows = self._checked(given, row)
        if self._offsets:
            start = self._values.rows if self._values else 0
            self._first = rows.values if self._offsets.rows == 1 else self._first
            self._offsets.write(start + np.cumsum(rows.lengths, dtype=np.int64))
        if len(rows.values) or not self._offsets:
            into = self._values or self._open(rows.values)
            if len(rows.values) and rows.values.shape[1:] != self._column.shape:
                shape = [*["L"] * self._column.ragged, *rows.values.shape[1:]]
                what = f"has shape {shape}, and the rows before it make it {self._column}"
                raise bad_row(row, self._column.name, what)
            into.write(self._cast(rows, row))

    def _checked(self, given: Array | Ragged, row: int) -> Ragged:
        """Rows as those before them."""
        name, shape = self._column.name, self._column.shape
        if isinstance(given, Ragged):
            if self._offsets:
                return given
            size = shape[0] if shape else 1
            place = int(np.argmax(given.lengths != size))
            what = f"has {given.lengths[place]} values, and all rows before it {size}"
            raise bad_row(
                row + place, name, f"{what}: if lengths may differ, pass ragged=[{name!r}]"
            )
        if not self._offsets:
            return Ragged(given, np.ones(len(given), np.int64))
        if given.ndim < 2:
            raise bad_row(
                row, name, "is a single number, and in a ragged column rows are lists or arrays"
            )
        count, length, *rest = given.shape
        return Ragged(given.reshape(count * length, *rest), np.full(count, length, np.int64))

    def _open(self, values: Array) -> NpyWriter:
        dtype = (self._dtype or values.dtype).newbyteorder("=")
        self._column = replace(self._column, dtype=dtype.name, shape=values.shape[1:])
        self._values = NpyWriter(self._folder / self._column.file, dtype, values.shape[1:])
        return self._values

    def _cast(self, rows: Ragged, row: int) -> Array:
        """The same numbers in the column's dtype, or an error; floats may be narrowed where it was named."""
        values, dtype = rows.values, np.dtype(self._column.dtype)
        narrowed = self._dtype is not None and dtype.kind == "f"
        # NumPy calls a cast of int64 to float64 safe, which rounds integers above 2^53.
        rounded = dtype.kind == "f" and values.dtype.kind in "iu"
        if narrowed or (np.can_cast(values.dtype, dtype, "safe") and not rounded):
            return values.astype(dtype, copy=False)
        kept, bad = values, np.zeros(values.shape, np.bool_)
        if dtype.kind in "iu":
            bad = ~((values >= np.iinfo(dtype).min) & (values <= np.iinfo(dtype).max))
            kept = np.where(bad, 0, values)
        found: Array = kept.astype(dtype)
        # NaN stays NaN among floats.
        with np.errstate(invalid="ignore"):  # a float beyond int64
            bad |= (found.astype(values.dtype) != kept) & ((kept == kept) | (dtype.kind != "f"))
        if bad.any():
            place = int(np.argmax(bad.reshape(len(values), -1).any(axis=1)))
            row += int(np.searchsorted(np.cumsum(rows.lengths), place, side="right"))
            name, value = self._column.name, values[place][bad[place]].flat[0]
            what = f"is {dtype}, which cannot hold {values.dtype} {value}"
            raise bad_row(
                row,
                name,
                f"{what}: pass dtype={{{name!r}: ...}} with one that can, or convert the values",
            )
        return found

    def finish(self) -> Column:
        """Write what was not known before."""
        values = self._values or self._open(self._first)
        values.finish()
        found = replace(self._column, values=values.rows, crc32=values.crc32)
        if self._offsets:
            self._offsets.finish()
            found = replace(found, offsets_crc32=self._offsets.crc32)
        return found
