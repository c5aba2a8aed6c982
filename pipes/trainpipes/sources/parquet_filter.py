"""Which rows and columns of Parquet files a pipeline wants: those that a filter may let through, by the
statistics of row groups and pages, and those that stages above ask for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import and_
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as fs

from trainpipes._internal.checks import IntArray
from trainpipes._internal.messages import nearest
from trainpipes.columns.arrays import is_text, python_to_arrow, to_arrow, without_views
from trainpipes.columns.columns import as_expression, filtered, text_of, why_unfit
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError, SchemaError, shown
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.sources.files import formats
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.remote_bytes import open_bytes
from trainpipes.sources.parquet_footers import Probe, parse_footer, read_footer

#: A value may lie between the least and the greatest, be null, or be NaN, of which footers say nothing. The
#: filter is asked of so many mixtures of these for a row group, at most; more columns tell nothing.
MOST_CASES = 36
MISSING = re.compile(r"FieldRef\.Name\((.*?)\)")
ORDERED = (
    pa.types.is_boolean, pa.types.is_integer, pa.types.is_float32, pa.types.is_float64,
    pa.types.is_decimal, pa.types.is_date32, pa.types.is_timestamp, pa.types.is_string,
    pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary,
    pa.types.is_large_binary, pa.types.is_binary_view,
)  # fmt: skip

#: What holds for all rows of a row group.
Facts = list[pc.Expression]


@dataclass(frozen=True)
class Bounds:
    """A column's values in a row group, as its footer has them."""

    least: Any
    most: Any
    nulls: bool


#: Of each row group, by the column's path.
FileBounds = list[dict[tuple[str, ...], Bounds]]


def checked_filter(filter: Any, caller: str) -> pc.Expression | None:
    if filter is None:
        return None
    expression = as_expression(filter, f"{caller}(filter)")
    if "FieldPath(" in text_of(expression):
        raise ConfigError(
            f"{caller}(filter) names columns, not their numbers, got {shown(expression)}"
        )
    return expression


def needed_columns(filter: pc.Expression, schema: pa.Schema, caller: str) -> list[str]:
    """The columns that a filter asks for; more where it does not fit their types."""
    said = text_of(filter)
    named = [n for n, field in enumerate(schema) if field.name in said or "..." in said]
    problem = _problem(filter, schema)
    if problem is None:
        named = [n for n in named if _problem(filter, schema.remove(n)) is not None]
    missing = _missing(problem)
    if missing and missing[0] not in schema.names:
        top, *inner = missing[0].split(".")
        path = ", ".join(map(repr, [top, *inner]))
        is_struct = top in schema.names and pa.types.is_struct(schema.field(top).type)
        way = f"; a field of {top!r} is pc.field({path})" if inner and is_struct else ""
        raise SchemaError(
            f"{caller}: filter names a column {'.'.join(missing)!r}{nearest(missing[0], schema.names)}, "
            f"and the columns are {schema.names}{way}",
            stage=caller,
        )
    return [schema.field(n).name for n in named]


def check_fits(filter: pc.Expression, schema: pa.Schema, caller: str) -> None:
    # Times with a zone are compared with those without where there is a row.
    problem = _problem(filter, schema) or _problem(filter, schema, 1)
    if problem is None:
        return
    said = text_of(filter)
    types = {field.name: str(field.type) for field in schema if field.name in said}
    cure = "; where columns= names some fields of a column, name those of the filter, too"
    raise SchemaError(
        f"{caller}: filter {said} does not fit the columns {types}: {why_unfit(problem)}"
        f"{cure if _missing(problem) else ''}",
        stage=caller,
    )


def _problem(filter: pc.Expression, schema: pa.Schema, rows: int = 0) -> Exception | None:
    """Why Arrow cannot ask the filter of so many rows of nulls."""
    nulls = [pa.nulls(rows, kind) for kind in schema.types]
    try:
        filtered(pa.Table.from_arrays(nulls, schema=schema), filter)
    except (pa.ArrowException, KeyError) as error:
        return error
    return None


def _missing(problem: Exception | None) -> list[str]:
    said = str(problem).split(" in ")[0]
    return MISSING.findall(said) if said.startswith("No match for") else []


# What footers say


def bounds_of(
    metadata: Any, data: FileBytes, filter: pc.Expression, schema: pa.Schema | None = None
) -> FileBounds:
    """The bounds of columns that a filter names; ``schema``: the file's, by other names."""
    said, every = text_of(filter), list(_leaves(schema or metadata.schema.to_arrow_schema()))
    leaves = {n: path for n, (path, _) in enumerate(every) if path and all(p in said for p in path)}
    of_groups: FileBounds = [{} for _ in range(metadata.num_row_groups)]
    if not leaves or len(every) != metadata.num_columns:
        return of_groups
    probe = Probe.of(metadata, data)
    for number, of_group in enumerate(of_groups):
        group = metadata.row_group(number)
        # Of a column that cannot be read nothing may be asked; it is found when it is read.
        if group.num_rows and probe.passes(number, list(leaves)):
            for leaf, path in leaves.items():
                column, kind = metadata.schema.column(leaf), every[leaf][1]
                bounds = _bounds(group.column(leaf), column, kind, group.num_rows)
                if bounds is not None:
                    of_group[path] = bounds
    return of_groups


def _leaves(fields: Iterable[pa.Field], path: tuple[str, ...] = ()) -> Iterable[Any]:
    """The path and type of each Parquet column; no path within lists and maps."""
    for field in fields:
        kind, leaf = formats.plain(field).type, (*path, field.name)
        if pa.types.is_struct(kind):
            yield from _leaves([kind.field(n) for n in range(kind.num_fields)], leaf)
        elif kind.num_fields:
            yield from (
                ((), inner) for _, inner in _leaves(kind.field(n) for n in range(kind.num_fields))
            )
        else:
            yield leaf, kind


def _bounds(chunk: Any, column: Any, kind: pa.DataType, rows: int) -> Bounds | None:
    if pa.types.is_null(kind):
        return Bounds(None, None, nulls=True)
    if chunk.physical_type != column.physical_type or chunk.physical_type == "INT96":
        return None
    statistics = chunk.statistics
    if statistics is None:
        return None
    nulls = statistics.null_count if statistics.has_null_count else None
    if column.max_definition_level and nulls == rows:
        return Bounds(None, None, nulls=True)
    if not statistics.has_min_max:
        return None
    try:
        least, most = ordered(statistics.min, kind), ordered(statistics.max, kind)
    except (ValueError, TypeError, OverflowError, pa.ArrowException):
        return None  # such as text that is cut within a character
    if least is None or most is None:
        return None
    return Bounds(least, most, nulls=bool(column.max_definition_level) and nulls != 0)


def ordered(value: Any, kind: pa.DataType) -> Any:
    """A footer's value as Arrow's; None for NaN, and for types that Arrow may order differently."""
    return (
        pa.scalar(value, kind) if value == value and any(test(kind) for test in ORDERED) else None
    )


# What follows


def facts_of(folders: pa.Table) -> list[Facts]:
    """Facts of each file, by the columns in the names of its folders."""
    columns = [(pc.field(name), folders.column(name)) for name in folders.column_names]
    return [
        [
            field == column[file] if column[file].is_valid else field.is_null()
            for field, column in columns
        ]
        for file in range(len(folders))
    ]


def _cases(
    known: Facts,
    bounds: Mapping[tuple[str, ...], Bounds],
    types: Mapping[tuple[str, ...], pa.DataType],
    text: bool,
) -> list[Facts]:
    """The cases: for each row of a row group, one of them holds."""
    cases = [known]
    for path, bound in bounds.items():
        kind = types.get(path)
        if kind is None or (is_text(kind) and not text):
            continue
        field, either = pc.field(*path), []
        if bound.least is not None:
            try:
                least, most = bound.least.cast(kind), bound.most.cast(kind)
            except (pa.ArrowException, ValueError, TypeError):
                continue
            alike = least.equals(most) and not (is_text(kind) or pa.types.is_floating(kind))
            either.append(field == least if alike else (field >= least) & (field <= most))
            if pa.types.is_floating(kind):
                either.append(field == pa.scalar(float("nan"), kind))
        if bound.nulls:
            either.append(field.is_null())
        if len(cases) * len(either) <= MOST_CASES:
            cases = [[*case, fact] for case, fact in product(cases, either)]
    return cases


def may_hold(
    filter: pc.Expression,
    schema: pa.Schema,
    known: Sequence[Facts],
    bounds: Sequence[Mapping[tuple[str, ...], Bounds]] | None = None,
    text: bool = True,
) -> IntArray:
    import pyarrow.dataset as ds  # it is slow to import, and whoever has no filter does not need it

    schema = without_views(schema.empty_table()).schema  # which Arrow does not compare
    types = dict(_leaves(schema))
    cases: list[Facts] = []
    number_of: list[int] = []
    for number, facts in enumerate(known):
        each = [facts] if bounds is None else _cases(facts, bounds[number], types, text)
        cases += each
        number_of += [number] * len(each)
    dataset = ds.FileSystemDataset.from_paths(
        [str(case) for case in range(len(cases))],
        schema=schema,
        format=ds.ParquetFileFormat(),
        filesystem=fs.LocalFileSystem(),  # in which nothing is opened
        partitions=[reduce(and_, facts) if facts else pc.scalar(True) for facts in cases],
    )
    try:
        files = {number_of[int(part.path)] for part in dataset.get_fragments(filter)}
    except pa.ArrowInvalid:  # a number that Arrow cannot compare: reading says of which row
        files = {*range(len(known))}
    return np.array(sorted(files), dtype=np.int64)


def may_hold_in_folders(filter: pc.Expression, folders: pa.Table) -> IntArray | None:
    """The files of which a row may pass, by folders' names; None if that needs other columns' types."""
    schema = folders.schema
    while (problem := _problem(filter, schema)) is not None:
        missing = _missing(problem)
        if len(missing) != 1 or missing[0] in schema.names:
            return None
        schema = schema.append(pa.field(missing[0], pa.null()))  # which compares with any type
    return may_hold(filter, schema, facts_of(folders))


#: What stands for null in a folder's name.
NULL = "__HIVE_DEFAULT_PARTITION__"
INTEGER = re.compile(r"[+-]?\d{1,19}")


@dataclass(frozen=True)
class WantedFiles:
    """Files whose folders do not rule out all rows, and the columns to read."""

    files: FileList
    columns: list[str] | None
    folders: pa.Table
    left_out: int = 0
    by_footers: bool = False  # whether footers may rule out more
    by_folders: bool = False  # whether folders decide on all rows


def wanted_files(
    files: FileList,
    columns: Sequence[str] | None,
    filter: pc.Expression | None,
    hive: bool,
    caller: str,
) -> WantedFiles:
    folders = pa.table({})
    if hive or columns is not None or filter is not None:
        folders = folder_columns(files, caller, hive)
    chosen = None if columns is None else list(columns)
    everything = WantedFiles(files, chosen, folders)
    if filter is None or not len(files):
        return everything
    said = text_of(filter)
    named = folders.select([name for name in folders.column_names if name in said])
    wanted = may_hold_in_folders(filter, named) if named.num_columns else None
    try:
        first = int(wanted[0]) if wanted is not None and len(wanted) else 0
        footer = parse_footer(read_footer(open_bytes(files, first))[0])
        file_fields = [formats.plain(field) for field in footer.schema.to_arrow_schema()]
    except (OSError, pa.ArrowException, formats.BadFileError, TypeError, ValueError):
        return everything  # the file is named when all footers are read
    file_names = [field.name for field in file_fields]
    beside = [field for field in folders.schema if field.name not in file_names]
    schema = pa.schema([*file_fields, *beside])
    needed = needed_columns(filter, schema, caller)
    if wanted is None or not {*named.column_names}.isdisjoint(file_names):
        named = named.select([field.name for field in beside if field.name in named.column_names])
        wanted = np.arange(len(files))
        if named.num_columns:
            check_fits(filter, schema, caller)
            wanted = may_hold(filter, schema, facts_of(named))
    if chosen is not None:
        chosen += [name for name in needed if name not in formats.inner_paths(chosen, schema.names)]
    elif not hive:
        folders = folders.select([name for name in folders.column_names if name in needed])
    by_folders = bool(needed) and {*needed} <= {field.name for field in beside}
    left_out = len(files) - max(1, len(wanted))
    wanted = wanted if len(wanted) else np.zeros(1, dtype=np.int64)
    files = files.pick(wanted) if left_out else files
    folders = folders.take(to_arrow(wanted))
    return WantedFiles(files, chosen, folders, left_out, not by_folders, by_folders)


def folder_columns(files: FileList, caller: str, needed: bool) -> pa.Table:
    """A row for each file: its folders' values, int64 if all are integers, else text. Folders are those below
    the folder or glob that was listed, and all of a file that was named, as in Arrow.
    """
    names, roots = (
        files.names,
        sorted({f"{d.wanted.root.rstrip('/')}/" for d in files.listed}, key=len),
    )
    below = [path[len(next(filter(path.startswith, roots), "")) :] for path in files.paths]
    first = _pairs(below[0]) if below else {}
    pairs = [*map(_pairs, below)] if first or needed else []
    for name, values in zip(names, pairs, strict=False):
        if odd := first.keys() ^ values.keys():
            if not needed:
                return pa.table({})
            key = min(odd)
            has, lacks = (names[0], name) if key in first else (name, names[0])
            raise SchemaError(
                f"{caller}: the path {has} has a folder {key}=..., and {lacks} has none; list files of the "
                "same folders, or leave partitioning out",
                path=name,
                stage=caller,
            )
    if needed and not first:
        raise SchemaError(
            f'{caller}: partitioning="hive" makes columns of folders such as lang=en/, and {names[0]} is in '
            "no such folder: leave partitioning out, or list the folder that holds them",
            path=names[0],
            stage=caller,
        )
    return pa.table({key: _column([values[key] for values in pairs]) for key in first})


def _pairs(name: str) -> dict[str, str | None]:
    pairs: dict[str, str | None] = {}
    for folder in name.split("/")[:-1]:
        key, is_pair, value = folder.partition("=")
        if key and is_pair:
            pairs[unquote(key)] = None if value == NULL else unquote(value)
    return pairs


def _column(texts: list[str | None]) -> pa.Array:
    written = [text for text in texts if text is not None]
    if written and all(
        INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63 for text in written
    ):
        numbers = [None if text is None else int(text) for text in texts]
        return python_to_arrow(numbers, pa.int64())
    return python_to_arrow(texts, pa.string())


class ChosenColumns(RunStage, takes="columns"):
    """Keeps the chosen columns, without those that only a filter asked for."""

    columns: Sequence[str]

    def process(self, run: Run) -> Run:
        return run.with_block(run.block.with_columns(self._chosen))

    def _chosen(self, table: pa.Table) -> pa.Table:
        return table.select(list(formats.inner_paths(self.columns, table.column_names)))
