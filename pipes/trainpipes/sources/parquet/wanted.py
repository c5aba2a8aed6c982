from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.arrays import python_to_arrow, to_arrow
from trainpipes.columns.expressions import text_of
from trainpipes.columns.run import Run
from trainpipes.errors import SchemaError
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.file_list import FileList
from trainpipes.sources.files.remote_bytes import open_bytes
from trainpipes.sources.files.schema import inner_paths, plain
from trainpipes.sources.parquet.filter import (
    check_fits,
    facts_of,
    may_hold,
    may_hold_in_folders,
    needed_columns,
)
from trainpipes.sources.parquet.footers import parse_footer, read_footer

#: What stands for null in a folder's name.
NULL = "__HIVE_DEFAULT_PARTITION__"
INTEGER = re.compile(r"[+-]?\d{1,18}")


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
        folders = folder_columns(files.names, caller, hive)
    chosen = None if columns is None else list(columns)
    everything = WantedFiles(files, chosen, folders)
    if filter is None or not len(files):
        return everything
    said = text_of(filter)
    named = folders.select([name for name in folders.column_names if name in said])
    kept = may_hold_in_folders(filter, named) if named.num_columns else None
    try:
        first = int(kept[0]) if kept is not None and len(kept) else 0
        footer = parse_footer(read_footer(open_bytes(files, first))[0])
        own = [plain(field) for field in footer.schema.to_arrow_schema()]
    except (OSError, pa.ArrowException, BadFileError, TypeError, ValueError):
        return everything  # the file is named when all footers are read
    own_names = [field.name for field in own]
    beside = [field for field in folders.schema if field.name not in own_names]
    schema = pa.schema([*own, *beside])
    needed = needed_columns(filter, schema, caller)
    if kept is None or not {*named.column_names}.isdisjoint(own_names):
        named = named.select([field.name for field in beside if field.name in named.column_names])
        kept = np.arange(len(files))
        if named.num_columns:
            check_fits(filter, schema, caller)
            kept = may_hold(filter, schema, facts_of(named))
    if chosen is not None:
        chosen += [name for name in needed if name not in inner_paths(chosen, schema.names)]
    elif not hive:
        folders = folders.select([name for name in folders.column_names if name in needed])
    by_folders = {*needed} <= {field.name for field in beside}
    left_out = len(files) - max(1, len(kept))
    kept = kept if len(kept) else np.zeros(1, dtype=np.int64)
    files = files.pick(kept) if left_out else files
    folders = folders.take(to_arrow(kept))
    return WantedFiles(files, chosen, folders, left_out, not by_folders, by_folders)


def folder_columns(names: Sequence[str], caller: str, needed: bool) -> pa.Table:
    """A row for each file: its folders' values, int64 if all are integers, else text."""
    first = _pairs(names[0]) if names else {}
    pairs = [_pairs(name) for name in names] if first or needed else []
    for name, own in zip(names, pairs, strict=False):
        if odd := first.keys() ^ own.keys():
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
    return pa.table({key: _column([own[key] for own in pairs]) for key in first})


def _pairs(name: str) -> dict[str, str | None]:
    pairs: dict[str, str | None] = {}
    for folder in name.split("/")[:-1]:
        key, is_pair, value = folder.partition("=")
        if key and is_pair:
            pairs[unquote(key)] = None if value == NULL else unquote(value)
    return pairs


def _column(texts: list[str | None]) -> pa.Array:
    given = [text for text in texts if text is not None]
    if given and all(INTEGER.fullmatch(text) for text in given):
        numbers = [None if text is None else int(text) for text in texts]
        return python_to_arrow(numbers, pa.int64())
    return python_to_arrow(texts, pa.string())


class ChosenColumns(RunStage, takes="columns"):
    """Keeps the chosen columns, without those that only a filter asked for."""

    columns: Sequence[str]

    def process(self, run: Run) -> Run:
        return run.with_block(run.block.with_columns(self._chosen))

    def _chosen(self, table: pa.Table) -> pa.Table:
        return table.select(list(inner_paths(self.columns, table.column_names)))
