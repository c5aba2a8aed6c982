"""A part of a memory map: its header, and an ``.npy`` file for each column."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from trainpipes.errors import ConfigError, DataError
from trainpipes.sources.memmap.manifest import (
    Array,
    Column,
    Header,
    Layout,
    file_endings,
    npy_header,
    offsets_ending,
)
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.writers.array_blocks import Arrays, Cells, bad_row

#: What the user named: dtypes of columns or of all, and columns whose rows may differ in length.
Named = tuple[Mapping[str, np.dtype[Any]] | np.dtype[Any] | None, Collection[str]]


@dataclass(frozen=True)
class ArrayColumns:
    """The columns of a memory map, as its first rows show them."""

    layout: Layout
    kind: str
    columns: tuple[Column, ...]
    named: Mapping[str, np.dtype[Any]]

    @classmethod
    def of(cls, rows: Arrays, dtypes: Any, ragged: Collection[str]) -> ArrayColumns:
        asked = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(rows.columns, dtypes)
        if missing := sorted({*asked, *ragged} - {*rows.columns}):
            raise ConfigError(
                f"write_memmap(): there is no column {missing[0]!r}; there are "
                f"{', '.join(sorted(rows.columns))}"
            )
        named = {name: dtype for name, dtype in asked.items() if dtype is not None}
        columns = []
        for name, cells in rows.columns.items():
            column = Column(name, "", (), name in ragged or cells.lengths is not None)
            if column.ragged and rows.layout == "tuple":
                raise ConfigError(
                    f"write_memmap(): column {name!r} is ragged, and such columns need names: give rows that "
                    "are dicts"
                )
            values = (_as_ragged(cells, name, 0) if column.ragged else cells).values
            if len(values) or not column.ragged:
                dtype = named.get(name, values.dtype).newbyteorder("=")
                column = replace(column, dtype=dtype.name, shape=values.shape[1:])
            columns.append(column)
        return cls(rows.layout, str(rows), tuple(columns), named)

    def check(self, rows: Arrays, row: int) -> None:
        """Raise DataError unless rows, of which the first has that number, have these columns."""
        names = {column.name for column in self.columns}
        if rows.layout != self.layout or rows.columns.keys() != names:
            raise DataError(
                f"write_memmap(): row {row} is {rows}, and those before it are {self.kind}: all rows have "
                "the same columns",
                row=row,
            )

    def bytes_of(self, rows: Arrays) -> Array:
        """Bytes of each row, about, int64 ``[rows]``: the same however rows are given."""
        sizes = np.zeros(len(rows), np.int64)
        for column in self.columns:
            cells = rows.columns[column.name]
            each = prod(cells.values.shape[1:]) * np.dtype(column.dtype or np.int64).itemsize
            sizes += each if cells.lengths is None else each * cells.lengths + 8
        return sizes


def _as_ragged(cells: Cells, name: str, row: int) -> Cells:
    if cells.lengths is not None:
        return cells
    if cells.values.ndim < 2:
        what = "is a single number, and in a ragged column rows are lists or arrays"
        raise bad_row(row, name, what)
    count, length, *rest = cells.values.shape
    return Cells(cells.values.reshape(count * length, *rest), np.full(count, length, np.int64))


class NpyFile:
    def __init__(self, file: OutputFile, dtype: str, shape: tuple[int, ...]) -> None:
        self.rows = 0
        self._file, self._dtype, self._shape = file, dtype, shape
        file.write(npy_header(dtype, (0, *shape)))
        file.check = 0

    def write(self, array: Array) -> None:
        data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._file.write(data.data)
        self.rows += len(array)

    def close(self) -> int:
        """Write how many rows there are; gives the CRC-32 of what follows the header."""
        self._file.write_beginning(npy_header(self._dtype, (self.rows, *self._shape)))
        return self._file.check


class ColumnFile:
    """A column's values, and the offsets of a ragged one."""

    def __init__(self, column: Column, named: Any, part: OutputFile, ending: str) -> None:
        self._column, self._named = column, named
        self._part, self._ending = part, ending
        self._seen: Array = np.empty((0, *column.shape), column.dtype or named)
        self._values: NpyFile | None = None
        self._offsets: NpyFile | None = None
        if column.ragged:
            self._offsets = NpyFile(part.beside(offsets_ending(ending)), "int64", ())
            self._offsets.write(np.zeros(1, np.int64))

    def write(self, given: Cells, row: int) -> None:
        name, shape = self._column.name, self._column.shape
        if self._offsets:
            given = _as_ragged(given, name, row)
            start = self._values.rows if self._values else 0
            self._offsets.write(start + np.cumsum(given.lengths, dtype=np.int64))
        elif given.lengths is not None:
            size = shape[0] if shape else 1
            place = int(np.argmax(given.lengths != size))
            what = f"has {given.lengths[place]} values, and all rows before it {size}"
            raise bad_row(
                row + place, name, f"{what}: if lengths may differ, pass ragged=[{name!r}]"
            )
        self._seen = given.values
        if not len(given.values) and self._offsets:
            return
        into = self._opened()
        if len(given.values) and given.values.shape[1:] != self._column.shape:
            shown = [*["L"] * self._column.ragged, *given.values.shape[1:]]
            what = f"has shape {shown}, and the rows before it make it {self._column}"
            raise bad_row(row, name, what)
        into.write(self._cast(given, row))

    def _opened(self) -> NpyFile:
        if self._values is None:
            if not self._column.dtype:  # which no row has shown before
                dtype = np.dtype(self._named or self._seen.dtype).newbyteorder("=")
                self._column = replace(self._column, dtype=dtype.name, shape=self._seen.shape[1:])
            file = self._part.beside(self._ending)
            self._values = NpyFile(file, self._column.dtype, self._column.shape)
        return self._values

    def _cast(self, cells: Cells, row: int) -> Array:
        """The same numbers in the column's dtype, or an error."""
        values, dtype = cells.values, np.dtype(self._column.dtype)
        narrowed = self._named is not None and dtype.kind == "f"
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
            name, value = self._column.name, values[place][bad[place]].flat[0]
            if cells.lengths is not None:
                row += int(np.searchsorted(np.cumsum(cells.lengths), place, side="right"))
            else:
                row += place
            raise bad_row(
                row, name,
                f"is {dtype}, which cannot hold {values.dtype} {value}: pass dtype={{{name!r}: ...}} with "
                "one that can, or convert the values",
            )  # fmt: skip
        return found

    def close(self) -> Column:
        values = self._opened()
        found = replace(self._column, crc32=values.close(), values=values.rows)
        return replace(found, offsets_crc32=self._offsets.close()) if self._offsets else found


class PartFile:
    def __init__(self, file: OutputFile, schema: ArrayColumns) -> None:
        self.columns: dict[str, str] = {}
        self._file, self._schema, self._rows = file, schema, 0
        endings = file_endings([column.name for column in schema.columns])
        self._columns = {
            column.name: ColumnFile(column, schema.named.get(column.name), file, ending)
            for column, ending in zip(schema.columns, endings, strict=True)
        }

    def write(self, group: Arrays, first_row: int) -> None:
        for name, column in self._columns.items():
            column.write(group.columns[name], first_row)
        self._rows += len(group)

    def close(self) -> None:
        columns = tuple(column.close() for column in self._columns.values())
        self.columns = {column.name: column.type for column in columns}
        self._file.write(Header(self._rows, self._schema.layout, columns).pack())
