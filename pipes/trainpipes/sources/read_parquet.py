"""``read_parquet``: files of Parquet, row group by row group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainpipes._internal.locks import cached_property
from trainpipes._internal.pool import in_parts, shares_work
from trainpipes.columns.columns import as_expression, rows_that_match, text_of
from trainpipes.columns.run import Run
from trainpipes.columns.utf8 import replaced
from trainpipes.interfaces.quarantine import OnBadRow
from trainpipes.interfaces.read_columns import matching
from trainpipes.interfaces.source import Place
from trainpipes.interfaces.stage import Stage, made_once
from trainpipes.interfaces.stage_kinds import PushedStage
from trainpipes.sources import parquet_filter, parquet_footers
from trainpipes.sources.files import formats
from trainpipes.sources.files.decoded_files import above_reader, without_bad_files
from trainpipes.sources.files.file_bytes import FetchedBytes, FileBytes, RangeFile
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_source import FileSource
from trainpipes.sources.files.formats import BadFileError
from trainpipes.sources.parquet_footers import ParsedFooters, RowGroupLayout

#: Bytes of rows that are decoded at a time, about, and the bounds of that in rows.
BATCH_BYTES = 1 << 20
BATCH_ROWS = (8, 65_536)
#: Rows that are decoded at a time where there are many columns, and bytes of them, at most; and bytes where
#: so many rows are read at a time, half of them at least.
MANY_COLUMNS, WIDE_ROWS, WIDE_BYTES, WHOLE_WIDE_BYTES = 16, 8192, 4 << 20, 16 << 20
#: Parts of many columns that threads decode side by side.
PARTS = 4
#: Bytes that a column is read by, unless all columns of a row group have less.
BUFFER_BYTES = 256 << 10
#: Bytes of a remote file that is fetched whole at first.
WHOLE_BYTES = 1 << 20
CHANGED = "it changed while it was read"


@dataclass(eq=False)
class RowGroups(formats.Format):
    """Parquet files as a format: a block is a row group."""

    columns: Sequence[str] | None
    schema: pa.Schema
    replace: bool = False
    held: int | None = None
    described: Sequence[tuple[str, str]] = ()
    parsed: ParsedFooters = field(default_factory=ParsedFooters)

    name = "Parquet"
    #: The unit of times of 96 bits; nanoseconds, which end in 2262, if None.
    int96: ClassVar[str | None] = None
    blocks_called, known_by_blocks, places_blocks = "row groups", True, True
    fetches_parts = True

    def read_columns(self, layout: Any) -> Sequence[str] | None:
        """The columns that are read of a file, by the names in it."""
        return self.columns

    def scan(self, file: FileBytes) -> formats.Layout:
        return parquet_footers.footer_of(file, self.columns)[1]

    def open(self, data: FileBytes, layout: Any) -> ParquetFile:
        return ParquetFile(self, data, layout)

    def fetch(
        self, data: FileBytes, layout: Any, blocks: Sequence[int], columns: Sequence[str] | None
    ) -> ParquetFile:
        file = ParquetFile(self, data, layout, self.held)
        file.fetch(blocks)
        return file

    def fetched_bytes(
        self, layout: Any, blocks: Sequence[int], columns: Sequence[str] | None
    ) -> float:
        sizes = layout.group_bytes
        return float(sizes[list(blocks)].sum() / max(1, int(sizes.sum())) * layout.size)

    def decode(
        self, data: ParquetFile, layout: Any, block: int, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        names = self.schema.names
        for batch in data.batches(block):
            as_it_is = not (self.replace or layout.folder) and batch.schema.names == names
            yield batch if as_it_is else self._with_folders(batch, layout, data.name)

    def _with_folders(self, batch: pa.RecordBatch, layout: Any, name: str) -> pa.RecordBatch:
        columns = []
        for wanted in self.schema:
            place = batch.schema.get_field_index(wanted.name)
            if wanted.name in layout.folder:
                columns.append(pa.repeat(layout.folder[wanted.name], len(batch)))
            elif place < 0:
                raise formats.OtherBytesError(CHANGED)
            else:
                column = batch.column(place)
                if self.replace:
                    column = replaced(formats.cast_to(column, wanted, lambda: Place(name)))
                columns.append(column)
        return pa.RecordBatch.from_arrays(columns, names=self.schema.names)

    def change(self, data: FileBytes, layout: Any) -> str:
        try:
            same = layout.is_footer(parquet_footers.read_footer(data)[0])
            return "" if same else "it has as many bytes as before, and another footer"
        except BadFileError as error:
            return str(error)

    def block_key(self, layout: Any, blocks: range) -> list[Any]:
        return [*parquet_footers.footer_numbers(layout)[:2].tolist(), layout.note, self.replace]

    def note(self, layout: Any) -> str:
        return str(layout.note)

    def content(self, layout: Any) -> str:
        return str(parquet_footers.footer_numbers(layout)[:3].tolist())

    def describe(self, layouts: Sequence[formats.Layout]) -> list[tuple[str, str]]:
        return list(self.described)


class ParquetFile(formats.InPieces):
    """One Parquet file that is open for reading."""

    def __init__(
        self, format: RowGroups, data: FileBytes, layout: RowGroupLayout, held: int | None = None
    ) -> None:
        known = format.parsed.known(data.name) is not None
        if not data.local and data.size <= WHOLE_BYTES and not (known and data.checked):
            data = FetchedBytes(data, [(0, data.size)])  # its footer and rows in a single request
        self._data, self._layout, self.name = data, layout, data.name
        self._columns, self._int96 = format.read_columns(layout), format.int96
        self._remote = None if data.local else RangeFile(data, held)
        opened = pa.OSFile(data.name) if data.local else pa.PythonFile(self._remote, mode="r")
        self._handle: Any = opened
        self._expected: Sequence[int] = ()  # row groups that a remote file was asked to fetch
        try:
            metadata = format.parsed.of(self.name, self._read_footer)
            if metadata.num_row_groups != len(layout.rows):
                raise formats.OtherBytesError(CHANGED)  # the cached footer is wrong
            self._leaves = parquet_footers.leaves_of(metadata, self._columns)
            flat = metadata.num_columns == len(layout.schema)
            self._has_parts = data.local and flat and len(self._leaves) >= MANY_COLUMNS
            self._metadata = metadata
            self._fixed_bytes, self._others = parquet_footers.fixed_bytes(metadata, self._leaves)
            self._parquet = self._open(0 if self._has_small_chunks() else BUFFER_BYTES)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._handle.close()

    def _open(self, buffer_bytes: int) -> pq.ParquetFile:
        return pq.ParquetFile(
            self._handle,
            metadata=self._metadata,
            buffer_size=buffer_bytes,
            pre_buffer=False,
            page_checksum_verification=True,
            coerce_int96_timestamp_unit=self._int96,
        )

    @cached_property
    def _probe(self) -> parquet_footers.Probe:
        """With a buffer, so that no column is read when its reader is made."""
        is_buffered = not self._has_small_chunks()
        return parquet_footers.Probe(self._parquet if is_buffered else self._open(BUFFER_BYTES))

    def _has_small_chunks(self) -> bool:
        """Whether many columns of a local file take no more memory when they are read at once, in fewer
        copies.
        """
        most, count = int(self._layout.group_bytes.max(initial=0)), len(self._leaves)
        return self._data.local and count >= MANY_COLUMNS and most <= count * BUFFER_BYTES

    def fetch(self, row_groups: Sequence[int]) -> None:
        assert self._remote is not None
        self._expect(row_groups)
        self._remote.fetch()

    def batches(self, row_group: int) -> Iterator[pa.RecordBatch]:
        self._data.check()
        metadata, rows = self._metadata, int(self._layout.written[row_group])
        if self._remote is not None and row_group not in self._expected:
            self._expect([row_group])
        if metadata.row_group(row_group).num_rows != rows:
            raise formats.OtherBytesError(CHANGED)  # the cached footer is wrong
        row_bytes = self._fixed_bytes
        if self._others:
            self._probe.check(row_group, self._others)
            others = parquet_footers.arrow_bytes(metadata, row_group, self._others)
            row_bytes += sum(others) / rows
        most = self._rows_at_a_time(row_bytes)
        for batch in self._decoded(row_group, most):
            self._data.check()
            yield batch

    def _decoded(self, row_group: int, most: int) -> Iterator[pa.RecordBatch]:
        """The rows, so many at a time; many columns in parts, where other threads wait for them."""
        if not (self._has_parts and shares_work()):
            yield from self._parquet.iter_batches(most, [row_group], self._columns, False)
            return
        leaves = self._leaves
        edges = [len(leaves) * n // PARTS for n in range(PARTS + 1)]
        reader: Any = self._parquet.reader
        parts = [
            reader.iter_batches(most, [row_group], leaves[start:stop], False)
            for start, stop in pairwise(edges)
        ]
        while True:
            some = in_parts(_next, parts)
            if any(part is None for part in some):
                return
            if len(set(map(len, some))) > 1:
                raise pa.ArrowInvalid("columns of different lengths")
            columns = [column for part in some for column in part.columns]
            yield pa.RecordBatch.from_arrays(
                columns, schema=pa.schema([field for part in some for field in part.schema])
            )
            del some, columns

    def _rows_at_a_time(self, row_bytes: float) -> int:
        """More where there are many columns: each takes its time, also for few rows. What is decoded and not
        read yet is held.
        """
        nbytes = float(BATCH_BYTES)
        if len(self._leaves) >= MANY_COLUMNS:
            nbytes = max(nbytes, min(WIDE_BYTES, WIDE_ROWS * row_bytes))
            nbytes = max(nbytes, min(WHOLE_WIDE_BYTES, 2 * self.wanted * row_bytes))
        return int(np.clip(nbytes // max(1.0, row_bytes), *BATCH_ROWS))

    def _expect(self, row_groups: Sequence[int]) -> None:
        """Tell a remote file the row groups to come; and the footer, unless each reply says that it is of the
        same file.
        """
        assert self._remote is not None
        for number in row_groups:
            self._probe.check(number, self._leaves)
        metadata, self._expected = self._metadata, row_groups
        ranges = [span for n in row_groups for span in _ranges(metadata, n, self._leaves)]
        if not self._data.checked:
            ranges.append(self._layout.footer_range)
        self._remote.expect(ranges)
        if not self._data.checked:
            self._read_footer()

    def _read_footer(self) -> bytes:
        footer, (start, stop) = b"", self._layout.footer_range
        if self._remote is not None or self._handle.size() == stop:
            self._handle.seek(start)
            footer = self._handle.read(stop - start)
        if not self._layout.is_footer(footer):
            raise formats.OtherBytesError(CHANGED)
        return footer


def _next(batches: Iterator[Any]) -> Any:
    return next(batches, None)


def _ranges(metadata: Any, row_group: int, leaves: list[int]) -> Iterator[tuple[int, int]]:
    for leaf in leaves:
        chunk = metadata.row_group(row_group).column(leaf)
        start = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            start = min(start, chunk.dictionary_page_offset)
        yield start, start + chunk.total_compressed_size


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
        parquet_filter.checked_filter(self.filter, self.name)

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if identity["errors"] == "strict":  # states were saved before there was a choice
            del identity["errors"]
        if (filter := parquet_filter.checked_filter(self.filter, self.name)) is not None:
            identity["filter"] = text_of(filter)
        return identity

    def _above(self) -> Sequence[Stage]:
        bad = above_reader(self)
        if self.filter is None:
            return bad
        exact = ReaderFilter(self.filter)
        return (
            *bad,
            exact,
            *([] if self.columns is None else [parquet_filter.ChosenColumns(self.columns)]),
        )

    @without_bad_files
    def _open_on(self, files: Sequence[Stage]) -> FileSource:
        caller, filter = str(self), parquet_filter.checked_filter(self.filter, self.name)
        hive, replaces = self.partitioning == "hive", self.errors == "replace"
        wanted = parquet_filter.wanted_files(self.listed(files), self.columns, filter, hive, caller)
        listed, columns = wanted.files, wanted.columns
        bounds: dict[int, parquet_filter.FileBounds] = {}

        def look(file: int, metadata: Any, data: FileBytes) -> None:
            assert filter is not None
            bounds[file] = parquet_filter.bounds_of(metadata, data, filter)

        footers = parquet_footers.read_footers(
            listed, columns, caller, self.options["index"], folders=wanted.folders, both=hive,
            look=look if wanted.by_footers else None,
        )  # fmt: skip
        unread, besides, described = None, {}, []
        if filter is not None:
            parquet_filter.check_fits(filter, footers.schema, caller)
            facts = parquet_filter.facts_of(footers.folders) or [[] for _ in listed.names]
            known = [facts[n] for n, each in enumerate(footers.layouts) for _ in each.rows]
            all_bounds = [group for file in sorted(bounds) for group in bounds[file]]
            unread = np.ones(len(known), dtype=np.bool_)
            unread[
                parquet_filter.may_hold(
                    filter, footers.schema, known, all_bounds or None, text=not replaces
                )
            ] = False
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
        if unread is not None and (unread_groups := unread[first : first + len(layout.rows)]).any():
            note += f"\0unread {np.flatnonzero(unread_groups).tolist()}"
        noted.append(replace(layout, folder=values, note=note))
        first += len(layout.rows)
    return noted
