from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.arrays import to_arrow
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.file_bytes import open_bytes
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.schema import inner_paths, plain
from trainpipes.sources.parquet.filter import (
    facts_of,
    may_hold,
    may_hold_in_folders,
    needed_columns,
)
from trainpipes.sources.parquet.folders import folder_columns, only
from trainpipes.sources.parquet.footers import parse_footer, read_footer
from trainpipes.stages.columns import ChooseStage


@dataclass(frozen=True)
class WantedFiles:
    """Files whose folders do not rule out all rows, and the columns to read."""

    files: FileList
    columns: list[str] | None
    folders: pa.Table
    left_out: int = 0
    by_footers: bool = False  # whether footers may rule out more


def wanted_files(
    files: FileList,
    columns: Sequence[str] | None,
    filter: pc.Expression | None,
    hive: bool,
    caller: str,
) -> WantedFiles:
    folders = pa.table({})
    if hive or columns is not None or filter is not None:
        folders = folder_columns(files.names, caller, hive)
    found = None if columns is None else list(columns)
    if filter is None or not len(files):
        return WantedFiles(files, found, folders)
    named = only(folders, [name for name in folders.column_names if name in str(filter)])
    kept = may_hold_in_folders(filter, named) if named.num_columns else None
    own = _schema_of(files, 0 if kept is None or not len(kept) else int(kept[0]))
    if own is None:
        return WantedFiles(files, found, folders)
    beside = [field for field in folders.schema if field.name not in own.names]
    schema = pa.schema([*own, *beside])
    needed = needed_columns(filter, schema, caller)
    if found is not None:
        found += [name for name in needed if name not in inner_paths(found, schema.names)]
    elif not hive:
        folders = only(folders, needed)
    told = only(folders, [field.name for field in beside if field.name in needed])
    by_footers = any(name not in told.column_names for name in needed)
    if not told.num_columns:
        return WantedFiles(files, found, folders, 0, by_footers)
    if kept is None or not {*named.column_names}.isdisjoint(own.names):
        kept = may_hold(filter, schema, facts_of(told))
    kept = kept if len(kept) else np.zeros(1, dtype=np.int64)
    left_out = len(files) - len(kept)
    return WantedFiles(files.pick(kept), found, folders.take(to_arrow(kept)), left_out, by_footers)


def _schema_of(files: FileList, file: int) -> pa.Schema | None:
    try:
        schema = parse_footer(read_footer(open_bytes(files, file))).schema.to_arrow_schema()
    except (OSError, pa.ArrowException, BadFileError, TypeError, ValueError):
        return None
    return pa.schema([plain(field) for field in schema])


class ChosenColumns(ChooseStage):
    """Keeps the chosen columns, without those that only a filter asked for."""

    names_only = False

    columns: Sequence[str]

    def _chosen(self, table: pa.Table) -> pa.Table:
        return table.select(list(inner_paths(self.columns, table.column_names)))
