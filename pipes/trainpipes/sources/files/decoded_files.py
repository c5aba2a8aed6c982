"""Files of a format as blocks of rows: where each is, and what is made of what the format decodes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.messages import is_worth_a_line
from trainpipes._internal.types import IntArray
from trainpipes.errors import DataError, SchemaError
from trainpipes.filesystems.retry import Requests
from trainpipes.filesystems.systems import is_local
from trainpipes.interfaces.source import Place
from trainpipes.interfaces.stage import is_ours
from trainpipes.interfaces.tally import is_aside
from trainpipes.sources.files.bad_rows import BAD, bad_rows
from trainpipes.sources.files.each_file import is_of_content, reason
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.sources.files.file_errors import unreadable
from trainpipes.sources.files.file_reader import FileBlocks
from trainpipes.sources.files.format import Columns, Format, Layout
from trainpipes.sources.files.index_store import IndexStore
from trainpipes.sources.files.remote_bytes import open_bytes
from trainpipes.sources.files.schema import cast_to

log = logging.getLogger("trainpipes")


class DecodedFiles(FileBlocks):
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
        self.epoch_files = store.files.below
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
        self._all_bad = set[tuple[int, int]]()

    #: The columns of rows that can be read, of a reader that leaves out others; see ``BadRows``.
    rows_schema: pa.Schema | None = None

    def bad_rows(self, rows: int, error: BaseException) -> pa.RecordBatch:
        """Rows that are left out for an error about what the file holds; raises for others."""
        if self.rows_schema is None or not is_of_content(error):
            raise error
        return bad_rows(self.rows_schema, rows, reason(error))  # type: ignore[arg-type]

    def say_all_bad(self, file: int, number: int, rows: int) -> None:
        """Log once that all rows of a file or block are left out: of the first ten, the 100th, ..."""
        if is_aside() or (file, number) in self._all_bad:
            return
        self._all_bad.add((file, number))
        count, several = len(self._all_bad), len(self.layouts[file].rows) > 1
        if is_worth_a_line(count):
            place = Place(self.files.names[file], number if several else None)
            said = "its only row cannot" if rows == 1 else f"none of its {rows:,} rows can"
            log.warning("%s: %s be read; left out (%s such so far)", place, said, f"{count:,}")

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

    def place(self, block: int, row: int) -> Place:
        file = int(self.file_of_block[block])
        number = block - int(self.first_block[file]) if self.format.places_blocks else None
        return Place(self.files.names[file], number, int(self.begins[block]) + row)

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


def _spread(blocks: IntArray, layout: Layout) -> npt.NDArray[np.float64]:
    sizes = layout.stop - layout.start
    if blocks is layout.rows:
        return sizes.astype(np.float64)
    ends, rows, total = (np.append(0, np.cumsum(each)) for each in (blocks, layout.rows, sizes))
    nbytes: npt.NDArray[np.float64] = np.diff(np.interp(ends, rows, total))
    return nbytes
