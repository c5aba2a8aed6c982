"""A version's files as blocks of the Parquet reader, without deleted rows; and the table's columns as they
stand in them: by name or number, renamed, narrower, missing.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.checks import IntArray
from trainpipes.columns.arrays import gathered, holds, to_arrow
from trainpipes.columns.columns import rows_that_match, text_of
from trainpipes.columns.types import NoColumn
from trainpipes.engine.planning.row_names import with_deleted
from trainpipes.errors import DataError, SchemaError, known_name
from trainpipes.interfaces.source import Place
from trainpipes.sources import parquet_filter
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.sources.files.file_source import FileSource
from trainpipes.sources.files.formats import cast_to, chosen, inner_paths
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.parquet_footers import RowGroupLayout, scan_footers
from trainpipes.sources.read_parquet import RowGroups

#: Where Arrow and Delta keep a field's number, and Delta the name that files have.
IN_FILE = b"PARQUET:field_id"
IN_DELTA = b"delta.columnMapping.id"
PHYSICAL = b"delta.columnMapping.physicalName"


@dataclass(frozen=True)
class TableFields:
    """The fields of a version of a table, with numbers and names of files as metadata.

    Args:
        schema: all columns.
        by_number: whether files' fields are known by their numbers, where they have numbers.
    """

    schema: pa.Schema
    by_number: bool = False

    def place(self, field: pa.Field, fields: Sequence[pa.Field]) -> int | None:
        """Where a field of the table stands among those of a file; None if the file lacks it.

        Raises:
            NoColumn: it may be one of several.
        """
        places = [n for n, stored in enumerate(fields) if self._is(field, stored)]
        if len(places) > 1:
            names = " and ".join(repr(fields[n].name) for n in places)
            raise NoColumn(f"column {field.name!r} may be {names}, which were both its name once")
        return places[0] if places else None

    def _is(self, field: pa.Field, stored: pa.Field) -> bool:
        about, number = field.metadata or {}, (stored.metadata or {}).get(IN_FILE)
        known = about.get(IN_FILE, about.get(IN_DELTA)) if self.by_number else None
        if known is not None and number is not None:
            return bool(known == number)
        names = about.get(PHYSICAL, field.name.encode()).decode().split("\0")
        return stored.name in names

    def paths(self, wanted: pa.Field, field: pa.Field, stored: pa.Field, path: str) -> list[str]:
        """What of a file's column must be read for a column, or those of its fields that are wanted."""
        inner: list[str] = []
        if pa.types.is_struct(wanted.type):
            for child, whole, part in self._parts(wanted.type, field.type, stored.type):
                if part is not None:
                    inner += self.paths(child, whole, part, f"{path}.{part.name}")
        return inner or [path]

    def _parts(self, wanted: Any, whole: Any, stored: Any) -> list[tuple[Any, Any, Any]]:
        """For each wanted field of a struct: itself, the table's, and the file's."""
        fields = fields_of(stored)
        parts = []
        for child in fields_of(wanted):
            place = self.place(whole.field(child.name), fields)
            parts.append((child, whole.field(child.name), None if place is None else fields[place]))
        return parts

    def named(self, fields: Sequence[pa.Field], table: Sequence[pa.Field]) -> list[pa.Field]:
        """A file's fields by the table's names; those that it does not have by names of no column."""
        renamed = []
        for stored in fields:
            field = next((each for each in table if self._is(each, stored)), None)
            kind = stored.type
            if field is not None and pa.types.is_struct(kind) and pa.types.is_struct(field.type):
                kind = pa.struct(self.named(fields_of(kind), fields_of(field.type)))
            renamed.append(pa.field(f"\0{stored.name}" if field is None else field.name, kind))
        return renamed

    def conformed(
        self, column: pa.Array, wanted: pa.Field, field: pa.Field, place: Callable[[], Place]
    ) -> pa.Array:
        """A file's column as the table has it."""
        kind, whole = wanted.type, field.type
        if not holds(kind, pa.types.is_struct):
            return cast_to(column, wanted, place)
        if column.offset:  # offsets and validity begin with the array then
            column = gathered(column, np.arange(len(column)))
        nulls = column.is_null() if column.null_count else None
        if pa.types.is_struct(kind):
            children = []
            for child, inner_field, part in self._parts(kind, whole, column.type):
                if part is None:
                    children.append(pa.nulls(len(column), child.type))
                else:
                    inner = column.field(column.type.get_field_index(part.name))
                    children.append(self.conformed(inner, child, inner_field, place))
            return pa.StructArray.from_arrays(children, fields=fields_of(kind), mask=nulls)
        if pa.types.is_map(kind):
            keys = self.conformed(column.keys, kind.key_field, whole.key_field, place)
            items = self.conformed(column.items, kind.item_field, whole.item_field, place)
            return pa.MapArray.from_arrays(column.offsets, keys, items, kind, mask=nulls)
        if pa.types.is_fixed_size_list(column.type):
            column = column.cast(pa.list_(column.type.value_field))
        values = self.conformed(column.values, kind.value_field, whole.value_field, place)
        if pa.types.is_large_list(kind):
            offsets = column.offsets.cast(pa.int64())
            return pa.LargeListArray.from_arrays(offsets, values, type=kind, mask=nulls)
        offsets = column.offsets.cast(pa.int32())
        return pa.ListArray.from_arrays(offsets, values, type=kind, mask=nulls)


def fields_of(kind: pa.DataType | pa.Schema) -> list[pa.Field]:
    count = len(kind) if isinstance(kind, pa.Schema) else kind.num_fields
    return [kind.field(n) for n in range(count)]


NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)
#: What a state says of deleted rows: ``sample`` and ``split`` know rows by their numbers in a file.
COUNTED = {"row_numbers": "deleted rows counted"}


@dataclass(frozen=True, eq=False)
class TableVersion:
    """What a format's library says of a version.

    Args:
        number: of the version or snapshot.
        newest: whether it is the newest version.
        table: an identifier of the table.
        fields: its columns.
        root: the table's folder.
        urls: its files, in order.
        constants: values of columns that are the same in all of a file, a row for each file.
        deleted: rows of a file that the version does not have, ascending, by the file's number.
        absent: for each file, values of columns that are not in it; null for others.
        bounds: of columns by their names, bounds of their values in each file, by the log; None if nothing.
        storage_options: those of fsspec that the table itself has.
    """

    number: int | str
    newest: bool
    table: str
    fields: TableFields
    root: str
    urls: list[str]
    constants: pa.Table
    deleted: Mapping[int, IntArray]
    absent: Sequence[Mapping[str, Any]] = ()
    bounds: Callable[[Sequence[str]], parquet_filter.FileBounds] | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)


def rows_of(
    version: TableVersion,
    files: FileList,
    usable: list[int],
    columns: Sequence[str] | None,
    filter: pc.Expression | None,
    caller: str,
    uri: str,
) -> TableSource:
    """The rows of some of a version's files, those that may match a filter."""
    fields = version.fields
    whole = pa.schema(chosen(fields.schema, None, caller, uri).values())
    needed = [] if filter is None else parquet_filter.needed_columns(filter, whole, caller)
    if columns is not None:
        inside = inner_paths(columns, whole.names)
        columns = [*columns, *(name for name in needed if name not in inside)]
    schema = pa.schema(chosen(fields.schema, columns, caller, uri).values())
    constant = [name for name in version.constants.column_names if name in schema.names]
    constants, pruned = version.constants.select(constant), 0
    if filter is not None:
        parquet_filter.check_fits(filter, schema, caller)
        of_log = None if version.bounds is None else version.bounds(needed)
        facts = _facts(constants, len(files))
        may = set(parquet_filter.may_hold(filter, schema, facts, of_log).tolist()) if usable else ()
        matching = [n for n in usable if n in may] or usable[:1]
        pruned, usable = len(usable) - len(matching), matching
    numbers = np.array(usable, dtype=np.int64)
    files, constants = files.pick(numbers), constants.take(to_arrow(numbers))
    bounds: dict[int, parquet_filter.FileBounds] = {}

    def look(file: int, metadata: Any, data: FileBytes) -> None:
        stored = fields_of(metadata.schema.to_arrow_schema())
        named = pa.schema(fields.named(stored, fields_of(fields.schema)))
        bounds[file] = parquet_filter.bounds_of(metadata, data, filter, named)

    sized = None if columns is None else _names_in_files(fields.schema, schema.names)
    footers = scan_footers(files, sized, caller, look=None if filter is None else look)
    facts, layouts = _facts(constants, len(files)), []
    known: dict[int, FileColumns] = {}  # files share schemas
    for file, layout in enumerate(footers.layouts):
        stored = layout.schema
        if id(stored) not in known:
            try:
                known[id(stored)] = FileColumns.of(fields, schema, constant, stored)
            except NoColumn as error:
                name = files.names[file]
                raise SchemaError(
                    f"{caller}: in {name}, whose columns have no ids, {error}: write the table's rows anew, "
                    "or leave the column out by columns=[...]",
                    path=name,
                    stage=caller,
                ) from None
        missing = known[id(stored)].missing
        absent = version.absent[usable[file]] if version.absent else {}
        known_values = {n: pa.scalar(absent.get(n), schema.field(n).type) for n in missing}
        for name, value in known_values.items():
            known_value = pc.field(name) == value if value.is_valid else pc.field(name).is_null()
            facts[file] = [*facts[file], known_value]
        values = {name: constants.column(name)[file] for name in constant} | known_values
        deleted = version.deleted.get(usable[file], NO_ROWS)
        layouts.append(
            _of_version(layout, values, deleted, known[id(stored)], files.names[file], caller)
        )
    rows = np.concatenate([NO_ROWS, *(each.rows for each in layouts)])
    gone = [len(each.deleted) for each in layouts]
    many = f"{sum(gone):,} in {np.count_nonzero(gone):,} files" if any(gone) else "none"
    described = [("version", f"{version.number}{', the newest' if version.newest else ''}")]
    described += [("deleted rows", many)]
    besides: dict[str, Any] = {"table": version.table, "version": version.number}
    besides |= COUNTED if any(gone) else {}
    unread = None
    if filter is not None:
        unread = np.ones(len(rows), dtype=np.bool_)
        if {*needed} <= {*constant}:
            matches = rows_that_match(constants, filter)
            unread = ~np.repeat(matches, [len(each.rows) for each in layouts])
        else:
            of_groups = [facts[n] for n, each in enumerate(layouts) for _ in each.rows]
            of_files = [group for file in sorted(bounds) for group in bounds[file]]
            unread[parquet_filter.may_hold(filter, schema, of_groups, of_files or None)] = False
        besides |= {"filter": text_of(filter), "unread": int(rows[unread].sum())}
        said = f"{int((~unread).sum()):,} of {len(rows):,} row groups may have rows that match"
        said += f"; {pruned:,} more files are left out by the log" if pruned else ""
        described.append(("filter", said))
    format = TableFiles(
        columns, schema, False, files.prefetch_bytes // 2, described, footers.parsed, fields=fields
    )
    sizes = [NO_ROWS, *(layout.group_bytes for layout in layouts)]
    source = TableSource(
        footers.store, format, layouts=layouts, columns=columns, schema=schema,
        row_bytes=footers.row_bytes, block_bytes=np.concatenate(sizes).astype(float), besides=besides,
    )  # fmt: skip
    source.unread, source.epoch_files = unread, [f"version/{version.number}"]
    source.root = version.root
    source.is_filtered = filter is not None and {*needed} <= {*constant}
    return source


def log_bounds(
    least: pa.Scalar | None, most: pa.Scalar | None, nulls: int | None, rows: int | None
) -> parquet_filter.Bounds | None:
    """What a log says of a column's values in a file; None if that tells nothing."""
    if nulls is not None and rows is not None and nulls == rows:
        return parquet_filter.Bounds(None, None, nulls=True)
    for value in (least, most):
        if value is None or not value.is_valid or _is_nan(value):
            return None
    return parquet_filter.Bounds(least, most, nulls=nulls != 0)


def _is_nan(value: pa.Scalar) -> bool:
    return bool(pa.types.is_floating(value.type)) and value.as_py() != value.as_py()


def _facts(constants: pa.Table, files: int) -> list[parquet_filter.Facts]:
    return (
        parquet_filter.facts_of(constants) if constants.num_columns else [[] for _ in range(files)]
    )


def _names_in_files(schema: pa.Schema, names: Sequence[str]) -> list[str]:
    """What files are likely to call columns, for the sizes of these."""
    about = [(name, schema.field(name).metadata or {}) for name in names]
    return [*names, *(metadata[PHYSICAL].decode() for _, metadata in about if PHYSICAL in metadata)]


@dataclass(frozen=True)
class FileColumns:
    """What is read of the files of a schema, by the names in them, for columns of the table."""

    read: list[str]
    names: dict[str, str]
    missing: list[str]

    @staticmethod
    def of(
        fields: TableFields, schema: pa.Schema, constant: Sequence[str], stored: pa.Schema
    ) -> FileColumns:
        inside, read, names, missing = fields_of(stored), list[str](), dict[str, str](), list[str]()
        for wanted in fields_of(schema):
            if wanted.name in constant:
                continue
            whole = fields.schema.field(wanted.name)
            if (place := fields.place(whole, inside)) is None:
                missing.append(wanted.name)
            else:
                names[wanted.name] = inside[place].name
                read += fields.paths(wanted, whole, inside[place], inside[place].name)
        return FileColumns(read, names, missing)


@dataclass(frozen=True, eq=False, kw_only=True)
class TableLayout(RowGroupLayout):
    """A file's row groups without deleted rows; ``whole``: rows of each with these."""

    whole: IntArray
    deleted: IntArray
    columns: FileColumns

    @property
    def written(self) -> IntArray:
        return self.whole


def _of_version(
    layout: RowGroupLayout, values: dict[str, pa.Scalar], deleted: IntArray, columns: FileColumns,
    name: str, caller: str,
) -> TableLayout:  # fmt: skip
    ends = np.append(0, np.cumsum(layout.rows))
    if len(deleted) and not 0 <= deleted[0] <= deleted[-1] < ends[-1]:
        raise DataError(
            f"{caller}: {name}: rows {deleted[0]} to {deleted[-1]} are deleted, and it has {ends[-1]:,}: the "
            "file is not the one that the table's log means; restore it",
            path=name,
        )
    about = {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
    about["rows"] = layout.rows - np.diff(np.searchsorted(deleted, ends))
    shown = {key: str(value) for key, value in values.items() if value.is_valid}
    note = f"\0{shown}" if shown else ""
    note += f"\0deleted {len(deleted)} {zlib.crc32(deleted.tobytes())}" if len(deleted) else ""
    about |= {"folder": values, "note": note}
    return TableLayout(**about, whole=layout.rows, deleted=deleted, columns=columns)


@dataclass(eq=False)
class TableFiles(RowGroups):
    """The Parquet files of a table as a format: without deleted rows, as the table has the columns."""

    int96 = "us"  # as tables have times

    fields: TableFields = field(default_factory=lambda: TableFields(pa.schema([])))

    def read_columns(self, layout: Any) -> Sequence[str] | None:
        columns: list[str] = layout.columns.read
        return columns

    def decode(
        self, data: Any, layout: Any, block: int, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        first, place = int(layout.written[:block].sum()), partial(Place, data.name)
        for written in data.batches(block):
            last = first + len(written)
            batch = self._of_table(written, layout, place)
            low, high = np.searchsorted(layout.deleted, [first, last]).tolist()
            if high > low:
                keep = np.ones(len(batch), dtype=np.bool_)
                keep[layout.deleted[low:high] - first] = False
                batch = gathered(batch, np.flatnonzero(keep))
            first = last
            yield batch

    def _of_table(
        self, batch: pa.RecordBatch, layout: Any, place: Callable[[], Place]
    ) -> pa.RecordBatch:
        columns = []
        for wanted in self.schema:
            value = layout.folder.get(wanted.name)
            if value is None:
                whole, name = (
                    self.fields.schema.field(wanted.name),
                    layout.columns.names[wanted.name],
                )
                columns.append(self.fields.conformed(batch.column(name), wanted, whole, place))
            elif value.is_valid:
                columns.append(pa.repeat(value, len(batch)))
            else:
                columns.append(pa.nulls(len(batch), wanted.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


class TableSource(FileSource):
    """The rows of a version; a place says the row in the file, deleted ones counted."""

    root = ""

    def relative_names(self) -> list[str]:
        """The names of files below the table's folder, which stay as files come beside them."""
        root = f"{known_name(self.root).rstrip('/')}/"
        return [name.removeprefix(root) for name in self.files.known_names()]

    def deleted_rows(self, file: int) -> IntArray:
        layout: Any = self.layouts[file]
        deleted: IntArray = layout.deleted
        return deleted

    def place(self, block: int, row: int) -> Place:
        numbers = np.array([int(self.begins[block]) + row], dtype=np.int64)
        numbers = with_deleted(numbers, self.deleted_rows(int(self.file_of_block[block])))
        return dataclasses.replace(super().place(block, row), row=int(numbers[0]))

    def block_key(self, block: int) -> Any:
        key = super().block_key(block)
        return [key, COUNTED] if len(self.deleted_rows(int(self.file_of_block[block]))) else key
