from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.checks import IntArray, need, require
from trainpipes.columns.arrays import one_chunk, to_numpy
from trainpipes.engine.planning.row_names import with_deleted
from trainpipes.errors import ConfigError, UnreadableError
from trainpipes.filesystems.systems import listed_as
from trainpipes.interfaces.source import Place, RandomAccessSource
from trainpipes.sources.files.file_reader import cut_evenly
from trainpipes.sources.files.formats import chosen, inner_paths, one_line
from trainpipes.sources.files.list_files import digest
from trainpipes.sources.parquet_filter import check_fits, checked_filter, needed_columns
from trainpipes.sources.tables.table import ReadTable, instant, of_object_store
from trainpipes.sources.tables.table_files import COUNTED, NO_ROWS, TableFields

#: Rows of a block, at most, and those that the size of a row is taken from.
BLOCK_ROWS, SAMPLED_ROWS = 8192, 256


class ReadLance(ReadTable, random_access=True):
    """Reads a version of a Lance table as Arrow.

    Rows can be read by number: ``shuffle(scope="global")``, samplers and weights take them where they lie.
    In file order, and for a shuffle within a buffer, they are read block by block. Without ``version`` a run
    reads the version that is the newest when it begins: its states name it, and a resume reads that version.

    Args:
        uri: a path or URL of the table.
        version: its number, or a time such as ``"2026-05-01T12:00:00Z"`` for what was the newest then. None
            for the newest when the run begins.
        columns: names of columns, as in ``read_parquet``; None for all.
        filter: as in ``read_parquet``, asked of each row.
        storage_options: options of fsspec, such as credentials; never shown or saved.
        refresh: "epoch" for the newest version of each epoch; see ``list_files``.

    Raises:
        MissingExtraError: ``pylance`` is not installed.
        MissingFilesError: there is no such table or version, or it was cleaned up.
        UnreadableError: rows cannot be read.

    >>> import pathlib, tempfile, lance, pyarrow as pa, trainpipes as tp
    >>> folder = str(pathlib.Path(tempfile.mkdtemp()) / "events.lance")
    >>> table = lance.write_dataset(pa.table({"x": [1, 2, 3]}), folder)
    >>> _ = table.delete("x = 2")
    >>> list(tp.read_lance(folder).shuffle(scope="global", seed=1)), len(tp.read_lance(folder, version=1))
    ([{'x': 1}, {'x': 3}], 3)
    """

    free = frozenset({"uri", "version"})

    uri: str | os.PathLike[str]
    version: int | str | datetime | None = None
    columns: Sequence[str] | None = None
    filter: pc.Expression | Sequence[Any] | None = None
    storage_options: Mapping[str, Any] | None = None
    _: KW_ONLY
    refresh: Literal["epoch"] | None = None

    def check(self) -> None:
        self._check_path("Lance")
        super().check()

    def open(self) -> LanceRows:
        need("lance", "read_lance")
        table, newest = self._table(self._wanted)
        caller, filter = str(self), checked_filter(self.filter, self.name)
        columns, whole = self.columns, pa.schema(
            chosen(table.schema, None, caller, self._said_uri).values()
        )  # fmt: skip
        needed = [] if filter is None else needed_columns(filter, whole, caller)
        if columns is not None:
            inside = inner_paths(columns, whole.names)
            columns = [*columns, *(name for name in needed if name not in inside)]
        schema = pa.schema(chosen(table.schema, columns, caller, self._said_uri).values())
        if filter is not None:
            check_fits(filter, schema, caller)
        source = LanceRows(table, schema, str(self.uri).rstrip("/"), table.version == newest)
        if "://" not in str(self.uri) and source.names:
            self._files(table.version, source.names)
        count = min(SAMPLED_ROWS, int(source.lengths.sum()))
        source.row_bytes = source.take(np.arange(count)).nbytes / count if count else None
        return source

    def _table(self, number: Any) -> tuple[Any, int]:
        import lance

        opened = partial(
            lance.dataset, str(self.uri), storage_options=of_object_store(self.storage_options)
        )
        with self._explained(f"there is no Lance table at {self.uri}, or it cannot be read"):
            table = opened()
        newest = int(table.version)
        if number is None or number == newest:
            return table, newest
        if isinstance(number, int) and number > newest:
            rule = f"at most the newest of the table {self.uri}, {newest}"
            require(False, "read_lance(version)", rule, number)
        if (time := instant(number, "read_lance(version)")) is not None:
            with self._explained(f"{self.uri} has no version of {number}"):
                before = time.astimezone() + timedelta(microseconds=1)
                return opened(asof=before.replace(tzinfo=None)), newest
        try:
            return opened(version=number), newest
        except Exception as error:
            why = f"it was cleaned up ({type(error).__name__}), and the newest is {newest}"
            raise self._gone(number, why) from error


def _names(table: Any, files: Sequence[Sequence[Any]], uri: str) -> list[list[str]]:
    """The files of fragments by their whole names: those of a shallow clone lie with its original."""
    bases = table.base_paths() if hasattr(table, "base_paths") else {}
    roots = {
        number: listed_as(base.path).rstrip("/") + "/data" * base.is_dataset_root
        for number, base in bases.items()
    }
    return [
        [f"{roots.get(file.base_id, f'{uri}/data')}/{file.path}" for file in each] for each in files
    ]


class LanceRows(RandomAccessSource):
    """The rows of a version, a block for each fragment."""

    is_ours = True

    def __init__(self, table: Any, schema: pa.Schema, uri: str, newest: bool) -> None:
        self._table, self.schema, self._uri = table, schema, uri
        self._fields, self._process = TableFields(table.schema), os.getpid()
        fragments = [fragment.metadata for fragment in table.get_fragments()]
        files = [[file.path for file in each.files] for each in fragments]
        deleted = [
            0 if each.deletion_file is None else each.deletion_file.num_deleted_rows
            for each in fragments
        ]
        #: Of all files, int64 ``[files]``; 0 where it is not known.
        self.file_bytes = np.array(
            [file.file_size_bytes or 0 for each in fragments for file in each.files], dtype=np.int64
        )
        rows = [each.physical_rows - gone for each, gone in zip(fragments, deleted, strict=True)]
        self._deleted = deleted
        names = _names(table, [each.files for each in fragments], uri)
        self.names = [name for of_fragment in names for name in of_fragment]
        self._first_name = [of_fragment[0] for of_fragment in names]
        self._relative = [paths[0] for paths in files]
        blocks = [np.diff(cut_evenly(count, BLOCK_ROWS)) for count in rows]
        self.lengths = np.concatenate([np.zeros(0, dtype=np.int64), *blocks])
        counts = [len(each) for each in blocks]
        self.file_of_block = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        self._starts: IntArray = np.append(0, np.cumsum(self.lengths))
        self._first_row: IntArray = np.append(0, np.cumsum(rows)).astype(np.int64)
        #: Of fragments; set once they are asked for.
        self._deleted_rows: dict[int, IntArray] = {}
        self.epoch_files = [f"version/{table.version}"]
        self._content, self._newest = digest([path for paths in files for path in paths]), newest

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _process=os.getpid())

    def relative_names(self) -> list[str]:
        return self._relative

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        first = int(self._starts[block])
        return self._read(first + start, offset=first + start, limit=stop - start)

    def take(self, index: IntArray) -> Any:
        return self._read(int(index[0]) if len(index) else 0, index)

    def _read(self, first: int, index: IntArray | None = None, **scan: int) -> pa.Table:
        if self._process != os.getpid():
            raise ConfigError(
                "read_lance cannot read in a forked process, as its library has threads; use "
                'trainpipes.Loader, or DataLoader(multiprocessing_context="forkserver")'
            )
        names = self.schema.names if self.schema is not None else []
        try:
            if index is not None:
                table = self._table.take(index.tolist(), columns=names)
            else:
                table = self._table.to_table(columns=names, **scan)
        except Exception as error:
            block = int(np.searchsorted(self._starts, first, side="right")) - 1
            name = self._first_name[int(self.file_of_block[block])]  # type: ignore[index]
            name = next((file_name for file_name in self.names if file_name in str(error)), name)
            raise UnreadableError(
                f"{name}: the rows here cannot be read: {type(error).__name__}: {one_line(error):.200}; "
                "restore the file, or read another version",
                path=name,
            ) from error
        return self._conformed(table)

    def _conformed(self, table: pa.Table) -> pa.Table:
        schema: Any = self.schema
        if table.schema.equals(schema):
            return table
        columns = []
        for field in schema:
            column, whole = (
                one_chunk(table.column(field.name)),
                self._fields.schema.field(field.name),
            )
            columns.append(self._fields.conformed(column, field, whole, lambda: Place(self._uri)))
        return pa.table(columns, schema=schema)

    def place(self, block: int, row: int) -> Place:
        fragment = int(self.file_of_block[block])  # type: ignore[index]
        row = int(self._starts[block] - self._first_row[fragment]) + row
        if self._deleted[fragment]:
            numbers = np.array([row], dtype=np.int64)
            row = int(with_deleted(numbers, self.deleted_rows(fragment))[0])
        return Place(self._first_name[fragment], row=row)

    def deleted_rows(self, fragment: int) -> IntArray:
        if not self._deleted[fragment]:
            return NO_ROWS
        if fragment not in self._deleted_rows:
            fragment_rows = self._table.get_fragments()[fragment]
            found = fragment_rows.to_table(columns=[], with_row_address=True).column(0)
            rows = to_numpy(one_chunk(found)).astype(np.uint64) & np.uint64(0xFFFFFFFF)
            every = np.arange(len(rows) + self._deleted[fragment], dtype=np.int64)
            self._deleted_rows[fragment] = np.setdiff1d(every, rows.astype(np.int64))
        return self._deleted_rows[fragment]

    def block_key(self, block: int) -> Any:
        key = [self._content, int(self._table.version), block, int(self.lengths[block])]
        fragment = int(self.file_of_block[block])  # type: ignore[index]
        return [key, COUNTED] if self._deleted[fragment] else key

    def fingerprint(self) -> dict[str, Any]:
        rows = int(self._starts[-1])
        return {
            "table": "lance",
            "version": int(self._table.version),
            "rows": rows,
            "files": self._content,
            **(COUNTED if any(self._deleted) else {}),
        }

    def describe(self) -> list[tuple[str, str]]:
        gone = sum(self._deleted)
        several = np.count_nonzero(self._deleted)
        newest = ", the newest" if self._newest else ""
        return [
            ("fragments", f"{len(self._deleted):,}"),
            ("rows", f"{int(self._starts[-1]):,}"),
            ("version", f"{self._table.version}{newest}"),
            ("deleted rows", f"{gone:,} in {several:,} fragments" if gone else "none"),
        ]
