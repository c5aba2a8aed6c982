"""Files of a format as blocks of rows: where each is, and how decoded values become rows. For rows
that cannot be read there are nulls in their places, and why; ``BadRows`` leaves them out.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.checks import IntArray
from trainpipes._internal.messages import is_worth_a_line
from trainpipes.columns.arrays import to_numpy
from trainpipes.columns.run import Run
from trainpipes.errors import DataError, SchemaError, UnreadableError
from trainpipes.filesystems.retry import Requests
from trainpipes.filesystems.systems import is_local
from trainpipes.interfaces import quarantine, stage
from trainpipes.interfaces.quarantine import OnBadRow
from trainpipes.interfaces.source import Place
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.sources.files.file_bytes import FileBytes, unreadable
from trainpipes.sources.files.file_reader import FileBlocks
from trainpipes.sources.files.formats import Columns, Format, Layout, cast_to, is_of_content, reason
from trainpipes.sources.files.index_store import IndexStore
from trainpipes.sources.files.remote_bytes import open_bytes

T = TypeVar("T")
log = logging.getLogger("trainpipes")

#: A column of ours: why a row cannot be read and, behind a zero, its text; null for others.
BAD = pa.field("trainpipes:bad", pa.string())
END = "\0"


def bad_rows(schema: pa.Schema, rows: int, why: str) -> pa.RecordBatch:
    """Nulls in place of rows that cannot be read."""
    nulls = [pa.nulls(rows, field.type) for field in schema]
    return pa.RecordBatch.from_arrays([*nulls, pa.repeat(why, rows)], schema=schema.append(BAD))


def separate(table: Any) -> tuple[Any, dict[int, tuple[str, str]]]:
    """A table without our column; and of its bad rows why they are, and their text."""
    why = table.column(BAD.name)
    bad = np.flatnonzero(to_numpy(why.is_valid())).tolist() if why.null_count < len(why) else []
    said = {row: why[row].as_py().partition(END)[::2] for row in bad}
    return table.drop_columns([BAD.name]), said


class BadRows(RunStage, keeps_rows=False, asks_inputs=True, gives="choice"):
    """Leaves out the rows that a reader could not read. ``shaping``: other reasons why rows are bad."""

    thread_safe = True

    reader: str
    on_error: OnBadRow
    shaping: Any = None

    @property
    def name(self) -> str:
        return self.reader

    def __repr__(self) -> str:
        return f"{self.reader}(on_error)"

    def identity(self) -> dict[str, Any]:
        return {"stage": str(self), "shaping": self.shaping}

    @stage.made_once
    def _left_out(self) -> quarantine.LeftOut:
        return quarantine.LeftOut(
            self, "they cannot be read", "row", unit="", on_error=self.on_error
        )

    def _tallies(self) -> Sequence[stage.Tally]:
        return (self._left_out,)

    def process(self, run: Run) -> Run:
        table, said = separate(run.block.data)
        run = run.with_block(run.block.with_data(table))
        bad = np.zeros(len(run.block), dtype=np.int64)
        bad[[*said]] = 1
        self._left_out.drop(run.block, bad, lambda n: said[n][0], lambda n: said[n][1])
        return run.pick(np.flatnonzero(bad == 0)) if said else run


def above_reader(reader: stage.Stage, shaping: Any = None) -> tuple[stage.Stage, ...]:
    """The stages above a reader that leave out its bad rows, if it is asked to."""
    on_error = reader.options["on_error"]
    return (BadRows(reader.name, on_error, shaping),) if quarantine.leaves_out(on_error) else ()


def without_bad_files(
    open_on: Callable[[Any, Sequence[stage.Stage]], T],
) -> Callable[[Any, Any], T]:
    """``_open_on`` of a reader that may leave out files whose rows cannot be counted."""

    @functools.wraps(open_on)
    def opened(self: Any, files: Sequence[stage.Stage]) -> T:
        while True:
            try:
                return open_on(self, files)
            except UnreadableError as error:
                bad = vars(error).get("bad_files")
                if not bad or not quarantine.leaves_out(self.on_error):
                    raise
                self.bad_files.update(bad)
            for name, why in bad.items():
                place = Place(name, source=getattr(self._inputs, "name", None))
                said = "%s: a file is left out, which cannot be read: %s: %s"
                log.warning(said, self.name, place, why)
                if isinstance(self.on_error, quarantine.Quarantine):
                    quarantine.list_file(self.on_error, place, self, why)

    return opened


class DecodedFiles(FileBlocks):
    """A block is a range of rows of a file: a block of the format, unless ``edges`` differ."""

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
        self.is_ours = stage.is_ours(type(format)) and not hasattr(format, "decoder")
        failure = "the rows here cannot be read"
        self.failed = failure if self.is_ours else f"{self.decoder} failed here"
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
        """Rows that are left out for an error about the file's content; raises for others."""
        if self.rows_schema is None or not is_of_content(error):
            raise error
        return bad_rows(self.rows_schema, rows, reason(error))  # type: ignore[arg-type]

    def say_all_bad(self, file: int, number: int, rows: int) -> None:
        """Log once that all rows of a file or block are left out: of the first ten, the 100th, ..."""
        if stage.is_aside() or (file, number) in self._all_bad:
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

    def other_rows(self, place: Place, decoded: str, counted: int) -> DataError:
        if self.is_ours:
            return unreadable(
                place, f"{self.failed}: it has {decoded}, and {counted:,} were counted"
            )
        way = "version=" if hasattr(self.format, "decoder") else "key"
        return DataError(
            f"{place}: {self.decoder} gives {decoded}, and {counted:,} were counted: let both agree; if "
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
