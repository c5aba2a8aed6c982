"""``read_files``: rows of files in a format of the user's own.

The stage and its source, made by the thread that plans. The user's functions are called by one thread at a
time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from trainpipes._internal.text import shown
from trainpipes.columns.arrays import apart, one_chunk, python_to_arrow, to_arrow, to_numpy
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError
from trainpipes.kinds.options import identify, show
from trainpipes.kinds.stage import Stage
from trainpipes.sources.files.each_file import BadFileError, each_file
from trainpipes.sources.files.file_bytes import open_bytes
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_rows import FileRows
from trainpipes.sources.files.index_file import IndexFile, IndexKind, settled
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.own_format.reader import OwnReader, tables_of
from trainpipes.sources.remote.retry import Requests

#: What messages call the files.
OWN = "files in your own format"
#: More rows than a file has.
MOST_ROWS = 1 << 48

COLUMNS = pa.schema(
    [
        ("path", pa.string()),
        ("stamp", pa.string()),
        ("size", pa.int64()),
        ("rows", pa.list_(pa.int64())),
        ("in_blocks", pa.bool_()),
    ]
)


class ReadFiles(FileReader):
    """Reads files in a format of your own, with a function that makes Arrow tables from an open file.

    In: files, from ``list_files``; a folder stands for all of its files, or those with its ``suffix``. Out:
    the rows of the tables, as Arrow. Cursor: which block, and how many rows of it: a resume reads a block
    from its start up to the row. Blocks, shards, shuffles and resumes are as those of ``read_parquet``.

    ``fn`` is given the file, open in binary mode, with ``file.name`` as its path or URL. It returns a
    ``pyarrow.Table``; or it yields several, so that only one of them is in memory. ``count`` is given the
    same file and returns its number of rows; or a list with the rows of each block, and ``fn(file, block)``
    is then called for each block, so that shards and resumes go straight to theirs. Without ``count``,
    ``fn`` is called once for each file to count its rows; ``index`` keeps the numbers for later starts.

    Args:
        fn: ``fn(file)`` or ``fn(file, block)``, to a table or an iterator of tables.
        count: ``count(file)``, to a number of rows, or to one for each block.
        version: names the functions in states, instead of the module and name of ``fn``. Change it when they
            give other rows.
        schema: the columns and types of all tables; those of the first rows if left out. Values are cast to
            these types where that loses nothing.
        storage_options: more options for the fsspec file system, besides those of ``list_files``. They are
            neither shown nor part of a state.
        index: where to keep the numbers of rows: a file that ends in ".arrow", or a folder. True: in the
            cache folder (see ``tp.cache``). False, or left out: nowhere.

    Raises:
        UnreadableError: names all files that could not be counted, each with the reason; later, the file
            and row where ``fn`` failed.
        SchemaError: a table has other columns than the first.
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

    fn: Callable[..., Any]
    count: Callable[[BinaryIO], Any] | None = None
    _: KW_ONLY
    version: str | None = None
    schema: pa.Schema | None = None
    storage_options: Mapping[str, Any] | None = None
    index: str | os.PathLike[str] | bool | None = None

    def check(self) -> None:
        super().check()
        for name, value in (("fn", self.fn), ("count", self.count)):
            if not callable(value) and (name == "fn" or value is not None):
                raise ConfigError(
                    f"read_files({name}) is a function of an open file, got {shown(value)}"
                )

    def open_files(self, files: Sequence[Stage]) -> OwnFiles:
        """The rows of the files that the stages below list and let through."""
        listed = self.listed(files, ("",))
        known = self.version if self.version is not None else identify(self.fn)
        index = self.options["index"] or False
        table, kept_in = _counted(listed, self, json.dumps(known, sort_keys=True), index)
        return OwnFiles(listed, table, self, known, kept_in)


def _counted(
    files: FileList, stage: ReadFiles, known: str, index: str | bool
) -> tuple[pa.Table, str | None]:
    """The rows of each block of each file, and the file in which that is kept."""
    about = {"rows": 1, "fn": known}
    kind = IndexKind("read_files", "rows", about, COLUMNS, _is_sound, settings=known)
    kept = IndexFile.of(files, index, kind)
    table, rows = pa.Table.from_batches([], COLUMNS), np.full(len(files), -1, dtype=np.int64)
    if kept is not None:
        table, rows = kept.find(files)
    missing = np.flatnonzero(rows < 0).tolist()
    if missing:
        read = settled(files, missing) if kept is not None else 0

        def look(file: int, requests: Requests) -> tuple[int, list[int], bool]:
            return _count_one(files, file, stage, requests)

        job = f"counting rows by {show(stage.count or stage.fn)}"
        found = each_file(files, look, str(stage), OWN, wanted=missing, job=job, most=1)
        names = files.kept_names()
        values: dict[str, Any] = {
            "path": [names[n] for n in found],
            "stamp": [files.stamps[n] for n in found],
            "size": [size for size, _, _ in found.values()],
            "rows": [counts for _, counts, _ in found.values()],
            "in_blocks": [several for _, _, several in found.values()],
        }
        columns = {name: python_to_arrow(values[name], COLUMNS.field(name).type) for name in values}
        rows = rows.copy()
        rows[list(found)] = len(table) + np.arange(len(found))
        table = pa.concat_tables([table, pa.table(columns, schema=COLUMNS)])
        if kept is not None:
            kept.save(files, table.take(to_arrow(rows)).combine_chunks(), read)
    return table.take(to_arrow(rows)).combine_chunks(), None if kept is None else str(kept.path)


def _is_sound(table: pa.Table) -> bool:
    if not table.schema.equals(COLUMNS) or any(c.null_count for c in table.columns):
        return False
    table.validate(full=True)
    rows = to_numpy(apart(one_chunk(table.column("rows")))[0])
    return bool(((rows >= 0) & (rows < MOST_ROWS)).all())


def _count_one(
    files: FileList, file: int, stage: ReadFiles, requests: Requests
) -> tuple[int, list[int], bool]:
    data = open_bytes(files, file, requests)
    with closing(data.stream()) as opened:
        if stage.count is None:
            return (
                data.size,
                [sum(len(table) for table in tables_of(stage.fn(opened), stage.fn))],
                False,
            )
        found = stage.count(opened)
    several = isinstance(found, Sequence | np.ndarray) and not isinstance(found, str | bytes)
    counts = list(found) if several else [found]
    for rows in counts:
        if (
            not isinstance(rows, int | np.integer)
            or isinstance(rows, bool)
            or not 0 <= rows < MOST_ROWS
        ):
            raise BadFileError(
                f"{show(stage.count)} returns a number of rows, or a list of them, got {shown(found)}"
            )
    return data.size, [int(rows) for rows in counts], several


class OwnFiles(FileRows):
    """Rows of files of the user's own format. Can be pickled, as the functions can.

    Args:
        files: which.
        counted: of each file its size, and the rows of each of its blocks.
        stage: the stage, with the functions.
        known: what names the functions.
        kept_in: the file in which the numbers are kept, if they are.

    Attributes:
        stage: the stage.
        in_blocks: whether each file's blocks are read one by one.
        kept_in: see above.
        schema: Arrow schema of every table that a reader gives; None without rows.
    """

    def __init__(
        self, files: FileList, counted: pa.Table, stage: ReadFiles, known: Any, kept_in: str | None
    ) -> None:
        self.stage, self._known, self.kept_in = stage, known, kept_in
        rows: list[list[int]] = counted.column("rows").to_pylist()
        super().__init__(files, [np.cumsum([0, *each], dtype=np.int64) for each in rows])
        self.sizes: IntArray = to_numpy(one_chunk(counted.column("size"))).astype(np.int64)
        self.in_blocks: list[bool] = counted.column("in_blocks").to_pylist()
        self.schema = stage.schema  # None where there are no rows to tell
        some = np.flatnonzero(self.lengths)
        if len(some):
            reader = OwnReader(self)
            try:
                first = reader.first(int(some[0]))
            finally:
                reader.close()
            if stage.schema is None:
                self.schema = first.schema.remove_metadata()
            self.row_bytes = first.nbytes / len(first)

    def reader(self) -> OwnReader:
        return OwnReader(self)

    def block_key(self, block: int) -> Any:
        return [super().block_key(block), self._known]
