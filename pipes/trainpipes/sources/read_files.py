"""``read_files``: files by functions or formats; ``read_bytes`` and ``read_images``: a row for each file."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import posixpath
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY
from functools import partial
from itertools import islice, pairwise, repeat
from typing import Any, BinaryIO, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.csv

from trainpipes import errors
from trainpipes._internal.checks import IntArray, repeated, require, several
from trainpipes._internal.messages import nearest
from trainpipes.columns.arrays import one_chunk, python_to_arrow, to_arrow
from trainpipes.columns.content import table_digest
from trainpipes.errors import ConfigError, shown
from trainpipes.filesystems.retry import Requests
from trainpipes.filesystems.systems import is_local, listed_as
from trainpipes.interfaces.options import identify, show
from trainpipes.interfaces.source import Place, RandomAccessSource
from trainpipes.interfaces.stage import Stage
from trainpipes.sources.files import file_reader, formats
from trainpipes.sources.files.block_reader import Ahead, explained
from trainpipes.sources.files.file_bytes import FileBytes, without
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_source import FileSource, scanned
from trainpipes.sources.files.formats import BadFileError, Columns, Format, Layout
from trainpipes.sources.files.list_files import FileList, ListFiles
from trainpipes.sources.files.remote_bytes import open_bytes
from trainpipes.sources.folder_classes import below_all, by_folder, urls_of

#: More rows than a file has.
MOST_ROWS = 1 << 48

log = logging.getLogger("trainpipes")


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


#: Bytes of an Arrow column of bytes, at most, and of a file.
MOST_BYTES, MOST_FILE = 1 << 30, (1 << 31) - 1
#: Files of a block, by default.
BLOCK_ROWS = 256


class ReadBytes(file_reader.FileReader, has_blocks=True, random_access=True):
    """Reads whole files: a row for each, with ``path`` and ``bytes``.

    A file is read when its batch is made: a shuffle's buffer costs 8 bytes a file. Put many small remote
    files in tar archives, for ``read_webdataset``.

    Args:
        labels: "folder" adds classes by the names of folders, a path the columns of a CSV; see
            ``read_images``.
        block_rows: files in a block (a shuffle permutes blocks first).
        storage_options: more options of fsspec; never shown or saved.

    Raises:
        ConfigError: a file lies in no folder of a class.
        SchemaError: the CSV has no row for a file, or several.
        DataChangedError: a file has changed since it was listed.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("a.bin", "b.bin"):
    ...     _ = (folder / name).write_bytes(name.encode() * 2)
    >>> [row["bytes"] for row in tp.list_files(folder).read_bytes()]
    [b'a.bina.bin', b'b.binb.bin']
    """

    free = frozenset({"labels"})
    #: Of the files that a folder stands for; None for those of the reader's name.
    suffixes: ClassVar[tuple[str, ...] | None] = ("",)

    labels: str | os.PathLike[str] | None = None
    _: KW_ONLY
    block_rows: int = BLOCK_ROWS
    storage_options: Mapping[str, Any] | None = None

    def check(self) -> None:
        super().check()
        labels = os.fspath(self.labels) if isinstance(self.labels, os.PathLike) else self.labels
        good = labels is None or (isinstance(labels, str) and labels)
        self._require(good, "labels", '"folder", the path of a CSV, or None')
        self._set(labels=labels)

    def _open_on(self, files: Sequence[Stage]) -> WholeFiles:
        listed = self.listed(files, self.suffixes)
        more = None
        if self.labels == "folder":
            listed, more = by_folder(listed, urls_of(files[0]), self, len(files) > 1)
        elif self.labels is not None:
            urls = urls_of(files[0])
            same = str(self.labels).partition("://")[0] in {url.partition("://")[0] for url in urls}
            options = files[0].options["storage_options"] if same else None
            more = self._by_csv(listed, below_all(listed, urls), options)
        return WholeFiles(listed, more, self.block_rows, str(self))

    def _by_csv(
        self, files: FileList, below: list[str], of_files: Mapping[str, Any] | None
    ) -> pa.Table:
        path = str(self.labels)

        def unfit(why: str) -> errors.SchemaError:
            return errors.SchemaError(f"{self}: {path} {why}", path=path)

        retry, options = files.retry, {**(of_files or {}), **(self.storage_options or {})}
        listed = ListFiles(path, suffix="", storage_options=options, retry=retry).files()
        parsed = partial(_parsed_csv, _content(listed, Requests(retry), 0), path, self.name)
        table = parsed({})
        if twice := repeated(table.column_names):
            raise unfit(f"names a column {twice[0]!r} twice: rename one")
        column = next((name for name in NAMES if name in table.column_names), None)
        if column is None:
            there = f"one of {list(NAMES)}; its first line has {table.column_names}"
            raise unfit(f"needs a column with the files' names, {there}")
        for name in sorted({"bytes", "path"}.intersection(table.column_names) - {column}):
            raise unfit(f"has a column {name!r}, as rows have one already: rename it")
        names = parsed({column: pa.string()}).column(column).to_pylist()  # 007 stays so
        if twice := repeated(names):
            raise unfit(f"has two rows for {twice[0]!r}: leave one out")
        rows = {name: row for row, name in enumerate(names)}
        folder = posixpath.dirname(listed_as(path))
        rows_of_files = []
        for name, short in zip(files.names, below, strict=True):
            whole = [name.removeprefix(f"{folder}/"), short, name]
            bare = [posixpath.splitext(written)[0] for written in whole]
            rows_of_files.append(next((rows[n] for n in [*whole, *bare] if n in rows), -1))
            if rows_of_files[-1] < 0:
                raise unfit(
                    f"has no row for {name}{nearest(short, names)}: add one, or leave the file out with "
                    f"{without(name)}"
                )
        return table.drop_columns([column]).take(to_arrow(np.array(rows_of_files, dtype=np.int64)))


class WholeFiles(file_reader.FileBlocks, RandomAccessSource):
    """A row for each file, opened when it is read. A block is several files."""

    by_number = True
    holds_numbers = True
    schema: pa.Schema

    def __init__(
        self, files: FileList, more: pa.Table | None, block_rows: int, caller: str
    ) -> None:
        self.files, self.sizes, self.epoch_files = files, files.sizes, files.below
        self._caller = caller
        self.more = None if more is None or not more.num_columns else more
        self._begins = file_reader.cut_evenly(len(files), block_rows)
        self.lengths = np.diff(self._begins)
        known = files.sizes[files.sizes >= 0]
        self.row_bytes = float(known.mean()) if len(known) else None
        plain = [pa.field("path", pa.string()), pa.field("bytes", pa.binary())]
        self.schema = pa.schema([*plain, *(() if more is None else more.schema)])
        large = np.flatnonzero(files.sizes > MOST_FILE)
        if len(large):
            file = int(large[0])
            raise errors.UnreadableError(
                f"{caller}: {files.names[file]} has {int(files.sizes[file]):,} bytes, and a row holds "
                f"{MOST_FILE:,} at most: leave it out with {without(files.names[file])}",
                path=files.names[file],
                stage=caller,
            )

    def rows(self, block: int) -> range:
        return range(*self._begins[block : block + 2].tolist())

    def reader(self) -> WholeFilesReader:
        return WholeFilesReader(self)

    def taker(self) -> WholeFilesReader:
        return WholeFilesReader(self)

    def take(self, index: IntArray) -> pa.Table:
        return WholeFilesReader(self).take(index)

    def place(self, block: int, row: int) -> Place:
        return Place(self.files.names[self.rows(block)[row]])

    def fingerprint(self) -> dict[str, Any]:
        digests = self.fingerprint_of(["1"] * len(self.files), [""] * len(self.files))
        return digests if self.more is None else digests | {"labels": table_digest(self.more)[:16]}

    def block_key(self, block: int) -> Any:
        rows, digest = self.rows(block), hashlib.sha256()
        for n in rows:
            about = errors.known_name(self.files.names[n]), int(self.sizes[n]), self.files.stamps[n]
            digest.update(repr((self._relative_names[n], *about)).encode())
        more = "" if self.more is None else table_digest(self.more.slice(rows.start, len(rows)))
        return [digest.hexdigest(), more]

    def check_after(self, epoch_files: Sequence[str]) -> None:
        """Raise DataChangedError where folders number other classes than those of the epoch before."""
        if self.more is None or not {*self.schema.names} >= {"class", "label"}:
            return
        old, new = (
            {name.split("/")[1] for name in names} for names in (epoch_files, self.epoch_files)
        )
        if old and old != new and new == {*self.more["class"].to_pylist()}:
            changes = [f"{name!r} more" for name in sorted(new - old)]
            changes += [f"no {name!r}" for name in sorted(old - new)]
            raise errors.DataChangedError(
                f"{self._caller}: with list_files(refresh) all epochs must have the classes of the first, "
                f"which folders number by their names, got {', '.join(changes[:3])}; take labels=None, "
                "and number them by map() and encode_labels(classes=[...])"
            )

    def describe(self) -> list[tuple[str, str]]:
        lines = [("files", f"{len(self.files):,}, one a row")]
        if self.row_bytes is not None:
            lines.append(("bytes", f"{errors.amount(self.row_bytes)} a file on average"))
        return lines


class WholeFilesReader:
    """Reads whole files, remote ones ahead. Any thread may ask."""

    def __init__(self, source: WholeFiles) -> None:
        files = self._files = source.files
        self._source, requests = source, Requests(files.retry)
        weakref.finalize(self, requests.stop)
        self._content = partial(_content, files, requests)
        self._ahead = Ahead(self._content, lambda n: max(0.0, files.sizes[n]), files.prefetch_bytes)

    def expect(
        self, blocks: Sequence[int], turns: Sequence[float] = (), most: float = math.inf
    ) -> None:
        each = zip(blocks, turns or repeat(0.0), strict=False)
        self._expect({n: turn for block, turn in each for n in self._source.rows(block)}, most=most)

    def coming(self, index: IntArray) -> None:
        self._expect(dict.fromkeys(index.tolist(), 0.0), more=True)

    def _expect(self, turns: dict[int, float], more: bool = False, most: float = math.inf) -> None:
        if not self._source.is_local:
            there = [n for n in turns if not is_local(self._files.system(n))]
            self._ahead.expect(there, more, [turns[n] for n in there], most)

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        return self._table(self._source.rows(block)[start:stop])

    def take(self, index: IntArray) -> pa.Table:
        self.coming(index)
        return self._table(index.tolist())

    def _table(self, numbers: Sequence[int]) -> pa.Table:
        sizes = self._files.sizes[np.asarray(numbers, dtype=np.int64)]
        contents: Iterator[memoryview] = map(self._taken, numbers)
        if (sizes < 0).any():  # a server tells them with the bytes
            whole = list(contents)
            contents, sizes = iter(whole), np.array([len(each) for each in whole])
        batches = []
        for start, stop in pairwise(file_reader.cut_by_bytes(sizes, MOST_BYTES).tolist()):
            names = [self._files.names[n] for n in numbers[start:stop]]
            bytes_ = python_to_arrow(list(islice(contents, stop - start)), pa.binary())
            columns = [python_to_arrow(names, pa.string()), bytes_]
            if self._source.more is not None:
                index = to_arrow(np.array(numbers[start:stop], dtype=np.int64))
                columns += map(one_chunk, self._source.more.take(index).columns)
            batches.append(pa.RecordBatch.from_arrays(columns, schema=self._source.schema))
        return pa.Table.from_batches(batches, self._source.schema)

    def _taken(self, file: int) -> memoryview:
        with explained(Place(self._files.names[file]), kinds=()):
            content = None if self._source.is_local else self._ahead.take(file)
            return self._content(file) if content is None else content

    def close(self) -> None:
        """Nothing is open."""


def _content(files: FileList, requests: Requests, file: int) -> memoryview:
    data = open_bytes(files, file, requests)
    return data.read([(0, data.size)])[0]


#: What the column of a labels file with the files' names may be called.
NAMES = ("file_name", "filename", "file", "path", "image", "image_id", "id")


class ReadImages(ReadBytes, has_blocks=True, random_access=True):
    """Reads whole image files, with classes from the names of their folders, or with labels from a CSV.

    A folder stands for its images (``.jpg``, ``.jpeg``, ``.jpe``, ``.jfif``, ``.png``, ``.webp``, ``.gif``,
    ``.avif``, ``.bmp``, ``.tif``, ``.tiff``, ``.ppm``, ``.pgm``, ``.jp2``). Rows have ``path`` and ``bytes``,
    for ``decode_image`` after the shuffle. With ``labels="folder"`` they also have ``class``, the folder's
    name, and ``label``, its number by name, and come class by class as in torchvision's ``ImageFolder``.
    Of several folders that hold folders of classes, those of one name are one class.

    Args:
        labels: "folder"; or the path of a CSV with a column of image names (``file_name``, ``filename``,
            ``file``, ``path``, ``image``, ``image_id`` or ``id``), with or without their ends, relative to
            the CSV or the listed folder; its other columns are added. None for neither.
        block_rows: images in a block (a shuffle permutes blocks first).
        storage_options: more options of fsspec; never shown or saved.

    Raises:
        ConfigError: an image lies in no folder of a class.
        SchemaError: the CSV has no row for an image, or several.
        DataChangedError: a file has changed since it was listed.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("dog/1.png", "cat/2.png", "cat/10.png"):
    ...     (folder / name).parent.mkdir(exist_ok=True)
    ...     _ = (folder / name).write_bytes(b"...")
    >>> rows = tp.list_files(folder).read_images()
    >>> [(row["path"].rsplit("/")[-1], row["class"], row["label"]) for row in rows]
    [('10.png', 'cat', 0), ('2.png', 'cat', 0), ('1.png', 'dog', 1)]
    """

    suffixes = None

    labels: str | os.PathLike[str] | None = "folder"


def _parsed_csv(
    content: memoryview, path: str, caller: str, types: Mapping[str, pa.DataType]
) -> pa.Table:
    how = pyarrow.csv.ConvertOptions(column_types=types)
    cut = pyarrow.csv.ParseOptions(newlines_in_values=True)  # of captions
    try:
        return pyarrow.csv.read_csv(pa.BufferReader(content), None, cut, how)
    except pa.ArrowException as error:
        raise errors.UnreadableError(
            f"{caller}(labels): {path} cannot be read as CSV: "
            f"{formats.one_line(error)}; give the path of a CSV with a line for each file",
            path=path,
        ) from error
