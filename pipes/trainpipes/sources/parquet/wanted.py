from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.run import Run
from trainpipes.kinds.stage_kinds import RunStage
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
from trainpipes.sources.parquet.folders import FolderColumns
from trainpipes.sources.parquet.footers import parse_footer, read_footer
from trainpipes.stages.columns import columns_of


@dataclass(frozen=True)
class WantedFiles:
    files: FileList
    left_out: int
    columns: list[str] | None
    folders: FolderColumns
    by_footers: bool


def wanted_files(
    files: FileList,
    columns: Sequence[str] | None,
    filter: pc.Expression | None,
    hive: bool,
    caller: str,
) -> WantedFiles:
    folders = FolderColumns({})
    if hive or columns is not None or filter is not None:
        folders = FolderColumns.of(files.names, caller, hive)
    found = None if columns is None else list(columns)
    if filter is None or not len(files):
        return WantedFiles(files, 0, found, folders, False)
    kept, named = None, folders.only([f.name for f in folders.fields if f.name in str(filter)])
    if named:
        facts = [facts_of(named.values(file)) for file in range(len(files))]
        kept = may_hold_in_folders(filter, named.fields, facts)
    schema = _schema_of(files, 0 if kept is None or not len(kept) else int(kept[0]))
    if schema is None:
        return WantedFiles(files, 0, found, folders, False)
    taken = schema.names
    own = [field for field in folders.fields if field.name not in taken]
    schema = pa.schema([*schema, *own])
    needed = needed_columns(filter, schema, caller)
    if found is None and not hive:
        folders = folders.only(needed)
    if found is not None:
        found += [name for name in needed if name not in inner_paths(found, schema.names)]
    reported = folders.only([field.name for field in own if field.name in needed])
    everything = len(files)
    if reported:
        if kept is None or any(field.name in taken for field in named.fields):
            facts = [facts_of(reported.values(file)) for file in range(everything)]
            kept = may_hold(filter, schema, facts)
        kept = kept if len(kept) else np.zeros(1, dtype=np.int64)
        files, folders = files.pick(kept), folders.pick(kept)
    by_footers = any(name not in [field.name for field in reported.fields] for name in needed)
    return WantedFiles(files, everything - len(files), found, folders, by_footers)


def _schema_of(files: FileList, file: int) -> pa.Schema | None:
    try:
        footer = parse_footer(read_footer(open_bytes(files, file)))
        schema = footer.schema.to_arrow_schema()
    except (OSError, pa.ArrowException, BadFileError, TypeError, ValueError):
        return None
    return pa.schema([plain(field) for field in schema])


class ChosenColumns(RunStage):
    """Keeps the chosen columns, without those that only a filter asked for."""

    needs_columns = True

    columns: Sequence[str]

    def process(self, run: Run) -> Run:
        return run.with_block(columns_of(run.block, self).with_columns(self._chosen))

    def _chosen(self, table: pa.Table) -> pa.Table:
        return table.select(list(inner_paths(self.columns, table.column_names)))
