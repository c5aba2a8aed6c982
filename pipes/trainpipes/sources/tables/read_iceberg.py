from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.checks import need, require, wrong
from trainpipes.columns.arrays import one_chunk, to_numpy
from trainpipes.errors import UnreadableError
from trainpipes.filesystems.retry import Retry
from trainpipes.interfaces.quarantine import OnBadRow
from trainpipes.sources.files.list_files import PREFETCH_BYTES, checked_options
from trainpipes.sources.parquet_filter import Bounds, FileBounds, ordered
from trainpipes.sources.tables.table import ReadTable, instant
from trainpipes.sources.tables.table_files import (
    IN_FILE,
    PHYSICAL,
    TableFields,
    TableVersion,
    fields_of,
    log_bounds,
)

#: What pyiceberg calls options of S3, and fsspec.
OF_S3 = {
    "s3.access-key-id": "key", "s3.secret-access-key": "secret", "s3.session-token": "token",
    "s3.endpoint": "endpoint_url",
}  # fmt: skip


class ReadIceberg(ReadTable):
    """Reads a snapshot of an Iceberg table as Arrow.

    ``pyiceberg`` says which files make the snapshot and which of their rows are deleted; the rows are read
    as ``read_parquet`` reads them. Columns are known by their ids: those that were added, renamed, widened or
    dropped come as the snapshot has them. Without ``snapshot_id`` a run reads the snapshot that is the newest
    when it begins: its states name it, and a resume reads that version.

    Args:
        table: its name in the catalog, such as ``"lake.events"``; a ``pyiceberg`` table, of which name and
            catalog are kept; or a path or URL of a metadata file (``.metadata.json``).
        snapshot_id: of the snapshot, or a time such as ``"2026-05-01T12:00:00Z"`` for what was the newest
            then. None for the newest when the run begins.
        columns: names of columns, as in ``read_parquet``; None for all.
        filter: as in ``read_parquet``; files are left out by the statistics of the manifests, too, before a
            footer is read.
        catalog: its name in ``.pyiceberg.yaml``, or its properties, of which ``name`` is one; None for the
            default one. Values of properties are not shown, but a config has them: name the catalog where
            there are secrets.
        storage_options: options of fsspec for the files, if the catalog's are not enough; never shown or
            saved.
        on_error: for rows of damaged files, as in ``read_parquet``.
        refresh: "epoch" for the newest snapshot of each epoch; see ``list_files``.
        retry: how long failing requests for files are tried again.
        cache_dir, cache_bytes, prefetch_bytes: as in ``list_files``.

    Raises:
        MissingExtraError: ``pyiceberg`` is not installed.
        MissingFilesError: there is no such table or snapshot, or its files are gone.
        UnreadableError: the catalog or a file cannot be read; files are no Parquet, or rows are deleted by
            equality, which ``pyiceberg`` does not read.

    >>> import pathlib, tempfile, pyarrow as pa, trainpipes as tp
    >>> from pyiceberg.catalog import load_catalog
    >>> folder = tempfile.mkdtemp()
    >>> lake = {"name": "lake", "type": "sql", "warehouse": f"file://{folder}"}
    >>> lake["uri"] = f"sqlite:///{folder}/lake.db"
    >>> catalog = load_catalog(**lake)
    >>> catalog.create_namespace("logs")
    >>> table = catalog.create_table("logs.events", schema=pa.schema([("x", pa.int64())]))
    >>> table.append(pa.table({"x": [1, 2, 3]}))
    >>> [row["x"] for row in tp.read_iceberg("logs.events", catalog=lake)]
    [1, 2, 3]
    >>> catalog.close()
    """

    free = frozenset({"table", "snapshot_id", "catalog"})

    table: Any
    snapshot_id: int | str | datetime | None = None
    columns: Sequence[str] | None = None
    filter: pc.Expression | Sequence[Any] | None = None
    _: KW_ONLY
    catalog: str | Mapping[str, Any] | None = None
    storage_options: Mapping[str, Any] | None = None
    on_error: OnBadRow = "raise"
    refresh: Literal["epoch"] | None = None
    retry: Retry | Mapping[str, Any] = Retry()
    cache_dir: str | os.PathLike[str] | None = None
    cache_bytes: int | str = "100GB"
    prefetch_bytes: int | str = PREFETCH_BYTES

    _uri, _number = "table", "snapshot_id"

    def check(self) -> None:
        if hasattr(self.table, "metadata_location") and hasattr(self.table, "catalog"):
            from pyiceberg.table import StaticTable

            known = self.table.catalog
            saved: dict[str, Any] = {"table": ".".join(self.table.name())}
            if isinstance(self.table, StaticTable):
                saved = {"table": self.table.metadata_location}
            elif self.catalog is None:
                saved["catalog"] = {"name": known.name, **known.properties}
            self._set(**saved)
        good = isinstance(self.table, str | os.PathLike) and str(self.table).strip()
        rule = "a name in a catalog, a pyiceberg table, or a path of a metadata file"
        require(good, "read_iceberg(table)", rule, self.table)
        self._set(table=os.fspath(self.table))
        if isinstance(self.snapshot_id, datetime):
            self._set(snapshot_id=self.snapshot_id.isoformat())
        instant(self.snapshot_id, "read_iceberg(snapshot_id)")
        if self.catalog is not None and not isinstance(self.catalog, str):
            self._set(catalog=checked_options(self.catalog, "read_iceberg(catalog)"))
        super().check()

    def _version(self, number: Any) -> TableVersion:
        need("pyiceberg", "read_iceberg")
        with self._opened() as table:
            return self._version_of(table, number)

    def _version_of(self, table: Any, number: Any) -> TableVersion:
        newest = table.current_snapshot()
        snapshot, schema = self._snapshot(table, number)
        with self._explained(f"the files of snapshot {snapshot} of {self.table} cannot be listed"):
            tasks, deleted = _planned(table, snapshot)
        tasks.sort(key=lambda task: task.file.file_path)
        odd = [t.file for t in tasks if t.file.file_format.name != "PARQUET"]
        if odd:
            raise UnreadableError(
                f"read_iceberg: {odd[0].file_path} is {odd[0].file_format.name}, and Parquet files are read; "
                "rewrite the table's files as Parquet",
                path=odd[0].file_path,
            )
        schema_id = None if not snapshot else table.snapshot_by_id(snapshot).schema_id
        fields_left = (
            snapshot
            if schema_id in (None, schema.schema_id) and snapshot
            else f"{snapshot}:{schema.schema_id}"
        )
        fields = TableFields(_arrow_schema(table, schema), by_number=True)
        return TableVersion(
            fields_left,
            snapshot == (newest.snapshot_id if newest else 0),
            f"iceberg {table.metadata.table_uuid}",
            fields,
            _path(table.location()),
            [_path(task.file.file_path) for task in tasks],
            pa.table({}),
            {n: deleted[t.file.file_path] for n, t in enumerate(tasks) if t.file.file_path in deleted},
            absent=_absent(table, schema, tasks),
            bounds=ManifestBounds(schema, [task.file for task in tasks]),
            storage_options=_of_fsspec(table.io.properties),
        )  # fmt: skip

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The table; its catalog is closed after use, since it may be a connection to a database."""
        from pyiceberg.catalog import load_catalog
        from pyiceberg.table import StaticTable

        where = (
            f"of the catalog {self.catalog}" if isinstance(self.catalog, str) else "of the catalog"
        )
        with ExitStack() as catalogs:
            with self._explained(f"the Iceberg table {self.table} {where} cannot be opened"):
                properties = {} if not isinstance(self.catalog, Mapping) else dict(self.catalog)
                if self.table.endswith(".metadata.json"):
                    properties = _of_pyiceberg(self.storage_options or {}) | properties
                    table: Any = StaticTable.from_metadata(self.table, properties)
                else:
                    name = (
                        self.catalog
                        if isinstance(self.catalog, str)
                        else properties.pop("name", None)
                    )
                    catalog = catalogs.enter_context(load_catalog(name, **properties))
                    table = catalog.load_table(self.table)
            yield table

    def _snapshot(self, table: Any, number: Any) -> tuple[int, Any]:
        """The snapshot's id, 0 for none, and the schema that it is read by."""
        schemas, text = table.schemas(), str(number)
        if number is None:
            newest = table.current_snapshot()
            return (0 if newest is None else newest.snapshot_id), table.schema()
        if self.only is None and (time := instant(number, "read_iceberg(snapshot_id)")) is not None:
            snapshot = table.snapshot_as_of_timestamp(int(time.timestamp() * 1000))
            if snapshot is None:
                way = "name a later time"
                raise wrong("read_iceberg(snapshot_id)", "a time of a snapshot", number, way)
        else:
            known, _, schema = text.partition(":")
            if known == "0" and schema:
                return 0, schemas[int(schema)]
            snapshot = table.snapshot_by_id(int(known))
            if snapshot is None:
                raise self._gone(known, "the table has no such snapshot, or it has expired")
            if schema:
                return snapshot.snapshot_id, schemas[int(schema)]
        return snapshot.snapshot_id, schemas.get(snapshot.schema_id, table.schema())


def _planned(table: Any, snapshot: int) -> tuple[list[Any], dict[str, Any]]:
    """The files of a snapshot, and the rows of them that are deleted, ascending, by their paths."""
    from pyiceberg.io.pyarrow import _read_all_delete_files

    if not snapshot:
        return [], {}
    tasks = list(table.scan(snapshot_id=snapshot).plan_files())
    deleted = {}
    for path, parts in _read_all_delete_files(table.io, tasks).items():
        rows = [to_numpy(one_chunk(part)).astype(np.int64) for part in parts]
        deleted[path] = np.unique(np.concatenate(rows))
    return tasks, deleted


def _arrow_schema(table: Any, schema: Any) -> pa.Schema:
    """The columns, with their ids, and with all names that a mapping gives to those of files without ids."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    whole, mapping = schema_to_pyarrow(schema), table.metadata.name_mapping()
    if mapping is None:
        return whole

    def named(field: pa.Field, known: Mapping[int, Any]) -> pa.Field:
        known_field = known.get(int(field.metadata[IN_FILE]))
        if known_field is None:
            return field
        inner = {each.field_id: each for each in known_field.fields}
        kind = field.type
        if pa.types.is_struct(kind):
            field = field.with_type(pa.struct([named(f, inner) for f in fields_of(kind)]))
        elif pa.types.is_map(kind):
            each = named(kind.key_field, inner), named(kind.item_field, inner)
            field = field.with_type(pa.map_(*each))
        elif pa.types.is_large_list(kind):
            field = field.with_type(pa.large_list(named(kind.value_field, inner)))
        names = "\0".join(known_field.names).encode()
        return field.with_metadata({**field.metadata, PHYSICAL: names})

    return pa.schema([named(field, {f.field_id: f for f in mapping.root}) for field in whole])


@dataclass(frozen=True, eq=False)
class ManifestBounds:
    """The least and the greatest values of columns in each file, as the manifests have them."""

    schema: Any
    files: Sequence[Any]

    def __call__(self, names: Sequence[str]) -> FileBounds:
        fields = {each.name: each for each in self.schema.fields if each.field_type.is_primitive}
        return [
            {
                (name,): bounds
                for name in names
                if name in fields and (bounds := self._of(file, fields[name])) is not None
            }
            for file in self.files
        ]

    def _of(self, file: Any, column: Any) -> Bounds | None:
        from pyiceberg.conversions import from_bytes
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        kind, number = schema_to_pyarrow(column.field_type), column.field_id
        limits: list[Any] = []
        for known in (file.lower_bounds, file.upper_bounds):
            content = (known or {}).get(number)
            try:  # a narrower type's, before the column was widened, does not fit
                value = None if content is None else from_bytes(column.field_type, content)
                limits.append(None if value is None else ordered(value, kind))
            except (ValueError, TypeError, OverflowError, struct.error, pa.ArrowException):
                limits.append(None)
        nulls, rows = (
            (known or {}).get(number) for known in (file.null_value_counts, file.value_counts)
        )
        return log_bounds(limits[0], limits[1], nulls, rows)


def _absent(table: Any, schema: Any, tasks: Sequence[Any]) -> list[dict[str, Any]]:
    """For each file, values of columns that it may lack: defaults, and those of its partition."""
    usual = {f.name: f.initial_default for f in schema.fields if f.initial_default is not None}
    names = {field.field_id: field.name for field in schema.fields}
    specs: dict[int, list[tuple[int, str]]] = {
        number: [
            (n, names[part.source_id])
            for n, part in enumerate(spec.fields)
            if str(part.transform) == "identity" and part.source_id in names
        ]
        for number, spec in table.specs().items()
    }
    absent = []
    for task in tasks:
        parts = {name: task.file.partition[n] for n, name in specs.get(task.file.spec_id, ())}
        absent.append({**usual, **parts})
    return absent


def _path(location: str) -> str:
    """A location as it is opened; of this machine the path, without the slashes that some leave out."""
    return f"/{location[5:].lstrip('/')}" if location.startswith("file:") else location


def _of_pyiceberg(options: Mapping[str, Any]) -> dict[str, str]:
    named = {name: options[key] for name, key in OF_S3.items() if options.get(key)}
    if region := (options.get("client_kwargs") or {}).get("region_name"):
        named["s3.region"] = region
    return named | ({"s3.anonymous": "true"} if options.get("anon") else {})


def _of_fsspec(properties: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {OF_S3[k]: v for k, v in properties.items() if k in OF_S3}
    if region := properties.get("s3.region"):
        options["client_kwargs"] = {"region_name": region}
    if str(properties.get("s3.anonymous")).lower() == "true":
        options["anon"] = True
    return options
