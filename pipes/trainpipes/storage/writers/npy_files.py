"""A part of a memory map: its header, and an ``.npy`` file for each column."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
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
from trainpipes.stages.read_columns import Ragged
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.writers.array_blocks import Arrays, bad_row


@dataclass(frozen=True)
class ArrayColumns:
    layout: Layout
    columns: tuple[Column, ...]
    named: Mapping[str, np.dtype[Any]]

    @classmethod
    def of(
        cls,
        rows: Arrays,
        dtypes: Mapping[str, np.dtype[Any]] | np.dtype[Any] | None,
        ragged: Collection[str],
    ) -> ArrayColumns:
        names = rows.names
        asked = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(names, dtypes)
        if missing := sorted({*asked, *ragged} - {*names}):
            raise ConfigError(
                f"write_memmap(): there is no column {missing[0]!r}; there are {', '.join(sorted(names))}"
            )
        named = {name: dtype for name, dtype in asked.items() if dtype is not None}
        if len({*names}) < len(names):
            raise ConfigError(f"write_memmap(): two columns have one name: {', '.join(names)}")
        many = [
            n in ragged or isinstance(c, Ragged) for n, c in zip(names, rows.columns, strict=True)
        ]
        if rows.layout == "tuple" and any(many):
            raise ConfigError(
                f"write_memmap(): column {names[many.index(True)]!r} is ragged, and such columns need names: "
                "give rows that are dicts"
            )
        columns = []
        for name, given, is_ragged in zip(names, rows.columns, many, strict=True):
            values: Any = _as_ragged(given, name, 0).values if is_ragged else given
            column = Column(name, "", (), is_ragged)
            if len(values) or not is_ragged:
                dtype = named.get(name, values.dtype).newbyteorder("=")
                column = replace(column, dtype=dtype.name, shape=values.shape[1:])
            columns.append(column)
        return cls(rows.layout, tuple(columns), named)

    def check(self, rows: Arrays, row: int) -> None:
        """Raise DataError unless rows, of which the first has that number, have these columns."""
        names = tuple(column.name for column in self.columns)
        if (rows.layout, rows.names) != (self.layout, names):
            raise DataError(
                f"write_memmap(): row {row} has columns {', '.join(rows.names)}, and those before it "
                f"{', '.join(names)}: all rows have the same columns",
                row=row,
            )

    def bytes_of(self, rows: Arrays) -> Array:
        """Bytes of each row, about, int64 ``[rows]``: the same however rows are given."""
        sizes = np.zeros(len(rows), np.int64)
        for column, given in zip(self.columns, rows.columns, strict=True):
            values = given.values if isinstance(given, Ragged) else given
            each = int(np.prod(values.shape[1:])) * (
                np.dtype(column.dtype).itemsize if column.dtype else 8
            )
            sizes += each * given.lengths + 8 if isinstance(given, Ragged) else each
        return sizes


def _as_ragged(given: Array | Ragged, name: str, row: int) -> Ragged:
    if isinstance(given, Ragged):
        return given
    if given.ndim < 2:
        raise bad_row(
            row, name, "is a single number, and in a ragged column rows are lists or arrays"
        )
    count, length, *rest = given.shape
    return Ragged(given.reshape(count * length, *rest), np.full(count, length, np.int64))


class NpyFile:
    def __init__(self, file: OutputFile, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.rows = 0
        self._file, self._dtype, self._shape = file, dtype, shape
        file.write(npy_header(dtype.name, (0, *shape)))
        file.check = 0

    @property
    def crc32(self) -> int:
        return self._file.check

    def write(self, array: Array) -> None:
        data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._file.write(data.data)
        self.rows += len(array)

    def close(self) -> None:
        self._file.write_beginning(npy_header(self._dtype.name, (self.rows, *self._shape)))


class ColumnFile:
    """A column's values, and the offsets of a ragged one."""

    def __init__(
        self, column: Column, named: np.dtype[Any] | None, part: OutputFile, ending: str
    ) -> None:
        self._column, self._named = column, named
        self._part, self._ending = part, ending
        self._empty = np.empty((0, *column.shape), column.dtype or named)
        self._values: NpyFile | None = None
        self._offsets: NpyFile | None = None
        if column.ragged:
            file = part.beside(offsets_ending(ending))
            self._offsets = NpyFile(file, np.dtype(np.int64), ())
            self._offsets.write(np.zeros(1, np.int64))

    def write(self, given: Array | Ragged, row: int) -> None:
        rows = self._checked(given, row)
        if self._offsets:
            start = self._values.rows if self._values else 0
            self._empty = rows.values if self._offsets.rows == 1 else self._empty
            self._offsets.write(start + np.cumsum(rows.lengths, dtype=np.int64))
        if len(rows.values) or not self._offsets:
            into = self._values or self._open(rows.values)
            if len(rows.values) and rows.values.shape[1:] != self._column.shape:
                shape = [*["L"] * self._column.ragged, *rows.values.shape[1:]]
                what = f"has shape {shape}, and the rows before it make it {self._column}"
                raise bad_row(row, self._column.name, what)
            into.write(self._cast(rows, row))

    def _checked(self, given: Array | Ragged, row: int) -> Ragged:
        name, shape = self._column.name, self._column.shape
        if self._offsets:
            return _as_ragged(given, name, row)
        if not isinstance(given, Ragged):
            return Ragged(given, np.ones(len(given), np.int64))
        size = shape[0] if shape else 1
        place = int(np.argmax(given.lengths != size))
        what = f"has {given.lengths[place]} values, and all rows before it {size}"
        raise bad_row(row + place, name, f"{what}: if lengths may differ, pass ragged=[{name!r}]")

    def _open(self, values: Array) -> NpyFile:
        dtype, shape = (
            np.dtype(self._column.dtype or self._named or values.dtype),
            self._column.shape,
        )
        if not self._column.dtype:  # which no row has shown before
            dtype, shape = dtype.newbyteorder("="), values.shape[1:]
            self._column = replace(self._column, dtype=dtype.name, shape=shape)
        self._values = NpyFile(self._part.beside(self._ending), dtype, shape)
        return self._values

    def _cast(self, rows: Ragged, row: int) -> Array:
        """The same numbers in the column's dtype, or an error."""
        values, dtype = rows.values, np.dtype(self._column.dtype)
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
            row += int(np.searchsorted(np.cumsum(rows.lengths), place, side="right"))
            name, value = self._column.name, values[place][bad[place]].flat[0]
            what = f"is {dtype}, which cannot hold {values.dtype} {value}"
            raise bad_row(
                row,
                name,
                f"{what}: pass dtype={{{name!r}: ...}} with one that can, or convert the values",
            )
        return found

    def close(self) -> Column:
        values = self._values or self._open(self._empty)
        values.close()
        found = replace(self._column, values=values.rows, crc32=values.crc32)
        if self._offsets:
            self._offsets.close()
            found = replace(found, offsets_crc32=self._offsets.crc32)
        return found


class PartFile:
    def __init__(self, file: OutputFile, columns: ArrayColumns) -> None:
        self.columns: dict[str, str] = {}
        self._file, self._given, self._rows = file, columns, 0
        endings = file_endings([column.name for column in columns.columns])
        self._columns = [
            ColumnFile(column, columns.named.get(column.name), file, ending)
            for column, ending in zip(columns.columns, endings, strict=True)
        ]

    def write(self, group: Arrays, first_row: int) -> None:
        self._given.check(group, first_row)
        for column, given in zip(self._columns, group.columns, strict=True):
            column.write(given, first_row)
        self._rows += len(group)

    def close(self) -> None:
        columns = tuple(column.close() for column in self._columns)
        self.columns = {column.name: column.type for column in columns}
        self._file.write(Header(self._rows, self._given.layout, columns).pack())
