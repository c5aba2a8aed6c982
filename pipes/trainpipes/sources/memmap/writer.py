"""Writes the folder of a memory map, whole or not at all.

Each column goes straight to its file, in a folder beside the place, which is renamed when it is whole. Where
one is there already, which no rename can replace, the new files move in under new names, then its manifest is
replaced, and last its old files go: a reader finds one or the other, and one that has mapped the old files
keeps them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainpipes._internal.checks import flag, local_path
from trainpipes.errors import ConfigError, DataError, UnreadableError
from trainpipes.sources.memmap.given_rows import Part, bad_row
from trainpipes.sources.memmap.manifest import (
    MANIFEST,
    Array,
    Column,
    Manifest,
    pack,
    read_manifest,
)
from trainpipes.sources.memmap.mapped_rows import crc32_of
from trainpipes.stages.pad_columns import Ragged
from trainpipes.storage.output_file import writing


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


def write_parts(
    path: str | os.PathLike[str],
    parts: Iterable[Part],
    rows: int | None = None,
    dtypes: Mapping[str, np.dtype[Any]] | np.dtype[Any] | None = None,
    ragged: Collection[str] = (),
    overwrite: bool = False,
) -> None:
    """Write blocks of rows to the folder ``path``; otherwise as ``write_memmap``."""
    target = check_target(path, overwrite)
    to_disk = partial(writing, target, "write_memmap")
    token = secrets.token_hex(6)
    beside = target.with_name(f".{target.name}.{token}.part")
    try:
        with to_disk():
            beside.mkdir()
        first: Part | None = None
        columns: list[ColumnWriter] = []
        row = 0
        for part in parts:
            if first is None:
                with to_disk():
                    first, columns = part, _columns(beside, part, dtypes, ragged)
            if (part.layout, part.names) != (first.layout, first.names):
                raise DataError(
                    f"write_memmap(): row {row} has columns {', '.join(part.names)}, and those before it "
                    f"{', '.join(first.names)}: all rows have the same columns",
                    row=row,
                )
            with to_disk():
                for column, given in zip(columns, part.columns, strict=True):
                    column.write(given, row)
            row += len(part)
            if rows is not None and row > rows:
                raise DataError(
                    f"write_memmap(length={rows:,}): there are more rows than that; leave length out, or end "
                    "the rows there"
                )
        if first is None:
            raise DataError(
                "write_memmap(): there are no rows to tell the columns from: check what filters them, or "
                "give arrays or a table, which have columns without rows"
            )
        if rows is not None and row != rows:
            raise DataError(f"write_memmap(length={rows:,}): the rows ended after {row:,}")
        with to_disk():
            manifest = Manifest(row, first.layout, tuple(column.finish() for column in columns))
            _put(beside, target, manifest, overwrite, token)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def check_target(path: str | os.PathLike[str], overwrite: bool) -> Path:
    """Where a memory map goes.

    Raises:
        ConfigError: something is there that may not be replaced, or no folder to put it in.
    """
    target = Path(os.path.realpath(local_path(path, "write_memmap(path)")))
    _there(target, flag(overwrite, "write_memmap(overwrite)"))
    if not target.parent.is_dir():
        raise ConfigError(
            f"write_memmap(path): there is no folder {target.parent}: make it first",
            path=str(target),
        )
    return target


def _columns(
    folder: Path,
    part: Part,
    dtypes: Mapping[str, np.dtype[Any]] | np.dtype[Any] | None,
    ragged: Collection[str],
) -> list[ColumnWriter]:
    """The columns of which this is the first part."""
    names = part.names
    asked = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(names, dtypes)
    if missing := sorted({*asked, *ragged} - {*names}):
        raise ConfigError(
            f"write_memmap(): there is no column {missing[0]!r}; there are {', '.join(sorted(names))}"
        )
    if len({*names}) < len(names):
        raise ConfigError(f"write_memmap(): two columns have one name: {', '.join(names)}")
    many = [n in ragged or isinstance(c, Ragged) for n, c in zip(names, part.columns, strict=True)]
    if part.layout == "tuple" and any(many):
        raise ConfigError(
            f"write_memmap(): column {names[many.index(True)]!r} is ragged, and such columns need names: "
            "give rows that are dicts, or pass names=[...]"
        )
    columns = zip(_stems(names), names, many, map(asked.get, names), strict=True)
    return [ColumnWriter(folder, *column) for column in columns]


def _stems(names: Sequence[str]) -> list[str]:
    """What the names of files begin with, also where large and small letters are the same."""
    found: list[str] = []
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:80] or "_"
        while stem.lower() in map(str.lower, found):
            stem += "_"
        found.append(stem)
    return found


def _there(target: Path, overwrite: bool) -> Manifest | None:
    """The memory map that is to be replaced; None if there is nothing."""
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return None
    try:
        found = read_manifest(str(target))
    except UnreadableError as error:
        raise ConfigError(
            f"write_memmap(path): {target} is there, and is not a memory map that could be replaced: give "
            "another path, or remove it",
            path=str(target),
        ) from error
    if not overwrite:
        raise ConfigError(
            f"{target} exists already: pass overwrite=True, or give another path",
            path=str(target),
        )
    return found


def _put(beside: Path, target: Path, manifest: Manifest, overwrite: bool, token: str) -> None:
    """Bring a folder that is whole to its place."""
    with _locked(target.parent) as parent:
        old = _there(target, overwrite)
        if old is None:
            _write_manifest(beside, manifest)
            os.rename(beside, target)
            os.fsync(parent)
            return
        columns = (replace(column, file=f"{token}-{column.file}") for column in manifest.columns)
        new = replace(manifest, columns=tuple(columns))
        for before, after in zip(manifest.files, new.files, strict=True):
            os.rename(beside / before, target / after)
        _write_manifest(beside, new)
        with _locked(target) as folder:
            os.fsync(folder)
            os.replace(beside / MANIFEST, target / MANIFEST)
            os.fsync(folder)
        for name in old.files:
            (target / name).unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """A handle of a folder, which one writer has at a time. Where the file system knows no locks, files may
    be left over of two that replace one memory map at once."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    with open(folder / MANIFEST, "wb") as file:
        file.write(pack(manifest))
        file.flush()
        os.fsync(file.fileno())
    with _locked(folder) as handle:
        os.fsync(handle)
