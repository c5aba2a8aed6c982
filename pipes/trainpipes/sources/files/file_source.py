from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.lazy import cached_property
from trainpipes._internal.types import IntArray
from trainpipes.columns.payload import Payload, join_payloads, take_payload
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.filesystems.retry import Requests
from trainpipes.filesystems.systems import is_local
from trainpipes.interfaces.quarantine import leaves_out
from trainpipes.interfaces.source import Place, RandomAccessSource, Reader
from trainpipes.interfaces.stage import is_ours
from trainpipes.sources.files.bad_rows import BAD, bad_rows
from trainpipes.sources.files.block_reader import BlockReader, explained
from trainpipes.sources.files.each_file import is_of_content, reason
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.sources.files.file_errors import unreadable
from trainpipes.sources.files.file_list import FileList
from trainpipes.sources.files.file_reader import FileBlocks
from trainpipes.sources.files.format import Columns, Format, Layout
from trainpipes.sources.files.index_store import IndexStore
from trainpipes.sources.files.remote_bytes import open_bytes
from trainpipes.sources.files.schema import cast_to, chosen, different_schemas, one_schema


class FileSource(FileBlocks):
    """A block is a range of rows of one file: one of the format's blocks, unless ``edges`` differ."""

    said_of_schema = "the others have"

    def __init__(
        self,
        store: IndexStore,
        format: Format,
        *,
        layouts: Sequence[Layout] | None = None,
        edges: Sequence[IntArray] | None = None,
        columns: Columns = None,
        schema: pa.Schema | None = None,
        row_bytes: float | None = None,
        block_bytes: npt.NDArray[np.float64] | None = None,
        known: Any = None,
        besides: Mapping[str, Any] | None = None,
    ) -> None:
        self.format, self.columns, self._known = format, columns, known
        self.decoder = getattr(format, "decoder", f"{type(format).__name__}.decode")
        self.is_ours = is_ours(type(format)) and not hasattr(format, "decoder")
        what = "the rows here cannot be read"
        self.failed = what if self.is_ours else f"{self.decoder} failed here"
        self._besides = dict(besides or {})
        self._kept = store.kept
        self.layouts = store.layouts() if layouts is None else layouts
        self.kept_in, self.schema, self.row_bytes = store.kept_in, schema, row_bytes
        self.files, self.sizes, self.blocks_called = store.files, store.sizes, format.blocks_called
        rows = [layout.rows for layout in self.layouts]
        blocks = rows if edges is None else [np.diff(edge) for edge in edges]
        counts = [len(each) for each in blocks]
        self.lengths = np.concatenate([np.empty(0, dtype=np.int64), *blocks])
        self.first_block: IntArray = np.cumsum([0, *counts])
        self.file_of_block: IntArray = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        ends = np.append(0, np.cumsum(self.lengths))
        self.first_row: IntArray = ends[self.first_block]
        self.begins: IntArray = ends[:-1] - self.first_row[self.file_of_block]
        if block_bytes is None:
            spread = np.concatenate([np.empty(0), *map(_spread, blocks, self.layouts)])
            block_bytes = spread if spread.any() else None
        self.block_bytes = block_bytes

    #: The columns of rows that can be read, of a reader that leaves out others; see ``BadRows``.
    rows_schema: pa.Schema | None = None

    def leave_out(self, on_error: Any) -> None:
        """Have rows that cannot be read come as nulls, if ``on_error`` says that they are left out."""
        if leaves_out(on_error) and self.schema is not None:
            self.rows_schema, self.schema = self.schema, self.schema.append(BAD)

    def bad_rows(self, rows: int, error: BaseException) -> pa.RecordBatch:
        """Rows that are left out for an error about what the file holds; raises for others."""
        if self.rows_schema is None or not is_of_content(error):
            raise error
        return bad_rows(self.rows_schema, rows, reason(error))  # type: ignore[arg-type]

    def reader(self) -> Reader:
        return BlockReader(self)

    def data(self, file: int, requests: Requests | None = None) -> FileBytes:
        return open_bytes(self.files, file, requests, self._kept)

    def is_here(self, file: int) -> bool:
        return is_local(self.files.system(file)) or file in self._kept.whole

    def opened(self, file: int, requests: Requests) -> Any:
        return self.format.open(self.data(file, requests), self.layouts[file])

    def decoded_blocks(self, block: int) -> range:
        """Numbers of the format's blocks that hold rows of a block."""
        ends = np.cumsum(self.layouts[int(self.file_of_block[block])].rows)
        edges = [self.begins[block], self.begins[block] + self.lengths[block] - 1]
        first, last = np.searchsorted(ends, edges, side="right").tolist()
        return range(first, last + 1)

    def first(self, file: int) -> Any:
        """The first rows of a file, as the format gives them."""
        with closing(BlockReader(self)) as reader:
            return reader.first(file)

    def sampled(self, files: int) -> float | None:
        """Bytes of an average row in memory, by the first rows of some files."""
        some = np.flatnonzero(np.diff(self.first_row)).tolist()
        rows, size = 0, 0
        for file in some[:: -(-len(some) // files) or 1]:
            batch = self.conform(self.first(file), partial(Place, self.files.names[file], row=0))
            rows, size = rows + len(batch), size + batch.nbytes
        return size / rows if rows else None

    def conform(self, batch: Any, place: Callable[[], Place]) -> Any:
        if self.schema is None or batch.schema.equals(self.schema):
            return batch
        if self.rows_schema is not None:
            return self._with_bad(self._conform(batch, self.rows_schema, place))
        return self._conform(batch, self.schema, place)

    def _with_bad(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [*batch.columns, pa.nulls(len(batch), BAD.type)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _conform(self, batch: Any, schema: pa.Schema, place: Callable[[], Place]) -> Any:
        if batch.schema.equals(schema):
            return batch
        names = batch.schema.names
        counts = Counter(names)
        lacking = [name for name in schema.names if counts[name] != 1]
        if lacking or (self.columns is None and len(names) > len(schema)):
            raise SchemaError(
                f"{place()}: {self.decoder} gives the columns {names} here, and {self.said_of_schema} "
                f"{schema.names}: give all rows the same ones",
                **vars(place()),
            )
        columns = [cast_to(batch.column(field.name), field, place) for field in schema]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def other_rows(self, place: Place, given: str, counted: int) -> DataError:
        if self.is_ours:
            return unreadable(place, f"{self.failed}: it has {given}, and {counted:,} were counted")
        way = "version=" if hasattr(self.format, "decoder") else "key"
        return DataError(
            f"{place}: {self.decoder} gives {given}, and {counted:,} were counted: let both agree; if "
            f"one of them has changed, give another {way}",
            **vars(place),
        )

    def block_key(self, block: int) -> Any:
        file, first = int(self.file_of_block[block]), int(self.begins[block])
        name, stamp = self._relative_names[file], self.files.stamps[file]
        known = [] if self._known is None else [self._known]
        more = self.format.block_key(self.layouts[file], self.decoded_blocks(block))
        rows = [first, int(self.lengths[block])]
        return [name, int(self.sizes[file]), stamp, *rows, *known, *more]

    def fingerprint(self) -> dict[str, Any]:
        rows, counts = [], np.diff(self.first_row).tolist()
        for file, layout in enumerate(self.layouts):
            own: Any = counts[file]
            if self.format.known_by_blocks:
                own = self.lengths[slice(*self.first_block[file : file + 2].tolist())].tolist()
            rows.append(f"{own}{self.format.note(layout)}")
        read = [self.format.content(layout) for layout in self.layouts]
        return {**self._besides, **self.fingerprint_of(rows, read)}

    def place(self, block: int, row: int) -> Place:
        file = int(self.file_of_block[block])
        number = block - int(self.first_block[file]) if self.format.places_blocks else None
        return Place(self.files.names[file], number, int(self.begins[block]) + row)

    def describe(self) -> list[tuple[str, str]]:
        return [*super().describe(), *self.format.describe(self.layouts)]


def _spread(blocks: IntArray, layout: Layout) -> npt.NDArray[np.float64]:
    sizes = layout.stop - layout.start
    if blocks is layout.rows:
        return sizes.astype(np.float64)
    ends, rows, total = (np.append(0, np.cumsum(each)) for each in (blocks, layout.rows, sizes))
    nbytes: npt.NDArray[np.float64] = np.diff(np.interp(ends, rows, total))
    return nbytes


class NumberedFiles(FileSource, RandomAccessSource):
    """Files whose rows can be read by number."""

    def __init__(self, *store_and_format: Any, **how: Any) -> None:
        super().__init__(*store_and_format, **how)
        self.by_number = self.format.by_number and self._unfit is None

    @cached_property
    def _unfit(self) -> str | None:
        files, unfit = self.files, self.format.unfit
        local = [is_local(system) for system in files.systems]
        each = enumerate(self.layouts)
        odd = (n for n, layout in each if unfit(layout, local[int(files.system_of[n])]))
        return next((files.names[n] for n in odd), None)

    def reader(self) -> Reader:
        return self if self.by_number else BlockReader(self)

    def read(self, block: int, start: int, stop: int) -> Payload:
        begin = int(self.begins[block])
        return self._taken(int(self.file_of_block[block]), slice(begin + start, begin + stop))

    def take(self, index: IntArray) -> Payload:
        if self._unfit is not None:
            raise ConfigError(
                f"rows can be chosen by number in {self.format.fit}, and {self._unfit} is not: "
                f"{self.format.otherwise}",
                path=self._unfit,
            )
        if not len(index):
            return self._taken(0, index)
        files = np.searchsorted(self.first_row, index, side="right") - 1
        order = np.argsort(files, kind="stable")
        numbers, firsts = np.unique(files[order], return_index=True)
        parts: list[Payload] = []
        for file, places in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=True):
            parts.append(self._taken(file, index[places] - self.first_row[file]))
        if len(parts) == 1:  # the sort was stable, so that rows stand as they were asked for
            return parts[0]
        return take_payload(join_payloads(parts), np.argsort(order))

    def _taken(self, file: int, rows: IntArray | slice) -> Payload:
        first = rows.start if isinstance(rows, slice) else int(rows[0]) if len(rows) else None
        place = Place(self.files.names[file], row=first)
        with explained(place, self.failed, self.kept_in):
            data, layout = self.data(file), self.layouts[file]
            try:
                payload = self.format.take(data, layout, rows, self.columns)
            except Exception as error:
                if isinstance(rows, slice) or len(rows) < 2 or not is_of_content(error):
                    payload = self.bad_rows(1, error)
                else:  # which of them
                    half = len(rows) // 2
                    some = (rows[:half], rows[half:])
                    return join_payloads([self._taken(file, each) for each in some])
            if isinstance(payload, TensorRows):
                return payload
            batches = payload if isinstance(payload, list) else [payload]
            taken = [self.conform(batch, lambda: place) for batch in batches]
            return pa.Table.from_batches(taken, self.schema)


def scanned(
    files: FileList,
    format: Format,
    caller: str,
    reader: str,
    *,
    columns: Columns = None,
    schema: pa.Schema | None = None,
    index: str | bool | None = None,
    known: Any = None,
    **how: Any,
) -> FileSource:
    store = IndexStore(files, reader, format.name, json.dumps(known, sort_keys=True), index)
    store.complete(lambda job: format.scan(job.data), caller, **how)
    kind = NumberedFiles if format.random_access else FileSource
    source = kind(store, format, columns=columns, schema=schema, known=known)
    if schema is not None:
        source.said_of_schema = "schema= has"
    different = different_schemas(files.names, [each.schema for each in source.layouts])
    if schema is None and any(len(other) for _, other in different):
        source.schema = one_schema(different, columns, caller)
    filled = [file for file, layout in enumerate(source.layouts) if layout.rows.any()]
    if filled:
        first = source.first(filled[0])
        source.row_bytes = first.nbytes / len(first)
        if source.schema is None:
            source.schema = first.schema.remove_metadata()
            source.said_of_schema = "the first rows have"
            if columns is not None:
                path = files.names[filled[0]]
                source.schema = pa.schema(
                    list(chosen(source.schema, columns, caller, path).values())
                )
    return source
