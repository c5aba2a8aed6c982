from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, BinaryIO

import pyarrow as pa

from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError
from trainpipes.kinds.options import identify, show
from trainpipes.kinds.stage import Stage
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_source import FileSource, scanned
from trainpipes.sources.files.format import Format
from trainpipes.sources.own_format.functions import FunctionFormat


class ReadFiles(FileReader):
    """Reads files in a format of your own, by a ``Format`` (see docs/extend.md) or a simpler function.

    A function gets the file, open in binary mode, with its path or URL as ``file.name``; it returns a
    ``pyarrow.Table``, or yields several. Without ``count``, ``fn`` counts the rows of each file once.

    Args:
        fn: a ``Format``; or ``fn(file)`` or ``fn(file, block)``.
        count: ``count(file)`` returns the number of rows; or a list with the rows of each block, to call
            ``fn(file, block)`` for each.
        columns: names of columns, as in ``read_parquet``; None for all.
        version: names ``fn`` in states, instead of its module and name, or a format's name and key. Change it
            when rows change.
        schema: columns and types, to which values are cast where that loses nothing; those of the first rows
            if left out.
        storage_options: more options of fsspec; never shown or saved.
        index: where to keep counts or blocks; see ``read_parquet``. If left out, nowhere for a function.

    Raises:
        UnreadableError: names all files that could not be counted, or the file and row where ``fn`` failed.
        SchemaError: rows have other columns than the first ones.
        DataError: ``fn`` gives more or fewer rows than were counted.

    >>> import json, pathlib, tempfile, pyarrow as pa, trainpipes as tp
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for n in range(2):
    ...     _ = (folder / f"{n}.numbers").write_text(f"{n} {n + 1} {n + 2}")
    >>> def numbers(file):
    ...     return pa.table({"x": [int(text) for text in file.read().split()]})
    >>> [row["x"] for row in tp.list_files(folder, suffix=".numbers").read_files(numbers)]
    [0, 1, 2, 1, 2, 3]
    """

    has_blocks = True
    versioned = "fn"
    free = frozenset({"count"})

    fn: Callable[..., Any] | Format
    count: Callable[[BinaryIO], Any] | None = None
    _: KW_ONLY
    columns: Sequence[str] | None = None
    version: str | None = None
    schema: pa.Schema | None = None
    storage_options: Mapping[str, Any] | None = None
    index: str | os.PathLike[str] | bool | None = None

    @property
    def random_access(self) -> bool:  # type: ignore[override]
        return isinstance(self.fn, Format) and self.fn.random_access

    def check(self) -> None:
        super().check()
        for name, value in (("fn", self.fn), ("count", self.count)):
            good = callable(value) or (name == "fn" and isinstance(value, Format))
            if not good and (name == "fn" or value is not None):
                more = ", or a Format" if name == "fn" else ""
                raise ConfigError(
                    f"read_files({name}) is a function of an open file{more}, got {shown(value)}"
                )
        if isinstance(self.fn, Format) and self.count is not None:
            raise ConfigError(
                "read_files(count) goes with a function: a Format counts rows by scan()"
            )

    def open_files(self, files: Sequence[Stage]) -> FileSource:
        given, index = self.fn, self.options["index"]
        known = self.version if self.version is not None else identify(given)
        options: dict[str, Any] = {"columns": self.columns, "schema": self.schema, "known": known}
        if isinstance(given, Format):
            listed = self.listed(files, given.suffixes)
            return scanned(listed, given, str(self), self.name, index=index, **options)
        listed = self.listed(files, ("",))
        job = (
            f"counting rows by {show(self.count or given)}"  # by functions, in one thread at a time
        )
        found = FunctionFormat(given, self.count)
        options |= {"index": index or False, "job": job, "most": 1}
        return scanned(listed, found, str(self), self.name, **options)
