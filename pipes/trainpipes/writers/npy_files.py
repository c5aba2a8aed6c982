"""A part of a memory map: its header, and an ``.npy`` file for each column."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import apart, first_null, one_chunk
from trainpipes.columns.bad_values import BadCell
from trainpipes.errors import ConfigError, DataError
from trainpipes.filesystems.output_file import OutputFile
from trainpipes.interfaces.read_columns import Even, Opaque, Ragged, null_cell, of_arrow, row_at
from trainpipes.sources.memmap.manifest import (
    Array,
    Column,
    Header,
    Layout,
    file_endings,
    npy_header,
    offsets_ending,
)

NO_NUMBERS = (
    "holds {}, and a memory map holds bool, integers and floats of up to 64 bits, or bytes: encode text "
    "(.encode(), or tokenize it), and leave out what cannot be"
)


def bad_row(row: int, name: str, what: str) -> DataError:
    return DataError(f"write_memmap(): row {row}: column {name!r} {what}", row=row)


def arrays_of(column: pa.ChunkedArray, name: str, as_ragged: bool, row: int) -> Ragged | Even:
    """A column as arrays; ``row`` is the first row's number."""
    array = one_chunk(column)
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        if array.null_count:
            raise bad_row(row + first_null(array), name, str(null_cell(0, name)))
        values, offsets = apart(array)
        return Ragged(values, np.diff(offsets).astype(np.int64))
    try:
        found = of_arrow(column, name)
    except BadCell as bad:
        raise bad_row(row + (bad.row or 0), name, str(bad)) from bad
    if isinstance(found, Opaque):
        raise bad_row(row, name, NO_NUMBERS.format(array.type))
    if not as_ragged or isinstance(found, Ragged):
        return found
    if found.values.ndim < 2:
        what = "is a single number, and in a ragged column rows are lists or arrays"
        raise bad_row(row, name, what)
    count, length, *rest = found.values.shape
    return Ragged(found.values.reshape(count * length, *rest), np.full(count, length, np.int64))


class NpyFile:
    """Writes one ``.npy`` file, whose header is written anew at the end."""

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


def _lost(values: Array, found: Array) -> Any:
    """Which values another dtype cannot hold; floats are rounded."""
    return np.isinf(found) & np.isfinite(values) if found.dtype.kind == "f" else found != values


class ColumnFile:
    """A column's values, and the offsets of a ragged one."""

    def __init__(
        self, name: str, empty: Ragged | Even, named: Any, part: OutputFile, ending: str
    ) -> None:
        dtype = named or empty.values.dtype.newbyteorder("=").name
        shape, self.ragged = empty.values.shape[1:], isinstance(empty, Ragged)
        self._column = Column(name, dtype, shape, self.ragged)
        self._values = NpyFile(part.beside(ending), dtype, shape)
        self._offsets: NpyFile | None = None
        if self.ragged:
            self._offsets = NpyFile(part.beside(offsets_ending(ending)), "int64", ())
            self._offsets.write(np.zeros(1, np.int64))

    def write(self, given: Ragged | Even, row: int) -> None:
        values, dtype = given.values, np.dtype(self._column.dtype)
        if isinstance(given, Ragged) and self._offsets:
            self._offsets.write(self._values.rows + np.cumsum(given.lengths, dtype=np.int64))
        with np.errstate(invalid="ignore", over="ignore"):  # a float beyond int64, or float32
            found: Array = values.astype(dtype, copy=False)
        if dtype != values.dtype and (bad := _lost(values, found)).any():
            place = np.unravel_index(np.argmax(bad), bad.shape)
            first, name = int(place[0]), self._column.name
            row += row_at(first, given.lengths) if isinstance(given, Ragged) else first
            raise bad_row(
                row, name,
                f"is {dtype}, which cannot hold {values.dtype} {values[place]}: pass dtype={{{name!r}: ...}} "
                "with one that can, or convert the values",
            )  # fmt: skip
        self._values.write(found)

    def close(self) -> Column:
        found = replace(self._column, crc32=self._values.close(), values=self._values.rows)
        return replace(found, offsets_crc32=self._offsets.close()) if self._offsets else found


class PartFile:
    """Writes one part of a memory map: the ``FileWriter`` of ``write_memmap``."""

    def __init__(
        self,
        layout: Layout,
        dtypes: Mapping[str, str] | str | None,
        ragged: Collection[str],
        file: OutputFile,
        schema: pa.Schema,
    ) -> None:
        names, empty = schema.names, pa.Table.from_batches([], schema)
        asked = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(names, dtypes)
        if missing := sorted({*asked, *ragged} - {*names}):
            raise ConfigError(
                f"write_memmap(): there is no column {missing[0]!r}; there are {', '.join(sorted(names))}"
            )
        self.columns: dict[str, str] = {}
        self._file, self._layout, self._ragged, self._rows = file, layout, ragged, 0
        self._columns = {
            name: ColumnFile(
                name, arrays_of(empty[name], name, name in ragged, 0), asked.get(name), file, ending
            )
            for name, ending in zip(names, file_endings(names), strict=True)
        }
        odd = [name for name, column in self._columns.items() if column.ragged]
        if layout == "tuple" and odd:
            raise ConfigError(
                f"write_memmap(): column {odd[0]!r} is ragged, and such columns need names: give rows that "
                "are dicts"
            )

    def write(self, group: pa.Table, first_row: int) -> None:
        for name, column in self._columns.items():
            column.write(arrays_of(group[name], name, name in self._ragged, first_row), first_row)
        self._rows += len(group)

    def close(self) -> None:
        columns = tuple(column.close() for column in self._columns.values())
        self.columns = {column.name: column.type for column in columns}
        self._file.write(Header(self._rows, self._layout, columns).pack())
