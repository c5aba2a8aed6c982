from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import require, several
from trainpipes.errors import ConfigError, shown
from trainpipes.interfaces.options import identify, show
from trainpipes.interfaces.stage import Stage
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_source import FileSource, scanned
from trainpipes.sources.files.formats import BadFileError, Columns, Format, Layout

#: More rows than a file has.
MOST_ROWS = 1 << 48


class FunctionFormat(Format):
    """A format of the functions that ``read_files`` takes."""

    name = "files in your own format"

    def __init__(self, fn: Callable[..., Any], count: Callable[[BinaryIO], Any] | None) -> None:
        self._fn, self._count = fn, count
        self.decoder = show(fn)

    def scan(self, file: FileBytes) -> Layout:
        with closing(file.stream()) as opened:
            if self._count is None:
                counted: Any = sum(map(len, self._batches(opened)))
            else:
                counted = self._count(opened)
        blocks = isinstance(counted, np.ndarray) or several(counted)
        counts = list(counted) if blocks else [counted]
        kinds = {type(rows) for rows in counts}
        whole = all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds)
        if not whole or not all(0 <= rows < MOST_ROWS for rows in counts):
            raise BadFileError(
                f"{show(self._count)} returns a number of rows, or a list of them, got {shown(counted)}"
            )
        rows, nowhere = np.array(counts, dtype=np.int64), np.zeros(len(counts), dtype=np.int64)
        return Layout(rows, nowhere, nowhere, pa.schema([]), b"in blocks" if blocks else b"")

    def decode(
        self, data: FileBytes, layout: Layout, block: int, columns: Columns
    ) -> Iterator[pa.RecordBatch]:
        with closing(data.stream()) as opened:
            yield from self._batches(opened, *([block] if layout.extra else []))

    def _batches(self, opened: BinaryIO, *block: int) -> Iterator[pa.RecordBatch]:
        decoded, fn = self._fn(opened, *block), self.decoder
        several = not isinstance(decoded, pa.Table | pa.RecordBatch)
        if several and not isinstance(decoded, Iterator | Sequence):
            raise BadFileError(
                f"{fn} returns a pyarrow.Table or an iterator of them, got {shown(decoded)}"
            )
        for table in decoded if several else [decoded]:
            if not isinstance(table, pa.Table | pa.RecordBatch):
                raise BadFileError(f"{fn} yields pyarrow.Tables, got {shown(table)}")
            yield from [table] if isinstance(table, pa.RecordBatch) else table.to_batches()


class ReadFiles(FileReader, has_blocks=True, versioned="fn"):
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

    free = frozenset({"count"})

    fn: Callable[..., Any] | Format
    count: Callable[[BinaryIO], Any] | None = None
    _: KW_ONLY
    columns: Sequence[str] | None = None
    version: str | None = None
    schema: pa.Schema | None = None
    storage_options: Mapping[str, Any] | None = None
    index: str | os.PathLike[str] | bool | None = None

    def _traits(self) -> dict[str, Any]:
        return {"random_access": isinstance(self.fn, Format) and self.fn.random_access}

    def check(self) -> None:
        super().check()
        good, rule = callable(self.fn) or isinstance(self.fn, Format), "a function of an open file"
        require(good, "read_files(fn)", f"{rule}, or a Format", self.fn)
        require(self.count is None or callable(self.count), "read_files(count)", rule, self.count)
        if isinstance(self.fn, Format) and self.count is not None:
            raise ConfigError(
                "read_files(count) goes with a function: a Format counts rows by scan()"
            )

    def _open_on(self, files: Sequence[Stage]) -> FileSource:
        parser, index = self.fn, self.options["index"]
        known = identify(self.version if self.version is not None else parser)
        more: dict[str, Any] = {"index": index}
        if isinstance(parser, Format):
            listed, format = self.listed(files, parser.suffixes), parser
        else:
            listed, format = self.listed(files, ("",)), FunctionFormat(parser, self.count)
            job = f"counting rows by {show(self.count or parser)}"
            # By functions, in one thread at a time.
            more = {"index": index or False, "job": job, "most": 1}
        return scanned(
            listed, format, str(self), self.name,
            columns=self.columns, schema=self.schema, known=known, **more,
        )  # fmt: skip
