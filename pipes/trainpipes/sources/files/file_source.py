from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import IntArray
from trainpipes._internal.locks import cached_property
from trainpipes.columns.payload import Payload, join_payloads, take_payload
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.errors import ConfigError, known_name
from trainpipes.filesystems.systems import is_local
from trainpipes.interfaces.quarantine import leaves_out
from trainpipes.interfaces.source import Place, RandomAccessSource, Reader
from trainpipes.sources.files import formats
from trainpipes.sources.files.block_reader import BlockReader, explained
from trainpipes.sources.files.decoded_files import BAD, DecodedFiles
from trainpipes.sources.files.formats import is_of_content
from trainpipes.sources.files.index_store import IndexStore
from trainpipes.sources.files.list_files import FileList


class FileSource(DecodedFiles):
    """Rows of files, read block by block."""

    def leave_out(self, on_error: Any) -> None:
        """Have rows that cannot be read come as nulls, if ``on_error`` says that they are left out."""
        if leaves_out(on_error) and self.schema is not None:
            self.rows_schema, self.schema = self.schema, self.schema.append(BAD)

    def reader(self) -> Reader:
        return BlockReader(self)

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

    def block_key(self, block: int) -> Any:
        file, first = int(self.file_of_block[block]), int(self.begins[block])
        layout = self.layouts[file]
        read = self.format.content(layout) or known_name(self.files.names[file])
        name = [self._relative_names[file], read, int(self.sizes[file]), self.files.stamps[file]]
        known = [] if self._known is None else [self._known]
        more = self.format.block_key(layout, self.decoded_blocks(block))
        return [*name, first, int(self.lengths[block]), *known, *more]

    def fingerprint(self) -> dict[str, Any]:
        rows, counts = [], np.diff(self.first_row).tolist()
        for file, layout in enumerate(self.layouts):
            lengths: Any = counts[file]
            if self.format.known_by_blocks:
                lengths = self.lengths[slice(*self.first_block[file : file + 2].tolist())].tolist()
            rows.append(f"{lengths}{self.format.note(layout)}")
        read = [self.format.content(layout) for layout in self.layouts]
        return {**self._besides, **self.fingerprint_of(rows, read)}

    def describe(self) -> list[tuple[str, str]]:
        return [*super().describe(), *self.format.describe(self.layouts)]


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
    format: formats.Format,
    caller: str,
    reader: str,
    *,
    columns: formats.Columns = None,
    schema: pa.Schema | None = None,
    index: str | bool | None = None,
    known: Any = None,
    **how: Any,
) -> FileSource:
    if schema is not None and columns is not None:
        schema = pa.schema(list(formats.chosen(schema, columns, caller, "schema=").values()))
    store = IndexStore(files, reader, format.name, json.dumps(known, sort_keys=True), index)
    store.complete(lambda job: format.scan(job.data), caller, **how)
    kind = NumberedFiles if format.random_access else FileSource
    source = kind(store, format, columns=columns, schema=schema, known=known)
    if schema is not None:
        source.said_of_schema = "schema= has"
    different = formats.different_schemas(files.names, [each.schema for each in source.layouts])
    if schema is None and any(len(other) for _, other in different):
        source.schema = formats.one_schema(different, columns, caller)
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
                    list(formats.chosen(source.schema, columns, caller, path).values())
                )
    return source
