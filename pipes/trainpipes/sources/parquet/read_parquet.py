from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.expressions import as_expression, rows_that_match, text_of
from trainpipes.columns.run import Run
from trainpipes.interfaces.blame import matching
from trainpipes.interfaces.quarantine import OnBadRow
from trainpipes.interfaces.stage import Stage, made_once
from trainpipes.interfaces.stage_kinds import PushedStage
from trainpipes.sources.files.bad_rows import above_reader, without_bad_files
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_source import FileSource
from trainpipes.sources.parquet.filter import (
    FileBounds,
    bounds_of,
    check_fits,
    checked_filter,
    facts_of,
    may_hold,
)
from trainpipes.sources.parquet.footers import RowGroupLayout, read_footers
from trainpipes.sources.parquet.row_groups import RowGroups
from trainpipes.sources.parquet.wanted import ChosenColumns, wanted_files


class ReadParquet(FileReader, has_blocks=True):
    """Reads the rows of Parquet files as Arrow.

    All footers are read before the first row. The files' types are widened where that loses nothing, and
    dictionary columns come as their values.

    Args:
        columns: names of columns, in order; ``"a.b"`` for field ``b`` of the struct ``a``,
            ``"a.list.element.b"`` of structs in the list ``a``. None for all, which all files must then have.
        filter: a ``pyarrow.compute`` expression, or a list of conditions such as ``[["x", ">", 20]]``; null
            counts as False. Files and row groups without a matching row are not read.
        partitioning: "hive" makes columns from the names of folders (``year=2024/lang=en/``): int64 if all
            values are integers, else text. If left out, only those that ``columns`` or ``filter`` name.
        storage_options: more options of fsspec; never shown or saved.
        errors: "strict" raises where text is not UTF-8; "replace" puts U+FFFD in its place.
        index: where to keep the footers for later starts: an ".arrow" file or a folder, True for the cache
            folder, False for nowhere. If left out, the cache folder for remote files or from 64 files on.
        on_error: for rows of a damaged row group, from where it cannot be decoded on, and files whose footer
            is damaged; as in ``read_json``.

    Raises:
        ConfigError: an option is invalid.
        UnreadableError: names all files that are not Parquet, or the damaged place.
        SchemaError: a file lacks a column, or its type does not fit; the filter does not fit the columns;
            folders' names differ in their columns.
        DataChangedError: a file has changed since it was listed.

    >>> import pathlib, tempfile, pyarrow as pa, pyarrow.parquet as pq, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.parquet"
    >>> pq.write_table(pa.table({"x": [1, 2], "y": ["a", "b"]}), path)
    >>> list(tp.list_files(path).read_parquet(columns=["y"]))
    [{'y': 'a'}, {'y': 'b'}]
    """

    columns: Sequence[str] | None = None
    _: KW_ONLY
    storage_options: Mapping[str, Any] | None = None
    index: str | os.PathLike[str] | bool | None = None
    errors: Literal["strict", "replace"] = "strict"
    filter: pc.Expression | Sequence[Any] | None = None
    partitioning: Literal["hive"] | None = None
    on_error: OnBadRow = "raise"

    def check(self) -> None:
        super().check()
        checked_filter(self.filter, self.name)

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if identity["errors"] == "strict":  # states were saved before there was a choice
            del identity["errors"]
        if (filter := checked_filter(self.filter, self.name)) is not None:
            identity["filter"] = text_of(filter)
        return identity

    def _above(self) -> Sequence[Stage]:
        bad = above_reader(self)
        if self.filter is None:
            return bad
        exact = ReaderFilter(self.filter)
        return (*bad, exact, *([] if self.columns is None else [ChosenColumns(self.columns)]))

    @without_bad_files
    def _open_on(self, files: Sequence[Stage]) -> FileSource:
        caller, filter = str(self), checked_filter(self.filter, self.name)
        hive, replaces = self.partitioning == "hive", self.errors == "replace"
        wanted = wanted_files(self.listed(files), self.columns, filter, hive, caller)
        listed, columns = wanted.files, wanted.columns
        bounds: dict[int, FileBounds] = {}

        def look(file: int, metadata: Any, data: FileBytes) -> None:
            assert filter is not None
            bounds[file] = bounds_of(metadata, data, filter)

        footers = read_footers(
            listed, columns, caller, self.options["index"], folders=wanted.folders, both=hive,
            look=look if wanted.by_footers else None,
        )  # fmt: skip
        unread, besides, described = None, {}, []
        if filter is not None:
            check_fits(filter, footers.schema, caller)
            facts = facts_of(footers.folders) or [[] for _ in listed.names]
            known = [facts[n] for n, each in enumerate(footers.layouts) for _ in each.rows]
            own = [group for file in sorted(bounds) for group in bounds[file]]
            unread = np.ones(len(known), dtype=np.bool_)
            unread[may_hold(filter, footers.schema, known, own or None, text=not replaces)] = False
            if wanted.by_folders:
                unread = ~np.repeat(
                    rows_that_match(footers.folders, filter), [len(f.rows) for f in footers.layouts]
                )
            rows = np.concatenate([each.rows for each in footers.layouts])
            besides = {"filter": text_of(filter), "unread": int(rows[unread].sum())}
            said = f"{int((~unread).sum()):,} of {len(known):,} row groups may have rows that match"
            if wanted.left_out:
                said += f"; {wanted.left_out:,} more files are left out by their folders"
            described = [("filter", said)]
        format = RowGroups(
            columns, footers.schema, replaces, listed.prefetch_bytes // 2, described, footers.parsed
        )
        source = FileSource(
            footers.store,
            format,
            layouts=_noted(footers.layouts, footers.folders, unread),
            columns=columns,
            schema=footers.schema,
            row_bytes=footers.row_bytes,
            block_bytes=np.concatenate([each.group_bytes for each in footers.layouts]).astype(
                float
            ),
            besides=besides,
        )
        source.unread, source.is_filtered = unread, wanted.by_folders
        source.leave_out(self.on_error)
        return source


class ReaderFilter(PushedStage, keeps_rows=False, takes="columns"):
    """A reader's ``filter``, asked of each row."""

    predicate: pc.Expression | Sequence[Any]

    @property
    def name(self) -> str:
        return "filter"

    @made_once
    def _expression(self) -> pc.Expression:
        return as_expression(self.predicate, "filter(predicate)")

    def identity(self) -> dict[str, Any]:
        return {"stage": self.name, "predicate": text_of(self._expression)}

    def process(self, run: Run) -> Run:
        return run.keep(matching(run, self._expression, self))


def _noted(layouts: list[RowGroupLayout], folders: pa.Table, unread: Any) -> list[RowGroupLayout]:
    if not folders.num_columns and unread is None:
        return layouts
    noted, first = [], 0
    for file, layout in enumerate(layouts):
        values = {name: folders.column(name)[file] for name in folders.column_names}
        note = f"\0{ {name: value.as_py() for name, value in values.items()} }" if values else ""
        if unread is not None and (own := unread[first : first + len(layout.rows)]).any():
            note += f"\0unread {np.flatnonzero(own).tolist()}"
        noted.append(replace(layout, folder=values, note=note))
        first += len(layout.rows)
    return noted
