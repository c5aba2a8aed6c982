from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import Any, Literal
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.checks import IntArray, need, require
from trainpipes.columns.arrays import is_text, python_to_arrow, to_numpy
from trainpipes.errors import UnreadableError
from trainpipes.filesystems.retry import Retry
from trainpipes.interfaces.quarantine import OnBadRow
from trainpipes.sources.files.list_files import PREFETCH_BYTES
from trainpipes.sources.parquet_filter import FileBounds
from trainpipes.sources.tables.table import ReadTable, instant, of_object_store
from trainpipes.sources.tables.table_files import TableFields, TableVersion, log_bounds

#: What a table may ask of its readers; that there may be variants, deltalake says of all.
FEATURES = {
    "deletionVectors", "columnMapping", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "variantType",
}  # fmt: skip


#: Bytes as a log has them.
ESCAPED = re.compile(rb"(\\u00[0-9a-fA-F]{2})+")
#: Characters of a text from which a log may have the first ones only.
CUT_TEXT = 32


class ReadDelta(ReadTable):
    """Reads a version of a Delta Lake table as Arrow.

    ``deltalake`` says which files make the version, their partition values and the rows that are deleted;
    the rows are read as ``read_parquet`` reads them. Columns that were added, renamed, widened or dropped
    come as the version has them, null where a file is older. Without ``version`` a run reads the version
    that is the newest when it begins: its states name it, and a resume reads that version.

    Args:
        uri: a path or URL of the table.
        version: its number, or a time such as ``"2026-05-01T12:00:00Z"`` for what was the newest then. None
            for the newest when the run begins.
        columns: names of columns, as in ``read_parquet``; None for all.
        filter: as in ``read_parquet``; files are left out by their partitions and by the statistics of the
            log, too, before a footer is read.
        storage_options: options of fsspec, such as credentials, also used for the log; never shown or saved.
        on_error: for rows of damaged files, as in ``read_parquet``.
        refresh: "epoch" for the newest version of each epoch; see ``list_files``.
        retry: how long failing requests for files are tried again.
        cache_dir, cache_bytes, prefetch_bytes: as in ``list_files``.

    Raises:
        MissingExtraError: ``deltalake`` is not installed.
        MissingFilesError: there is no such table or version, or files of it were vacuumed.
        UnreadableError: the log or a file cannot be read, or the table needs a newer reader.

    >>> import pathlib, tempfile, pyarrow as pa, trainpipes as tp
    >>> from deltalake import DeltaTable, write_deltalake
    >>> folder = str(pathlib.Path(tempfile.mkdtemp()) / "events")
    >>> write_deltalake(folder, pa.table({"x": [1, 2, 3]}))
    >>> _ = DeltaTable(folder).delete("x = 2")
    >>> list(tp.read_delta(folder)), len(tp.read_delta(folder, version=0))
    ([{'x': 1}, {'x': 3}], 3)
    """

    free = frozenset({"uri", "version"})

    uri: str | os.PathLike[str]
    version: int | str | datetime | None = None
    columns: Sequence[str] | None = None
    filter: pc.Expression | Sequence[Any] | None = None
    storage_options: Mapping[str, Any] | None = None
    _: KW_ONLY
    on_error: OnBadRow = "raise"
    refresh: Literal["epoch"] | None = None
    retry: Retry | Mapping[str, Any] = Retry()
    cache_dir: str | os.PathLike[str] | None = None
    cache_bytes: int | str = "100GB"
    prefetch_bytes: int | str = PREFETCH_BYTES

    def check(self) -> None:
        self._check_path("Delta")
        super().check()

    def _version(self, number: Any) -> TableVersion:
        need("deltalake", "read_delta")
        table, newest = self._table(number)
        self._check_features(table)
        with self._explained(f"the log of the Delta table {self.uri} cannot be read"):
            adds = pa.table(table.get_add_actions())
            vectors = pa.RecordBatchReader.from_stream(table.deletion_vectors()).read_all()
            about, schema = table.metadata(), pa.schema(table.schema().to_arrow())
        times, paths = (adds.column(name).to_pylist() for name in ("modification_time", "path"))
        order = sorted(range(len(paths)), key=lambda n: (times[n], paths[n]))
        root = _root(str(self.uri))
        urls = [_url(root, paths[n]) for n in order]
        mode = about.configuration.get("delta.columnMapping.mode")
        values = pa.table({})
        if about.partition_columns and urls:
            inner = adds.column("partition").combine_chunks().take(pa.array(order))
            values = pa.table(
                {
                    name: _unescaped(inner.field(name)).cast(schema.field(name).type)
                    for name in about.partition_columns
                }
            )
        fields = TableFields(schema, mode == "id")
        deleted = self._deleted(vectors, urls)
        newest_too = number is None or table.version() == newest
        bounds = None if mode else LogBounds(adds.take(pa.array(order, pa.int64())), schema)
        return TableVersion(
            table.version(), newest_too, f"delta {about.id}", fields, root, urls, values, deleted,
            bounds=bounds,
        )  # fmt: skip

    def _table(self, number: Any) -> tuple[Any, int]:
        """The table at a version, and its newest version."""
        from deltalake import DeltaTable

        options = of_object_store(self.storage_options)
        with self._explained(f"there is no Delta table at {self.uri}, or its log cannot be read"):
            table = DeltaTable(self.uri, storage_options=options)
            newest = int(table.version())
        if number is None or number == newest:
            return table, newest
        if isinstance(number, int) and number > newest:
            rule = f"at most the newest of the table {self.uri}, {newest}"
            require(False, "read_delta(version)", rule, number)
        if (time := instant(number, "read_delta(version)")) is not None:
            with self._explained(f"{self.uri} has no version of {number}"):
                table.load_as_version(time)
                # The first commit, where there is none before that time; with later ones in some versions.
                written = table.history(1)[-1].get("timestamp") or 0
            rule = f"a time at which there was the table {self.uri}"
            known = written <= time.timestamp() * 1000
            require(known, "read_delta(version)", rule, number, "name a later time")
            return table, newest
        try:
            return DeltaTable(self.uri, version=number, storage_options=options), newest
        except Exception as error:
            why = f"its log was cleaned up ({type(error).__name__}), and the newest is {newest}"
            raise self._gone(number, why) from error

    def _check_features(self, table: Any) -> None:
        protocol = table.protocol()
        asked = {*(protocol.reader_features or ())} - FEATURES
        if protocol.min_reader_version > 3 or asked:
            feature = f"reader version {protocol.min_reader_version}"
            feature = f"the feature {min(asked)!r}" if asked else feature
        elif _holds_variants(json.loads(table.schema().to_json())):
            feature = "columns of type variant"
        else:
            feature = ""
        if feature:
            raise UnreadableError(
                f"read_delta: the table {self.uri} needs {feature}, which this reader does not have; write "
                "a copy of the table without it",
                path=str(self.uri),
            )

    def _deleted(self, vectors: pa.Table, urls: Sequence[str]) -> dict[int, IntArray]:
        numbers = {_plain(url): n for n, url in enumerate(urls)}
        deleted = {}
        paths = vectors.column("filepath").to_pylist()
        for path, selection in zip(paths, vectors.column("selection_vector"), strict=True):
            file = numbers.get(_plain(path))
            if file is None:
                said = f"read_delta: rows of {path} are deleted, which is no file of the version"
                raise UnreadableError(f"{said}; repair the log of {self.uri}", path=str(self.uri))
            deleted[file] = np.flatnonzero(~to_numpy(selection.values))
        return deleted


def _holds_variants(kind: Any) -> bool:
    """Whether a type is one of variants, or has them within, as a schema in JSON says it."""
    if not isinstance(kind, dict):
        return bool(kind == "variant")
    inner = [kind.get(key) for key in ("type", "elementType", "keyType", "valueType")]
    return any(map(_holds_variants, [*inner, *kind.get("fields", ())]))


def _unescaped(column: pa.Array) -> pa.Array:
    """A partition's bytes, each of which the log may have as a code such as ``\\u0061``."""
    if not pa.types.is_binary(column.type):
        return column
    values = [
        bytes.fromhex(value.decode().replace("\\u00", ""))
        if value is not None and ESCAPED.fullmatch(value)
        else value
        for value in column.to_pylist()
    ]
    return python_to_arrow(values, column.type)


@dataclass(frozen=True, eq=False)
class LogBounds:
    """The least and the greatest values of columns in each file, as the log has them.

    Of decimals it has rounded ones, and of long texts, perhaps, the first characters: these are left out. Of
    times it cuts microseconds off.
    """

    adds: pa.Table
    schema: pa.Schema

    def __call__(self, names: Sequence[str]) -> FileBounds:
        of_files: FileBounds = [{} for _ in range(len(self.adds))]
        for name in names:
            known = self._columns(name)
            if known is None or not _is_exact(self.schema.field(name).type):
                continue
            for file, bounds_of_file in enumerate(of_files):
                least, most, nulls, rows = (column[file] for column in known)
                bounds = log_bounds(*_whole(least, most), nulls.as_py(), rows.as_py())
                if bounds is not None:
                    bounds_of_file[(name,)] = bounds
        return of_files

    def _columns(self, name: str) -> list[Any] | None:
        columns = []
        for key in ("min", "max", "null_count"):
            if key not in self.adds.column_names or name not in names_within(self.adds, key):
                return None
            columns.append(pc.struct_field(self.adds.column(key), name))
        return [*columns, self.adds.column("num_records")]


def names_within(table: pa.Table, column: str) -> list[str]:
    kind = table.schema.field(column).type
    return [kind.field(n).name for n in range(kind.num_fields)] if pa.types.is_struct(kind) else []


def _is_exact(kind: pa.DataType) -> bool:
    is_ = pa.types
    tests = (is_.is_integer, is_.is_floating, is_.is_date, is_.is_timestamp, is_.is_boolean)
    return is_text(kind) or any(test(kind) for test in tests)


def _whole(least: Any, most: Any) -> tuple[Any, Any]:
    """Bounds that hold for what the log has cut off; None for those that may not."""
    if not (least.is_valid and most.is_valid):
        return None, None
    if is_text(least.type) and max(len(least.as_py()), len(most.as_py())) >= CUT_TEXT:
        return None, None
    if pa.types.is_timestamp(least.type):
        step = pa.scalar(1, pa.duration("ms"))
        return pc.subtract(least, step), pc.add(most, step)
    return least, most


def _root(uri: str) -> str:
    if uri.startswith("file://"):
        uri = unquote(uri.removeprefix("file://"))
    here = "://" not in uri
    return (os.path.abspath(os.path.expanduser(uri)) if here else uri).rstrip("/")


def _url(root: str, path: str) -> str:
    """Where a file of the log is: names are quoted there."""
    path = unquote(path)
    return path.removeprefix("file://") if "://" in path else f"{root}/{path}"


def _plain(url: str) -> str:
    """What is left of the different spellings of a URL."""
    return unquote(unquote(url)).partition("://")[2] or unquote(unquote(url))
