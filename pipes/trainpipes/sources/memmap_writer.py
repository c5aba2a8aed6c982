"""Writes the file of a memory map: blocks in, one file out, whole or not at all.

The file is written beside its place and renamed. The widest column goes straight into it; what
belongs behind that waits in unnamed temporary files, which go with the process that made them. So
rows need not be counted beforehand, and memory stays at one block.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import zlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainpipes.errors import ConfigError, DataError
from trainpipes.sources.memmap_cast import cast
from trainpipes.sources.memmap_format import (
    Array,
    Column,
    Header,
    aligned,
    as_bytes,
    header_size,
    pack,
)
from trainpipes.sources.memmap_rows import Part, Ragged

__all__ = ["write_parts"]

COPY_BYTES = 8 << 20


def write_parts(
    path: str,
    parts: Iterable[Part],
    *,
    rows: int | None,
    dtypes: Mapping[str, np.dtype[Any]] | np.dtype[Any] | None,
    ragged: Collection[str],
    overwrite: bool,
) -> None:
    """Write blocks to ``path``.

    Args:
        path: the file.
        parts: the blocks, all with the same columns.
        rows: how many rows there must be; None for as many as come.
        dtypes: for columns that shall have another dtype than they come with.
        ragged: columns that are ragged although the first rows may be equally long.
        overwrite: whether a file may be there.

    Raises:
        ConfigError: the file is there; a dtype is for a column that is not.
        DataError: a row does not fit those before it, or the number of rows is another.
    """
    target = Path(path)
    _refuse_existing(target, overwrite)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(6)}.part")
    descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with closing(_Writing(file, target, dtypes, frozenset(ragged))) as writing:
                for part in parts:
                    writing.append(part)
                    if rows is not None and writing.rows > rows:
                        raise DataError(
                            f"write_memmap(length={rows:,}): there are more rows than that; leave length "
                            "out, or end the rows there"
                        )
                if rows is not None and writing.rows != rows:
                    raise DataError(
                        f"write_memmap(length={rows:,}): the rows ended after {writing.rows:,}"
                    )
                writing.finish()
            file.flush()
            os.fsync(file.fileno())
        _refuse_existing(target, overwrite)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _refuse_existing(target: Path, overwrite: bool) -> None:
    if target.is_dir():
        raise ConfigError(f"write_memmap(path) is a file, and {target} is a folder")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} is there already: pass overwrite=True, or give another path")
    if not target.parent.is_dir():
        raise ConfigError(f"write_memmap(path): there is no folder {target.parent}")


@dataclass
class _Sink:
    """Bytes on their way to one place of the file."""

    file: BinaryIO
    bytes: int = 0
    crc32: int = 0

    def write(self, array: Array) -> None:
        data = as_bytes(np.ascontiguousarray(array))
        self.file.write(data)
        self.bytes += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)


class _Writing:
    """A file that is being written.

    Args:
        file: open, empty.
        target: where it will be, for messages and for temporary files.
        dtypes, ragged: as in ``write_parts``.
    """

    def __init__(
        self,
        file: BinaryIO,
        target: Path,
        dtypes: Mapping[str, np.dtype[Any]] | np.dtype[Any] | None,
        ragged: frozenset[str],
    ) -> None:
        self._file = file
        self._target = target
        self._dtypes = dtypes
        self._ragged = ragged
        self._first: Part | None = None
        self._columns: list[Column] = []
        self._sinks: list[_Sink] = []
        self._offsets: dict[int, _Sink] = {}
        self._ends: dict[int, int] = {}
        self._held: list[Part] = []  # until every ragged column has had a value
        self.rows = 0

    def append(self, part: Part) -> None:
        if self._first is None:
            self._first = part
        elif (part.layout, part.names) != (self._first.layout, self._first.names):
            raise DataError(
                f"write_memmap(): row {self.rows} has columns {', '.join(part.names)}, and those before "
                f"it {', '.join(self._first.names)}: all rows have the same columns",
                row=self.rows,
            )
        first_row = self.rows
        self.rows += len(part)
        if self._columns:
            self._write(part, first_row)
            return
        self._held.append(part)
        if all(any(_values(p, n).size for p in self._held) for n in range(len(part.names))):
            self._begin()

    def _begin(self) -> None:
        """Settle the columns, by the first rows that have values in all of them."""
        assert self._first is not None
        known = set(self._first.names)
        asked = set(self._dtypes) if isinstance(self._dtypes, Mapping) else set()
        if missing := sorted((asked | self._ragged) - known):
            raise ConfigError(
                f"write_memmap(): there is no column {missing[0]!r}; there are {', '.join(sorted(known))}"
            )
        for number, name in enumerate(self._first.names):
            some = [p.columns[number] for p in self._held]
            values = [c.values if isinstance(c, Ragged) else c for c in some]
            model = next((v for v in values if v.size), values[0])
            ragged = name in self._ragged or any(isinstance(c, Ragged) for c in some)
            if ragged and model.ndim < (1 if isinstance(some[0], Ragged) else 2):
                raise ConfigError(f"write_memmap(ragged): rows of {name!r} are single numbers")
            shape = model.shape[1:]
            if ragged and not any(isinstance(c, Ragged) for c in some):
                shape = shape[1:]
            dtype = self._asked(name) or model.dtype
            self._columns.append(Column(name, _name(dtype, name), tuple(shape), ragged))
        listed = next((c.name for c in self._columns if c.ragged), None)
        if listed is not None and self._first.layout == "tuple":
            raise ConfigError(
                f"write_memmap(): column {listed!r} is ragged, and such columns need names: give rows that "
                "are dicts, or pass names=[...]"
            )
        start = header_size(tuple(self._columns), self._first.layout)
        self._file.write(bytes(start))
        wide = [sum(_bytes(p, n) for p in self._held) for n in range(len(self._columns))]
        widest = int(np.argmax(wide))
        for number, column in enumerate(self._columns):
            self._sinks.append(_Sink(self._file if number == widest else self._spool()))
            if column.ragged:
                self._offsets[number] = _Sink(self._spool())
                self._offsets[number].write(np.zeros(1, dtype="<i8"))
                self._ends[number] = 0
        held, self._held, row = self._held, [], 0
        self._start = start
        for part in held:
            self._write(part, row)
            row += len(part)

    def _asked(self, name: str) -> np.dtype[Any] | None:
        return self._dtypes.get(name) if isinstance(self._dtypes, Mapping) else self._dtypes

    def _spool(self) -> BinaryIO:
        return tempfile.TemporaryFile(dir=self._target.parent)

    def _write(self, part: Part, first_row: int) -> None:
        for number, (column, given) in enumerate(zip(self._columns, part.columns, strict=True)):
            if column.ragged:
                rows = self._as_ragged(column, given, first_row)
                shape = rows.values.shape[1:]
            elif isinstance(given, Ragged):
                self._refuse_ragged(column, given, first_row)
            else:
                shape, rows = given.shape[1:], Ragged(given, np.ones(len(given), dtype=np.int64))
            if shape != column.shape and rows.values.size:
                raise DataError(
                    f"write_memmap(): row {first_row}: column {column.name!r} has shape "
                    f"{list(given.shape[1:] if not isinstance(given, Ragged) else ['L', *shape])}, and "
                    f"the rows before it make it {column}",
                    row=first_row,
                )
            values = cast(rows, column, first_row, self._asked(column.name) is not None)
            self._sinks[number].write(values)
            if column.ragged:
                ends = self._ends[number] + np.cumsum(rows.lengths, dtype="<i8")
                self._offsets[number].write(ends)
                self._ends[number] = int(ends[-1]) if len(ends) else self._ends[number]

    def _as_ragged(self, column: Column, given: Array | Ragged, first_row: int) -> Ragged:
        if isinstance(given, Ragged):
            return given
        if given.ndim < 2:
            raise DataError(
                f"write_memmap(): row {first_row}: column {column.name!r} is a single number, and the "
                f"rows before it make it {column}",
                row=first_row,
            )
        lengths = np.full(len(given), given.shape[1], dtype=np.int64)
        return Ragged(given.reshape(-1, *given.shape[2:]), lengths)

    def _refuse_ragged(self, column: Column, given: Ragged, first_row: int) -> Any:
        size = column.shape[0] if column.shape else 1
        place = int(np.argmax(given.lengths != size))
        raise DataError(
            f"write_memmap(): row {first_row + place}: column {column.name!r} has {given.lengths[place]} "
            f"values, and all rows before it {size}: if lengths may differ, pass "
            f"ragged=[{column.name!r}]",
            row=first_row + place,
        )

    def finish(self) -> None:
        """What waited is put behind, and the header before it."""
        if not self._columns:
            if self._first is None:
                raise DataError(
                    "write_memmap(): there are no rows, and so no columns; give arrays of 0 rows for an "
                    "empty file"
                )
            self._begin()
        assert self._first is not None
        columns, end = list(self._columns), self._start
        waiting: list[tuple[int, str, _Sink]] = []
        for number, sink in enumerate(self._sinks):
            if sink.file is self._file:
                columns[number] = self._placed(number, end)
                end += sink.bytes
            else:
                waiting.append((number, "", sink))
        waiting += [(number, "offsets", sink) for number, sink in self._offsets.items()]
        for number, what, sink in waiting:
            self._file.write(bytes(aligned(end) - end))
            end = aligned(end)
            if what:
                columns[number] = replace(columns[number], offsets_at=end, offsets_crc32=sink.crc32)
            else:
                columns[number] = self._placed(number, end)
            sink.file.seek(0)
            while data := sink.file.read(COPY_BYTES):
                self._file.write(data)
            end += sink.bytes
        header = Header(self.rows, self._first.layout, tuple(columns), end)
        self._file.seek(0)
        self._file.write(pack(header, self._start))

    def close(self) -> None:
        """Let go of what waits."""
        for sink in [*self._sinks, *self._offsets.values()]:
            if sink.file is not self._file:
                sink.file.close()

    def _placed(self, number: int, offset: int) -> Column:
        column, sink = self._columns[number], self._sinks[number]
        values = self._ends[number] if column.ragged else self.rows
        return replace(column, offset=offset, values=values, crc32=sink.crc32)


def _values(part: Part, number: int) -> Array:
    """A column's values, for whether there are any; those of even columns tell all there is to know."""
    column = part.columns[number]
    return column.values if isinstance(column, Ragged) else np.ones(1)


def _bytes(part: Part, number: int) -> int:
    column = part.columns[number]
    return column.values.nbytes if isinstance(column, Ragged) else column.nbytes


def _name(dtype: np.dtype[Any], column: str) -> str:
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ConfigError(
            f"write_memmap(dtype): {column!r} is {dtype}, and a memory map holds bool, integers and floats "
            "of up to 64 bits"
        )
    return dtype.newbyteorder("=").name
