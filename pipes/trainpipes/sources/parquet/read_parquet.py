"""``read_parquet``: rows of Parquet files, row group by row group."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.kinds.source import Place
from trainpipes.kinds.stage import Stage
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_rows import FileBlocks
from trainpipes.sources.files.list_files import SUFFIXES, FileList
from trainpipes.sources.parquet.filter import (
    FileBounds,
    bounds_of,
    check_fits,
    checked_filter,
    facts_of,
    may_hold,
)
from trainpipes.sources.parquet.index import read_index
from trainpipes.sources.parquet.reader import Footers, ParquetReader
from trainpipes.sources.parquet.wanted import ChosenColumns, wanted_files
from trainpipes.stages.filter import Filter


class ReadParquet(FileReader):
    """Reads the rows of Parquet files.

    In: files, from ``list_files``. Out: rows with the chosen columns, as Arrow. Cursor: which
    row group, and how many rows of it.

    All footers are read before the first row: about 0.1 ms for a local file, one request for a remote file,
    16 at a time. Row groups are then decoded as streams, about 1 MiB of rows at a time, so that memory
    does not grow with their size (7 MB for a row group of 1 GB). Up to 16 MiB of a remote file are held:
    a small row group is fetched whole, a large one part by part, with all columns of a part at once.

    Columns come in the order given, and with one schema for all files: types that differ from file
    to file are widened where that loses nothing (int32 and int64, null and anything, string and
    large_string). Dictionary columns come as their values.

    With ``filter``, files and row groups that cannot hold a matching row are not read, by the names of their
    folders and the statistics in their footers; the rows of all others are filtered as by ``.filter(...)``.
    As with that stage, the number of rows in an epoch is not known in advance. All footers are then read at
    each start.

    Args:
        columns: names of columns; ``"a.b"`` for field ``b`` of the struct ``a``, and
            ``"a.list.element.b"`` for field ``b`` of the structs in the list ``a``, as in pyarrow. None for
            all; then all files must have the same columns.
        filter: a ``pyarrow.compute`` expression over columns, which need not be among ``columns``, or a list
            of conditions such as ``[["x", ">", 20]]``; null counts as False. See ``filter``.
        partitioning: "hive" makes columns from the names of folders (``year=2024/lang=en/``), as Hive writes
            them: int64 if all values are integers, else text; all files must have the same such columns.
            If left out, only columns that ``columns`` or ``filter`` names, and that no file has, are made.
        storage_options: more options for the fsspec file system, besides those of ``list_files``. They are
            neither shown nor part of a state.
        errors: "strict" raises where text that is not UTF-8 is first decoded; "replace" puts U+FFFD in its
            place, as Python does (all text is then checked: 1 to 30 µs a MB of ASCII, 1 to 2 ms a MB of other
            text).
        index: where to keep what the footers say, so that the next start reads only the footers of files
            whose size, time of change or etag has changed: a file that ends in ".arrow", or a folder. True:
            in the cache folder (see ``tp.cache``). False: nowhere. If left out: in the cache folder,
            if the files are remote, or 64 or more.

    Raises:
        ConfigError: an option is invalid.
        UnreadableError: names all files that are not Parquet, each with the reason; later, the
            place that cannot be decoded.
        SchemaError: a file lacks a column, or has it in a type that does not fit the first file's; the
            filter does not fit the columns; folders' names do not make the same columns for all files.
        DataChangedError: a file has changed since it was listed.

    >>> import pathlib, tempfile, pyarrow as pa, pyarrow.parquet as pq, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.parquet"
    >>> pq.write_table(pa.table({"x": [1, 2], "y": ["a", "b"]}), path)
    >>> list(tp.list_files(path).read_parquet(columns=["y"]))
    [{'y': 'a'}, {'y': 'b'}]
    """

    has_blocks = True

    columns: Sequence[str] | None = None
    _: KW_ONLY
    storage_options: Mapping[str, Any] | None = None
    index: str | os.PathLike[str] | bool | None = None
    errors: Literal["strict", "replace"] = "strict"
    filter: pc.Expression | Sequence[Any] | None = None
    partitioning: Literal["hive"] | None = None

    def check(self) -> None:
        super().check()
        checked_filter(self.filter, self.name)

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if identity["errors"] == "strict":  # states were saved before there was a choice
            del identity["errors"]
        if self.filter is not None:
            identity["filter"] = str(checked_filter(self.filter, self.name))
        return identity

    def above(self) -> Sequence[Stage]:
        if self.filter is None:
            return ()
        exact = Filter(self.filter)
        return (exact,) if self.columns is None else (exact, ChosenColumns(self.columns))

    def open_files(self, files: Sequence[Stage]) -> ParquetSource:
        """The rows of the files that the stages below list and let through."""
        return ParquetSource(
            self.listed(files, SUFFIXES), self.columns, str(self), self.options["index"],
            self.errors == "replace", filter=checked_filter(self.filter, self.name),
            hive=self.partitioning == "hive",
        )  # fmt: skip


class ParquetSource(FileBlocks):
    """Rows of Parquet files; a block is a row group. Can be pickled; holds 40 bytes a row group and
    a few hundred a file.

    Args:
        files: which.
        columns: names of columns; None for all.
        asker: the stage, for messages.
        index: where footers are kept; see ``IndexStore``.
        replace: put U+FFFD in place of text that is not UTF-8.
        filter: the condition that a stage above applies; row groups that cannot hold a matching row are not
            read.
        hive: whether all names of folders make columns.

    Attributes:
        files: the files, without those that cannot hold a matching row by the names of their folders.
        columns: names of columns, also those that only the filter needs; None for all.
        folders: columns that names of folders make.
        replace: whether text that is not UTF-8 is replaced.
        index: what the footers say.
        schema: Arrow schema of every table that a reader gives.
        lengths: rows in each row group, int64 ``[row groups]``.
        file_of_block: the file that each row group is in, int64 ``[row groups]``.
        row_bytes: Arrow bytes of an average row of the chosen columns, told from the footers;
            exact for numbers and for text without dictionaries.
        parsed: parsed footers, for the readers.
    """

    blocks_called = "row groups"

    def __init__(
        self,
        files: FileList,
        columns: Sequence[str] | None,
        asker: str = "read_parquet()",
        index: str | bool | None = None,
        replace: bool = False,
        *,
        filter: pc.Expression | None = None,
        hive: bool = False,
    ) -> None:
        wanted = wanted_files(files, columns, filter, hive, asker)
        self.files = files = wanted.files
        self.replace = replace
        self.columns = wanted.columns
        bounds: dict[int, FileBounds] = {}

        def look(file: int, metadata: Any) -> None:
            assert filter is not None
            bounds[file] = bounds_of(metadata, int(files.sizes[file]), filter)

        self.index = read_index(
            files, self.columns, asker, index, folders=wanted.folders.fields, both=hive,
            look=look if wanted.by_footers else None,
        )  # fmt: skip
        self.schema: pa.Schema = self.index.schema
        self.folders = wanted.folders.only(self.schema.names).only(self.index.folders)
        self.sizes, self.lengths = self.index.sizes, self.index.rows
        self.row_bytes = self.index.row_bytes
        self.block_bytes = self.index.group_bytes.astype(np.float64)
        groups = np.diff(self.index.first_group)
        self.file_of_block = np.repeat(np.arange(len(files), dtype=np.int64), groups)
        self.parsed = Footers()
        self._filter, self._filtered = str(filter), ""
        if filter is not None:
            check_fits(filter, self.schema, asker)
            facts = [facts_of(self.folders.values(file)) for file in range(len(files))]
            known = [facts[file] for file in self.file_of_block.tolist()]
            own = [group for file in sorted(bounds) for group in bounds[file]]
            self.unread = np.ones(len(known), dtype=np.bool_)
            self.unread[may_hold(filter, self.schema, known, own or None, text=not replace)] = False
            read = int((~self.unread).sum())
            self._filtered = f"{read:,} of {len(known):,} row groups may have rows that match"
            if wanted.left_out:
                self._filtered += f"; {wanted.left_out:,} more files are left out by their folders"

    def reader(self) -> ParquetReader:
        return ParquetReader(self)

    def place(self, block: int, row: int) -> Place:
        """File, row group in the file, and row in the file."""
        file = int(self.file_of_block[block])
        first = int(self.index.first_group[file])
        before = int(self.lengths[first:block].sum())
        return Place(self.files.names[file], block - first, before + row)

    def fingerprint(self) -> dict[str, Any]:
        names, sizes = self._relative_names, self.sizes.tolist()
        lines = []
        for file, (name, size) in enumerate(zip(names, sizes, strict=True)):
            groups = self.index.groups(file)
            rows = self.lengths[groups].tolist()
            line = f"{name}\0{size}\0{rows}{self.folders.text(file)}"
            if self.unread is not None and self.unread[groups].any():
                line += f"\0unread {np.flatnonzero(self.unread[groups]).tolist()}"
            lines.append(line)
        found: dict[str, Any] = {}
        if self.unread is not None:
            found = {"filter": self._filter, "unread": int(self.lengths[self.unread].sum())}
        return {**found, **self.fingerprint_of(lines)}

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
        key += [self.folders.text(file)] if self.folders else []
        return [*key, "replace"] if self.replace else key

    def describe(self) -> list[tuple[str, str]]:
        lines = super().describe()
        return [*lines, ("filter", self._filtered)] if self._filtered else lines
