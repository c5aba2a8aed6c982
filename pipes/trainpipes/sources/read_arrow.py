"""``from_arrow``: a table in memory. ``read_arrow``: files and streams of Arrow, and folders that
``datasets`` saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes import errors
from trainpipes._internal.checks import IntArray, refuse_special, repeated
from trainpipes._internal.locks import cached_property
from trainpipes.columns.arrays import gathered, take_rows
from trainpipes.columns.columns import with_numbers
from trainpipes.columns.content import table_digest
from trainpipes.columns.utf8 import check_sound
from trainpipes.filesystems.retry import Requests, is_denied
from trainpipes.filesystems.systems import is_local
from trainpipes.interfaces.options import as_table, instead_of_path
from trainpipes.interfaces.quarantine import OnBadRow
from trainpipes.interfaces.source import NumberedRowsSource
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import Source
from trainpipes.sources import arrow_layout
from trainpipes.sources.files import formats
from trainpipes.sources.files.decoded_files import above_reader, without_bad_files
from trainpipes.sources.files.file_bytes import FileBytes, LocalBytes, as_bytes
from trainpipes.sources.files.file_reader import FileReader, cut_evenly
from trainpipes.sources.files.file_source import NumberedFiles
from trainpipes.sources.files.formats import BadFileError
from trainpipes.sources.files.index_store import IndexStore
from trainpipes.sources.files.list_files import FileList

#: Rows in a block, so that a shuffle has blocks to put in another order.
BLOCK_ROWS = 8192


class FromArrow(Source, has_blocks=True, random_access=True):
    """Rows of a ``pyarrow.Table`` (or record batch) in memory.

    The first state hashes all rows.

    Args:
        table: the rows.

    >>> import pyarrow as pa, trainpipes as tp
    >>> list(tp.from_arrow(pa.table({"x": [1, 2]})))
    [{'x': 1}, {'x': 2}]
    """

    free = frozenset({"table"})

    table: pa.Table

    def check(self) -> None:
        if isinstance(self.table, pa.RecordBatch):
            self._set(table=pa.Table.from_batches([self.table]))
        if not isinstance(self.table, pa.Table):
            table, way = as_table(self.table), instead_of_path(self.table)
            way = f"write from_arrow({table})" if table else way
            said = f"from_arrow(table) takes a pyarrow.Table, got {type(self.table).__name__}"
            raise errors.ConfigError(f"{said}: {way}" if way else said)
        twice = repeated(self.table.column_names)
        if twice:
            raise errors.ConfigError(
                f"from_arrow(table) takes columns of different names, got {errors.shown(twice[0])} twice: "
                "rename them with table.rename_columns([...])"
            )

    def open(self) -> ArrowSource:
        return ArrowSource(self.table)

    def __repr__(self) -> str:
        return f"from_arrow({self.table.num_rows} rows of {', '.join(self.table.column_names)})"


class TableSource(NumberedRowsSource):
    """Rows of a table, or those at ``indices`` int64 ``[rows]``; with the types of ``schema``, if set."""

    by_number = False

    def __init__(self, table: pa.Table, block_rows: int, indices: IntArray | None = None) -> None:
        super().__init__(len(table) if indices is None else len(indices), block_rows)
        self.table, self.indices = table, indices
        self.row_bytes = table.nbytes / len(table) if len(table) else None
        self._keys: dict[int, str] = {}

    @cached_property
    def _chunks(self) -> tuple[list[pa.RecordBatch], IntArray]:
        batches = self.table.to_batches()
        return batches, np.cumsum([0, *map(len, batches)], dtype=np.int64)

    def slice(self, start: int, stop: int) -> pa.Table:
        if self.indices is not None:
            index = self.indices[start:stop]
            if not len(index) or (np.diff(index) != 1).any():
                return self._taken(index)
            start, stop = int(index[0]), int(index[-1]) + 1
        return self._fitted(self.table.slice(start, stop - start))

    def take(self, index: IntArray) -> pa.Table:
        return self._taken(index if self.indices is None else self.indices[index])

    def _taken(self, index: IntArray) -> pa.Table:
        if not len(index):
            return self._fitted(self.table.slice(0, 0))
        chunks, firsts = self._chunks
        return take_rows(lambda n, rows: self._fitted(gathered(chunks[n], rows)), firsts, index)

    def _fitted(self, rows: formats.Rows) -> formats.Rows:
        return rows if self.schema is None else formats.fitted(rows, self.schema)

    def block_key(self, block: int) -> str:
        if block not in self._keys:
            self._keys[block] = table_digest(self.read(block, 0, int(self.lengths[block])))
        return self._keys[block]


class ArrowSource(TableSource):
    """A user's table, which a state knows by a digest of its content."""

    def __init__(self, table: pa.Table) -> None:
        super().__init__(table, BLOCK_ROWS)

    def fingerprint(self) -> dict[str, Any]:
        table = self.table
        names = table.schema.to_string(show_field_metadata=False, show_schema_metadata=False)
        digest = hashlib.sha256(names.encode())
        for position in (0, len(table) // 2, len(table) - 1):
            if 0 <= position < len(table):
                digest.update(_row_text(table.slice(position, 1)).encode())
        sample, content = digest.hexdigest()[:16], table_digest(table)[:16]
        return {"rows": len(table), "sample": sample, "content": content}

    def describe(self) -> list[tuple[str, str]]:
        return [*super().describe(), ("in memory", errors.amount(self.table.nbytes))]


def _row_text(row: pa.Table) -> str:
    try:
        return repr(row.to_pylist())
    except ValueError:  # of a time in nanoseconds, which Python has none for
        return repr(with_numbers(row).to_pylist())


def saved_files(files: FileList, caller: str) -> FileList:
    """The files that ``save_to_disk`` names; all of other folders."""
    requests = Requests(files.retry)
    folders: dict[tuple[int, str], list[int]] = {}  # by file system and path
    for file, path in enumerate(files.paths):
        folder = posixpath.dirname(path.partition("?")[0] if _has_query(path) else path)
        folders.setdefault((int(files.system_of[file]), folder), []).append(file)
    wanted: list[int] = []
    splits: dict[tuple[int, str], list[str]] = {}  # by the folder above
    for (system, folder), numbers in folders.items():
        state = _json(files, numbers[0], f"{folder}/state.json", requests)
        if state is None:
            wanted += numbers
            continue
        above, name = posixpath.split(folder)
        names = splits.setdefault((system, above), [])
        names.append(name)
        if len(names) == 2 and _json(files, numbers[0], f"{above}/dataset_dict.json", requests):
            raise errors.ConfigError(
                f"{caller}: {above} has several splits, such as {names[0]!r} and {name!r}: read one of them, "
                f"such as {above}/{names[0]}",
                path=above,
            )
        wanted += _named(files, numbers, folder, state, requests)
    return files.pick(np.array(wanted, dtype=np.int64))


def _named(
    files: FileList, members: list[int], folder: str, state: Any, requests: Requests
) -> list[int]:
    path = f"{folder}/state.json"
    try:
        names = [str(each["filename"]) for each in state["_data_files"]]
        apart = bool(state.get("_indices_data_files"))
        if not (names or apart) or any(name != posixpath.basename(name) for name in names):
            raise ValueError(f"{names!r:.100} are no names of files beside it")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(
            path, "does not say which files there are in the way of save_to_disk"
        ) from error
    if apart:
        raise errors.UnreadableError(
            f"{path} names files of indices, as datasets before 2.0 wrote them, and rows would come without "
            "them: load_from_disk(...).flatten_indices().save_to_disk(...) writes them in one",
            path=path,
        )
    place = {posixpath.basename(files.paths[file]): file for file in members}
    for name in names:
        if name not in place and not _is_there(files, members[0], f"{folder}/{name}", requests):
            raise errors.MissingFilesError(
                f"{path} names {errors.cut(name, 99)}, which is not there; bring it back, or save the "
                "dataset again",
                path=f"{folder}/{name}",
            )
    return [place[name] for name in names if name in place]


def _is_there(files: FileList, file: int, path: str, requests: Requests) -> bool:
    try:
        requests.call(files.system(file), "info", path)
    except errors.UnreachableError:
        raise
    except OSError:  # or it is too long
        return False
    return True


def _has_query(path: str) -> bool:
    return "://" in path and "?" in path


def _json(files: FileList, file: int, path: str, requests: Requests) -> Any:
    if _has_query(files.paths[file]):
        return None  # who may read a signed URL may not read files beside it
    if is_local(files.system(file)):
        refuse_special(path)
    try:
        return json.loads(requests.call(files.system(file), "cat_file", path))
    except FileNotFoundError:
        return None
    except errors.UnreachableError as error:
        if is_local(files.system(file)) or not is_denied(error):
            raise
        return None  # as some servers say of what is not there
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"is not JSON that can be read ({error})") from error


def _unreadable(path: str, why: str) -> errors.UnreadableError:
    way = "fix it, or remove it to read all .arrow files beside it"
    return errors.UnreadableError(f"{path} {why}; {way}", path=path)


#: Files of which the first record batch is decoded to tell the size of a row.
SAMPLED = 4
#: Bytes of a record batch that is read as a whole, at most: those of others are read, or copied of a map, in
#: pieces of about so many.
WHOLE = 4 << 20


class ReadArrow(FileReader, has_blocks=True, random_access=True):
    """Reads the rows of Arrow files: IPC files and streams, Feather, and folders of ``save_to_disk`` of
    Hugging Face's ``datasets``.

    Rows of local, uncompressed files can be chosen by number (``shuffle(scope="global")``). The files' types
    are widened where that loses nothing, and dictionary columns come as their values.

    Args:
        columns: names of columns, in order; ``"a.b"`` for field ``b`` of the struct ``a``. None for all,
            which all files must then have.
        block_rows: rows in a block (a shuffle permutes blocks first); if left out, a record batch.
        storage_options: more options of fsspec; never shown or saved.
        index: where to keep the headers for later starts; see ``read_parquet``.
        on_error: for rows of a damaged record batch, and files that are cut short; as in ``read_json``.

    Raises:
        ConfigError: an option is invalid, or a folder is a ``DatasetDict`` of several splits.
        UnreadableError: names all files that are not Arrow, or the damaged place.
        SchemaError: a file lacks a column, or its type does not fit.
        DataChangedError: a file has changed since it was listed.

    >>> import pathlib, tempfile, pyarrow as pa, pyarrow.feather, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.feather"
    >>> pyarrow.feather.write_feather(pa.table({"x": [1, 2], "y": ["a", "b"]}), path)
    >>> list(tp.list_files(path).read_arrow(["y"]))
    [{'y': 'a'}, {'y': 'b'}]
    """

    columns: Sequence[str] | None = None
    _: KW_ONLY
    block_rows: int | None = None
    storage_options: Mapping[str, Any] | None = None
    index: str | os.PathLike[str] | bool | None = None
    on_error: OnBadRow = "raise"

    def _above(self) -> Sequence[Stage]:
        return above_reader(self)

    @without_bad_files
    def _open_on(self, files: Sequence[Stage]) -> NumberedFiles:
        format = ArrowFormat()
        listed = saved_files(self.listed(files), str(self))
        store = IndexStore(listed, self.name, format.name, "", self.options["index"])
        store.complete(lambda job: format.scan(job.data), str(self))
        layouts, rows, edges = store.layouts(), self.block_rows, None
        if rows is not None:
            edges = [cut_evenly(int(layout.rows.sum()), rows) for layout in layouts]
        different = formats.different_schemas(listed.names, [layout.schema for layout in layouts])
        schema = formats.one_schema(different, self.columns, str(self))
        source = NumberedFiles(store, format, edges=edges, columns=self.columns, schema=schema)
        source.leave_out(self.on_error)
        source.row_bytes = source.sampled(SAMPLED)
        return source


class ArrowFormat(formats.Format):
    """Arrow files as a format: a block is a record batch."""

    name = "Arrow"
    random_access = True
    fit = "Arrow files that are on this machine, not compressed and without dictionaries"
    otherwise = "write it anew, or shuffle within a buffer"

    def scan(self, file: FileBytes) -> formats.Layout:
        def fetch(parts: list[tuple[int, int]]) -> list[bytes]:
            return [as_bytes(part) for part in file.read(parts)]

        return arrow_layout.read_layout(fetch, file.size)

    def ranges(
        self, layout: formats.Layout, block: int, columns: Sequence[str] | None
    ) -> list[tuple[int, int]]:
        before = arrow_layout.spans_before(_about(layout.extra), block)
        return [*before, *super().ranges(layout, block, columns)]

    def decode(
        self, data: FileBytes, layout: formats.Layout, block: int, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        about = _about(layout.extra)
        if about["dictionaries"] is not None:
            yield _batch(data, data.read(self.ranges(layout, block, columns)), layout, block)
            return
        # Remote bytes are cut as local ones: the size of a row, and so the order, is that of the first piece.
        start, stop, rows = (int(each[block]) for each in (layout.start, layout.stop, layout.rows))
        reading = _reading(data, start, stop)
        wanted = _places(layout.schema, columns)
        small = stop - start <= WHOLE and len(wanted) == len(layout.schema)
        if about["compressed"] or small:
            yield _batch(data, [reading(lambda read: read(start, stop))], layout, block)
        elif all(map(arrow_layout.can_be_cut, layout.schema.types)):
            first = 0
            for piece in arrow_layout.pieces(reading, layout.schema, (start, stop), rows, wanted):
                _check(data, (block, first), piece, len(piece))
                first += len(piece)
                yield piece
        else:  # views and unions
            begin, step = int(layout.rows[:block].sum()), max(1, rows * WHOLE // (stop - start))
            whole = None
            if not data.local:
                message = reading(lambda read: read(start, stop))
                whole = _batch(data, [message], layout, block, columns)
            for first in range(0, rows, step):
                index = np.arange(first, min(first + step, rows))
                if whole is None:
                    yield from self.take(data, layout, begin + index, columns)
                else:
                    yield gathered(whole, index)

    def take(
        self, data: FileBytes, layout: formats.Layout, rows: IntArray, columns: Sequence[str] | None
    ) -> list[pa.RecordBatch]:
        content = data.mapped()
        assert content is not None

        def of_batch(number: int, rows_of_batch: IntArray) -> pa.RecordBatch:
            start, stop = int(layout.start[number]), int(layout.stop[number])
            message = content.slice(start, stop - start)
            return gathered(_batch(data, [message], layout, number, columns), rows_of_batch)

        firsts = np.append(0, np.cumsum(layout.rows))
        taken: list[pa.RecordBatch] = take_rows(of_batch, firsts, rows).to_batches()
        data.check()
        return taken

    def content(self, layout: formats.Layout) -> str:
        return str(_about(layout.extra)["content"])

    def unfit(self, layout: formats.Layout, local: bool) -> bool:
        about = _about(layout.extra)
        return not local or about["compressed"] or about["dictionaries"] is not None


@lru_cache(maxsize=4096)
def _about(extra: bytes) -> dict[str, Any]:
    return formats.unpacked(extra)


def _places(schema: pa.Schema, columns: Sequence[str] | None) -> list[int]:
    names = schema.names
    wanted = names if columns is None else formats.inner_paths(columns, names)
    return [place for place, name in enumerate(names) if name in wanted]


def _batch(
    data: FileBytes,
    parts: Sequence[Any],
    layout: formats.Layout,
    block: int,
    columns: Sequence[str] | None = None,
) -> pa.RecordBatch:
    if len(parts) > 1:
        options = pa.ipc.IpcReadOptions(use_threads=False)
        whole = pa.BufferReader(b"".join(parts))
        batch = pa.ipc.open_stream(whole, options=options).read_next_batch()
    else:
        batch = pa.ipc.read_record_batch(pa.py_buffer(parts[0]), layout.schema)
        batch = batch.select(_places(layout.schema, columns))
    _check(data, block, batch, int(layout.rows[block]))
    return batch


def _reading(data: FileBytes, start: int, stop: int) -> arrow_layout.Reading:
    """Calls what reads ranges of a message; a remote one is fetched as a whole."""
    if isinstance(data, LocalBytes):
        return data.reading
    message = pa.py_buffer(data.read([(start, stop)])[0])
    return lambda work: work(lambda first, last: message.slice(first - start, last - first))


def _check(data: FileBytes, key: Any, batch: pa.RecordBatch, rows: int) -> None:
    """Raise unless a batch is consistent: its readers rely on it."""
    check = partial(_check_batch, batch, rows)
    if data.local:
        data.once(key, check)  # the bytes are the same each time
    else:
        check()


def _check_batch(batch: pa.RecordBatch, rows: int) -> None:
    if batch.num_rows != rows:
        raise BadFileError(f"it has {batch.num_rows:,} rows, and its header counts {rows:,}")
    for column in batch.columns:
        check_sound(column)
