"""``read_arrow``: rows of Arrow files, record batch by record batch.

The stage and its source, made by the thread that plans; what is open is shared by the readers of a process,
which several threads use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes.columns.arrays import check_sound, gathered
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError
from trainpipes.kinds.source import Place, RandomAccessSource
from trainpipes.kinds.stage import Stage
from trainpipes.sources.arrow.layout import ArrowLayout, read_layout
from trainpipes.sources.arrow.reader import ArrowReader, take_rows
from trainpipes.sources.arrow.saved_dataset import saved_files
from trainpipes.sources.files.block_reader import explained
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.file_bytes import FileBytes, LocalBytes, MappedFiles, open_bytes
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_rows import FileRows, cut_evenly
from trainpipes.sources.files.format import Layout
from trainpipes.sources.files.index_store import IndexStore
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.files.schema import cast_to, different_schemas, one_schema, plain
from trainpipes.sources.remote.retry import Requests

SUFFIXES = (".arrow", ".arrows", ".feather", ".ipc")
#: Files of which the first record batch is decoded to tell the size of a row.
SAMPLED = 4
#: Errors for which a record batch is damaged.
BAD = (BadFileError, pa.ArrowException, OSError, ValueError)


class ReadArrow(FileReader):
    """Reads the rows of Arrow files: IPC files and streams, Feather, and the folders that ``save_to_disk`` of
    Hugging Face's ``datasets`` writes.

    In: files, from ``list_files``; a folder stands for its ``.arrow``, ``.arrows``, ``.feather`` and ``.ipc``
    files. Out: rows with the chosen columns, as Arrow. Cursor: which block, and how many rows of it.

    Local files are mapped into memory: rows cost no copy, and rows of uncompressed files can be chosen by
    number (``shuffle(scope="global")``, ``shuffle(sampler=...)``). Do not write to a file while it is read;
    to replace it, write a new file and rename it. A compressed record batch is decoded whole; a remote one is
    fetched whole, several at a time. Before the first row the header of every record batch is read, about 20
    µs each, and kept by ``index`` for later starts. A remote file takes one request for its footer and one
    for all headers, a remote stream one for each header.

    In a folder of ``save_to_disk``, the files that its ``state.json`` names are read, in their order; caches
    beside them are not.

    Columns come in the order given and with one schema for all files, as in ``read_parquet``: types are
    widened where that loses nothing, dictionary columns come as their values.

    Args:
        columns: names of columns; ``"a.b"`` for field ``b`` of the struct ``a``. None for all; then all files
            must have the same columns.
        split: the split of a saved ``DatasetDict`` to read, such as "train".
        block_rows: rows in a block (a shuffle permutes blocks first); if left out, a block is a record batch.
        storage_options: more options for the fsspec file system, besides those of ``list_files``. They are
            neither shown nor part of a state.
        index: where to keep what the headers say: a file that ends in ".arrow", or a folder. True: in the
            cache folder (see ``tp.cache``). False: nowhere. If left out: in the cache folder, if the
            files are remote, or 64 or more.

    Raises:
        ConfigError: an option is invalid, or a ``DatasetDict`` needs a ``split``.
        UnreadableError: names all files that are not Arrow, each with the reason; later, the place that
            cannot be decoded.
        SchemaError: a file lacks a column, or has it in a type that does not fit that of the first file.
        DataChangedError: a file has changed since it was listed.

    >>> import pathlib, tempfile, pyarrow as pa, pyarrow.feather, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.feather"
    >>> pyarrow.feather.write_feather(pa.table({"x": [1, 2], "y": ["a", "b"]}), path)
    >>> list(tp.list_files(path).read_arrow(["y"]))
    [{'y': 'a'}, {'y': 'b'}]
    """

    has_blocks = True
    random_access = True

    columns: Sequence[str] | None = None
    _: KW_ONLY
    split: str | None = None
    block_rows: int | None = None
    storage_options: Mapping[str, Any] | None = None
    index: str | os.PathLike[str] | bool | None = None

    def check(self) -> None:
        super().check()
        if self.split is not None and (not isinstance(self.split, str) or not self.split):
            raise ConfigError(
                f"read_arrow(split) is the name of a split, such as 'train', got {self.split!r}"
            )

    def open_files(self, files: Sequence[Stage]) -> ArrowFiles:
        """The rows of the files that the stages below list and let through."""
        listed = self.listed(files, SUFFIXES)
        listed = saved_files(listed, self.split, str(self))
        store = IndexStore(listed, self.name, "Arrow", "", self.options["index"])
        store.complete(lambda job: _look(job.data), str(self))
        return ArrowFiles(store, self.columns, self.block_rows, str(self))


def _look(data: FileBytes) -> Layout:
    """The record batches of a file."""
    if isinstance(data, LocalBytes):
        content = memoryview(data.mapped())  # type: ignore[arg-type]

        def fetch(parts: list[tuple[int, int]]) -> list[bytes]:
            return [bytes(content[start:stop]) for start, stop in parts]
    else:

        def fetch(parts: list[tuple[int, int]]) -> list[bytes]:
            return [bytes(part) for part in data.read(parts)]

    layout, schema = read_layout(fetch, data.size)
    return layout.kept(pa.schema([plain(field) for field in schema]))


class ArrowFiles(FileRows, RandomAccessSource):
    """Rows of Arrow files. Can be pickled; holds about 200 bytes a record batch.

    Args:
        store: the files, and their record batches.
        columns: names of columns; None for all.
        block_rows: rows of a block; None for a record batch.
        asker: the stage, for messages.

    Attributes:
        schema: Arrow schema of every table that a reader gives.
    """

    def __init__(
        self,
        store: IndexStore,
        columns: Sequence[str] | None,
        block_rows: int | None,
        asker: str,
    ) -> None:
        files, layouts = store.files, store.layouts()
        self.kept_in = store.kept_in
        self.layouts = [ArrowLayout.of(layout) for layout in layouts]
        # The rows of each file's batches begin with these, and their number at the end.
        counts = [[batch.rows for batch in layout.batches] for layout in self.layouts]
        self.batch_rows = [np.cumsum([0, *each], dtype=np.int64) for each in counts]
        if block_rows is None:
            edges = self.batch_rows
        else:
            edges = [cut_evenly(int(rows[-1]), block_rows) for rows in self.batch_rows]
        super().__init__(files, edges)
        self.sizes = store.sizes
        different = different_schemas(files.names, [layout.schema for layout in layouts])
        self.schema: pa.Schema = one_schema(different, columns, asker)
        # Of all files: the number of each batch's first row, and the file that it is in.
        flat = [0, *(rows for each in counts for rows in each)]
        self.first_rows: IntArray = np.cumsum(flat, dtype=np.int64)
        self.first_batch: IntArray = np.cumsum([0, *map(len, counts)])
        self._open = OpenFiles()
        self.row_bytes = self._row_bytes()
        sizes = [
            np.cumsum([0, *(b.stop - b.start for b in found.batches)]) for found in self.layouts
        ]
        each = zip(edges, self.batch_rows, sizes, strict=True)
        spread = [np.diff(np.interp(edge, rows, size)) for edge, rows, size in each]
        self.block_bytes: npt.NDArray[np.float64] = np.concatenate(spread)

    def _row_bytes(self) -> float | None:
        some = [file for file, layout in enumerate(self.layouts) if layout.batches]
        some = some[:: -(-len(some) // SAMPLED) or 1]
        requests = Requests(self.files.retry_seconds)
        rows = sum(self.layouts[file].batches[0].rows for file in some)
        size = sum(self.batch(file, 0, requests).nbytes for file in some)
        return size / rows if rows else None

    def reader(self) -> ArrowReader:
        return ArrowReader(self)

    def batch(
        self,
        file: int,
        number: int,
        requests: Requests,
        fetched: memoryview | None = None,
        rows: IntArray | None = None,
    ) -> pa.RecordBatch:
        """A record batch of a file, or some rows of it, in the source's schema.

        Args:
            file: the file.
            number: of the batch in it.
            requests: makes those to servers.
            fetched: the batch's bytes, where they are here already.
            rows: numbers of rows in the batch; None for all.

        Raises:
            DataError: it cannot be had, or not decoded; says why and where.
        """
        place = Place(self.files.names[file], row=int(self.batch_rows[file][number]))
        with explained(place, "the record batch here cannot be decoded", self.kept_in, BAD):
            raw = self._raw(file, number, requests, fetched, place)
            return self._fitted(raw if rows is None else gathered(raw, rows), place)

    def _raw(
        self, file: int, number: int, requests: Requests, fetched: memoryview | None, place: Place
    ) -> pa.RecordBatch:
        layout = self.layouts[file]
        message = layout.batches[number]
        whole: pa.Buffer | None = None
        if is_local(self.files.system(file)):
            whole = self._open.buffer(self.files, file, place)
            body = whole.slice(message.start, message.stop - message.start)
            if not layout.dictionaries:
                schema = self._open.schema(file, whole.slice(*_span(layout.schema)))
                found = pa.ipc.read_record_batch(body, schema)
                if not self._open.checked(file, number):
                    _check(found, message.rows)
                    self._open.check(file, number)
                return found
        else:
            body = self.fetch(file, number, requests) if fetched is None else fetched
        parts = [layout.schema, *((m.start, m.stop) for m in layout.needed(number))]
        if whole is not None:
            before = [whole.slice(*_span(part)) for part in parts]
        else:
            before = open_bytes(self.files, file, requests).read(parts)
        options = pa.ipc.IpcReadOptions(use_threads=False)
        stream = pa.ipc.open_stream(pa.BufferReader(b"".join([*before, body])), options=options)
        found = stream.read_next_batch()
        _check(found, message.rows)
        return found

    def fetch(self, file: int, number: int, requests: Requests) -> memoryview:
        """The bytes of a record batch of a file on another machine."""
        message = self.layouts[file].batches[number]
        data = open_bytes(self.files, file, requests)
        return data.read([(message.start, message.stop)])[0]

    def _fitted(self, batch: pa.RecordBatch, place: Place) -> pa.RecordBatch:
        columns = [
            cast_to(batch.column(batch.schema.get_field_index(field.name)), field, lambda: place)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def take(self, index: IntArray) -> pa.Table:
        unfit = next((file for file in range(len(self.files)) if not self._by_number(file)), None)
        if unfit is not None:
            raise ConfigError(
                "rows can be chosen by number in Arrow files that are on this machine, not compressed and "
                f"without dictionaries, and {self.files.names[unfit]} is not: write it anew, or shuffle "
                "within a buffer",
                path=self.files.names[unfit],
            )
        requests = Requests(self.files.retry_seconds)

        def of_batch(number: int, rows: IntArray) -> pa.RecordBatch:
            file = int(np.searchsorted(self.first_batch, number, side="right")) - 1
            own = number - int(self.first_batch[file])
            return self.batch(file, own, requests, rows=rows)

        if not len(index):
            return pa.Table.from_batches([], self.schema)
        return take_rows(of_batch, self.first_rows, index)

    def _by_number(self, file: int) -> bool:
        layout = self.layouts[file]
        plain = not layout.dictionaries and not any(b.compressed for b in layout.batches)
        return plain and is_local(self.files.system(file))


def _span(part: tuple[int, int]) -> tuple[int, int]:
    """Where a part begins, and its length."""
    return part[0], part[1] - part[0]


def _check(batch: pa.RecordBatch, rows: int) -> None:
    """Raise unless what a batch says of itself holds: whatever reads it relies on that."""
    if batch.num_rows != rows:
        raise BadFileError(f"it has {batch.num_rows:,} rows, and its header counts {rows:,}")
    for column in batch.columns:
        check_sound(column)


class OpenFiles(MappedFiles):
    """Local files that are mapped, and what was found out of them. Pickled, it is empty."""

    def __init__(self) -> None:
        super().__init__()
        self._schemas: dict[int, pa.Schema] = {}
        self._checked: set[tuple[int, int]] = set()

    def schema(self, file: int, message: pa.Buffer) -> pa.Schema:
        """A file's schema."""
        found = self._schemas.get(file)
        if found is None:
            found = self._schemas[file] = pa.ipc.read_schema(message)
        return found

    def checked(self, file: int, number: int) -> bool:
        """Whether a record batch was looked at and found to be sound."""
        return (file, number) in self._checked

    def check(self, file: int, number: int) -> None:
        """Note that it was."""
        self._checked.add((file, number))
