"""``read_parquet``: rows of Parquet files, row group by row group."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc

from trainpipes.amount import amount
from trainpipes.errors import ConfigError, MissingFilesError
from trainpipes.order import IntArray
from trainpipes.runtime.kinds import Source
from trainpipes.runtime.source import Place, RowSource
from trainpipes.runtime.stage import Stage
from trainpipes.shown import shown
from trainpipes.sources.files import FileList, ListFiles, checked_options, digests
from trainpipes.sources.index import read_index
from trainpipes.sources.index_file import checked_index
from trainpipes.sources.parquet_reader import Footers, ParquetReader

__all__ = ["ParquetSource", "ReadParquet"]


class ReadParquet(Source):
    """Reads the rows of Parquet files.

    In: files, from ``list_files``. Out: rows with the chosen columns, as Arrow. Cursor: which
    row group, and how many rows of it.

    All footers are read before the first row: about 0.1 ms a local file, one request a remote one,
    16 at a time. Row groups are then decoded as streams, about 1 MiB of rows at a time, so that memory
    does not grow with their size (7 MB for a row group of 1 GB). Of a remote file up to 16 MiB are held:
    small row groups are fetched whole, of a large one the next part of every column at once.

    Columns come in the order given, and with one schema for all files: types that differ from file
    to file are widened where that loses nothing (int32 and int64, null and anything, string and
    large_string). Dictionary columns come as their values. Partition folders (``lang=en/``) are read
    like any others; no columns are made of their names.

    Args:
        columns: names of columns; ``"a.b"`` for field ``b`` of the struct ``a``. None for all, which
            every file must have then.
        storage_options: options for the fsspec file system, in addition to those of ``list_files``.
            They are neither shown nor part of a state.
        errors: what to do about text that is not UTF-8: "strict" raises where it is first decoded,
            "replace" has U+FFFD in its place, as in Python (Arrow then looks at all text: 1 to 30 µs a MB of
            ASCII, 1 to 2 ms of other text).
        index: where to keep what the footers say, so that the next start reads only those of files with
            another size, time of change or etag: a file that ends in ".arrow", or a folder. By default in
            the cache's folder (see ``trainpipes.cache``), for remote files and for 64 local ones or more;
            True: there in any case; False: not at all.

    Raises:
        ConfigError: ``columns`` is empty or names one twice; ``errors`` is something else.
        UnreadableError: names all files that are not Parquet, each with the reason; later, the
            place that cannot be decoded.
        SchemaError: a file lacks a column, or has it in a type that does not fit the first file's.
        DataChangedError: a file is no longer what it was when it was listed.

    >>> import pathlib, tempfile, pyarrow as pa, pyarrow.parquet as pq, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.parquet"
    >>> pq.write_table(pa.table({"x": [1, 2], "y": ["a", "b"]}), path)
    >>> list(tp.list_files(path).read_parquet(columns=["y"]))
    [{'y': 'a'}, {'y': 'b'}]
    """

    role = "reader"
    has_blocks = True
    free = frozenset({"storage_options", "index"})

    columns: Sequence[str] | None = None
    _: KW_ONLY
    storage_options: Mapping[str, Any] | None = None
    index: str | os.PathLike[str] | bool | None = None
    errors: Literal["strict", "replace"] = "strict"

    def check(self) -> None:
        names = [self.columns] if isinstance(self.columns, str) else self.columns
        names = None if names is None else list(names)
        if names is not None and (not names or not all(isinstance(n, str) for n in names)):
            raise ConfigError(
                "read_parquet(columns) takes names of columns, or None for all, got "
                f"{shown(self.columns)}"
            )
        if names is not None and len(set(names)) < len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise ConfigError(f"read_parquet(columns) names {twice!r} twice, got {names}")
        self._set(
            columns=names,
            storage_options=checked_options(self.storage_options),
            index=checked_index(self.index),
        )

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if identity["errors"] == "strict":  # states were saved before there was a choice
            del identity["errors"]
        return identity

    def open(self) -> ParquetSource:
        return self.open_files([])

    def open_files(self, files: Sequence[Stage]) -> ParquetSource:
        """The rows of the files that the stages below list and let through."""
        if not files or not isinstance(files[0], ListFiles):
            raise ConfigError(f"{self} needs the files to read: put it after list_files(...)")
        listed = files[0].files(self.storage_options)
        for stage in files[1:]:
            if hasattr(stage, "predicate"):
                listed = _kept(listed, stage)
        index = checked_index(self.index)
        return ParquetSource(listed, self.columns, str(self), index, self.errors == "replace")


def _kept(files: FileList, stage: Any) -> FileList:
    if isinstance(stage.predicate, pc.Expression):
        raise ConfigError(
            f"{stage} stands on file paths, and an expression is about columns; give a function of "
            "a path, or put the filter after read_parquet()"
        )
    kept = np.flatnonzero([bool(stage.predicate(name)) for name in files.names])
    if not len(kept):
        raise MissingFilesError(
            f"{stage} keeps none of the {len(files):,} files, {files.names[0]} for one; its function "
            "gets the path or URL as text",
            stage=str(stage),
        )
    return files.pick(kept.astype(np.int64))


class ParquetSource(RowSource):
    """Rows of Parquet files; a block is a row group. Can be pickled; holds 40 bytes a row group and
    a few hundred a file.

    Args:
        files: which.
        columns: names of columns; None for all.
        asker: the stage, for messages.
        index: where footers are kept; see ``FooterFile.of``.
        replace: put U+FFFD in place of text that is not UTF-8.

    Attributes:
        files: the files.
        columns: names of columns, or None.
        replace: whether text that is not UTF-8 is replaced.
        index: what the footers say.
        schema: Arrow schema of every table that a reader gives.
        lengths: rows in each row group, int64 ``[row groups]``.
        file_of_block: the file that each row group is in, int64 ``[row groups]``.
        row_bytes: Arrow bytes of an average row of the chosen columns, told from the footers;
            exact for numbers and for text without dictionaries.
        parsed: parsed footers, for the readers.
    """

    def __init__(
        self,
        files: FileList,
        columns: Sequence[str] | None,
        asker: str = "read_parquet()",
        index: str | bool | None = None,
        replace: bool = False,
    ) -> None:
        self.files = files
        self.replace = replace
        self.columns = None if columns is None else list(columns)
        self.index = read_index(files, columns, asker, index)
        self.schema = self.index.schema
        self.lengths = self.index.rows
        self.row_bytes = self.index.row_bytes
        self.block_bytes = self.index.group_bytes.astype(np.float64)
        groups = np.diff(self.index.first_group)
        self.file_of_block: IntArray = np.repeat(np.arange(len(files), dtype=np.int64), groups)
        self.parsed = Footers()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_relative_names"}

    def reader(self) -> ParquetReader:
        return ParquetReader(self)

    def place(self, block: int, row: int) -> Place:
        """File, row group in the file, and row in the file."""
        file = int(self.file_of_block[block])
        first = int(self.index.first_group[file])
        before = int(self.lengths[first:block].sum())
        return Place(self.files.names[file], block - first, before + row)

    def fingerprint(self) -> dict[str, Any]:
        names, sizes = self._relative_names, self.index.sizes.tolist()
        lines = []
        for file, (name, size) in enumerate(zip(names, sizes, strict=True)):
            rows = self.lengths[self.index.groups(file)].tolist()
            lines.append(f"{name}\0{size}\0{rows}")
        return {
            "files": len(lines),
            "rows": int(self.lengths.sum()),
            "bytes": sum(sizes),
            "digests": digests(lines),
        }

    def block_key(self, block: int) -> Any:
        """The file by its name below the common root, size, footer and, where it is known, its time
        of change or etag; and the number of the row group in it."""
        index, file = self.index, int(self.file_of_block[block])
        key = [
            self._relative_names[file],
            int(index.sizes[file]),
            [int(index.footers[file]), int(index.checksums[file])],
            self.files.stamps[file],
            block - int(index.first_group[file]),
        ]
        return [*key, "replace"] if self.replace else key

    @cached_property
    def _relative_names(self) -> list[str]:
        return self.files.relative_names()

    def describe(self) -> list[tuple[str, str]]:
        rows = self.lengths
        lines = [("files", f"{len(self.files):,}, {amount(self.index.sizes.sum())}")]
        groups = f"{len(rows):,}"
        if len(rows):
            least, middle, most = rows.min(), int(np.median(rows)), rows.max()
            groups += f" of {least:,} / {middle:,} / {most:,} rows (least / median / most)"
        lines.append(("row groups", groups))
        lines.append(("rows", f"{rows.sum():,}"))
        if self.row_bytes is not None:
            whole = amount(self.row_bytes * float(rows.sum()))
            lines.append(("in memory", f"{amount(self.row_bytes)} a row, {whole} in all"))
        return lines
