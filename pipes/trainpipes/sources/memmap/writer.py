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
from trainpipes.sources.memmap.column_writer import ColumnWriter
from trainpipes.sources.memmap.given_rows import Part
from trainpipes.sources.memmap.manifest import MANIFEST, Manifest, pack, read_manifest
from trainpipes.stages.pad_columns import Ragged
from trainpipes.storage.writers.output_file import writing


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
