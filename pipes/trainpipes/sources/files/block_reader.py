"""Reads rows of blocks in order, of any format, and fetches ahead what is on other machines."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.types import IntArray
from trainpipes.columns.payload import Payload
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.errors import DataChangedError, DataError, TrainpipesError, UnreachableError
from trainpipes.filesystems.retry import Requests
from trainpipes.interfaces.source import Place
from trainpipes.sources.files.ahead import Ahead
from trainpipes.sources.files.bad_rows import BAD
from trainpipes.sources.files.decoded_files import DecodedFiles
from trainpipes.sources.files.each_file import BadFileError, reason
from trainpipes.sources.files.file_errors import changed, gone, located, unreadable
from trainpipes.sources.files.format import OtherBytesError
from trainpipes.sources.files.index_store import forget

#: Bytes of a block that is worth a request of its own, and of smaller ones that are fetched together.
SMALL, TOGETHER = 1 << 20, 4 << 20
#: Bytes of a block that is fetched ahead, with any limit of the user's.
FETCHED = 16 << 20


@dataclass(eq=False)
class _Fetch:
    """The format's blocks of a file that are fetched at once."""

    file: int
    numbers: list[int]
    size: float


class BlockReader:
    """One place in files; for one thread."""

    def __init__(self, source: DecodedFiles) -> None:
        self._source = source
        requests = self._requests = Requests(source.files.retry)
        weakref.finalize(self, requests.stop)

        # This does not refer to the reader: it goes, with what it has open, when nobody else does.
        def fetch(blocks: _Fetch) -> Any:
            data, layout = source.data(blocks.file, requests), source.layouts[blocks.file]
            return source.format.fetch(data, layout, blocks.numbers, source.columns)

        most = source.files.prefetch_bytes
        self._largest = max(FETCHED, most // 4)
        self._ahead = Ahead(fetch, lambda blocks: blocks.size, most)
        self._fetches: dict[int, _Fetch] = {}  # for each block that is fetched ahead
        self._block = self._file = -1
        self._opened: Any = None  # the file, as the format has it
        self._ends: IntArray = np.zeros(0, dtype=np.int64)  # of the format's blocks in it
        self._number = -1  # of the one that is decoded
        self._batches: Iterator[tuple[int, Any]] = iter(())
        self._batch: Any = None  # the last one
        self._begins = self._row = 0  # in the file: of that batch, and of the next one
        self._next = 0  # the first row that is not decoded yet
        self._bad = 0  # rows that cannot be read, of those of the format's block before it

    def expect(
        self, blocks: Sequence[int], turns: Sequence[float] = (), most: float = math.inf
    ) -> None:
        """Have remote blocks that will be read next fetched, several side by side."""
        source, form = self._source, self._source.format
        if source.is_local:
            return
        known = {b: fetch for b, fetch in self._fetches.items() if fetch in self._ahead}
        self._fetches = {}
        file, last, before = -1, -1, -2
        for block in dict.fromkeys(blocks):
            own = int(source.file_of_block[block])
            if source.is_here(own):
                continue
            if block in known:
                self._fetches[block] = known[block]
                continue
            if own != file:
                file, last, before = own, -1, -2
            numbers = [n for n in source.decoded_blocks(block) if n != last]
            last = numbers[-1] if numbers else last
            size = form.fetched_bytes(source.layouts[file], numbers, source.columns)
            large = size > self._largest and not form.fetches_parts
            if block == self._block or not size or large:
                continue
            fetch = self._fetches[before] if block - 1 == before else None
            if fetch is not None and size < SMALL and fetch.size + size <= TOGETHER:
                fetch.numbers, fetch.size = [*fetch.numbers, *numbers], fetch.size + size
            else:
                fetch = _Fetch(own, numbers, size)
            self._fetches[block], before = fetch, block
        turn = dict(zip(blocks, turns or repeat(0.0), strict=False))
        due: dict[_Fetch, float] = {}
        for block, fetch in self._fetches.items():
            due[fetch] = min(turn[block], due.get(fetch, math.inf))
        fetches = list(due)
        if form.fetches_parts and [len(fetch.numbers) for fetch in fetches] == [1]:
            # Nothing is read meanwhile, and less is held of a large one as it is read.
            fetches = [
                fetch for fetch in fetches if fetch in self._ahead or fetch.size <= self._largest
            ]
        self._ahead.expect(fetches, turns=[due[fetch] for fetch in fetches], most=most)

    def read(self, block: int, start: int, stop: int) -> Payload:
        source = self._source
        begin = int(source.begins[block])
        row, end = begin + start, begin + stop
        parts: list[Any] = []
        try:
            if start < stop:
                self._go_to(block)
            while row < end:
                if not self._begins <= row < self._row:
                    self._decode(row)
                first, last = row - self._begins, min(end, self._row) - self._begins
                row = self._begins + last
                parts.append(_part(self._batch, first, last))
                if row == self._row == int(self._ends[self._number]):
                    next(self._batches, None)  # raises if there are more
        except BaseException as error:
            self.close()
            raise self._explained(block, row - begin, error) from error
        if parts and isinstance(parts[0], TensorRows):
            return parts[0] if len(parts) == 1 else parts[0].joined(parts[1:])
        return pa.Table.from_batches(parts, source.schema or (None if parts else pa.schema([])))

    def first(self, file: int) -> Any:
        block = int(self._source.first_block[file])
        try:
            self._go_to(block)
            try:
                return next(self._begin(0))[1]
            except Exception as error:
                return self._source.bad_rows(int(self._source.layouts[file].rows[0]), error)
        except BaseException as error:
            raise self._explained(block, 0, error) from error

    def close(self) -> None:
        self._stop_decoding()
        self._batch, self._begins, self._row = None, 0, 0
        _close(self._opened)
        self._opened, self._block, self._file = None, -1, -1

    def _stop_decoding(self) -> None:
        _close(self._batches)
        self._batches, self._number = iter(()), -1

    def _go_to(self, block: int) -> None:
        if block == self._block:
            return
        source, file = self._source, int(self._source.file_of_block[block])
        opened = self._ahead.take(self._fetches[block]) if block in self._fetches else None
        if file != self._file:
            self.close()
            self._ends = np.cumsum(source.layouts[file].rows)
        if opened is not None or file != self._file:
            self._stop_decoding()  # what was decoded last stays: it may be of this block, too
            _close(self._opened)
            self._opened, self._file = opened or source.opened(file, self._requests), file
        self._block = block

    def _decode(self, row: int) -> None:
        source = self._source
        number = int(np.searchsorted(self._ends, row, side="right"))
        if number != self._number or row < self._row:
            self._stop_decoding()
            self._batches, self._number, self._bad = self._begin(number), number, 0
            self._next = int(self._ends[number] - source.layouts[self._file].rows[number])
        self._begins = self._row = 0
        while not self._begins <= row < self._row:
            self._batch = None  # two would take twice the memory
            try:
                self._begins, batch = next(self._batches)
            except Exception as error:
                self._begins, batch = self._next, self._left_out(error)
            self._row = self._next = self._begins + len(batch)
            first = max(0, self._begins - int(source.begins[self._block]))
            place = partial(source.place, self._block, first)
            self._batch = source.conform(batch, place)
            if source.rows_schema is not None:
                self._count_bad()

    def _count_bad(self) -> None:
        """Count bad rows of the batch at hand; where all rows of a block or file are bad, that is logged."""
        why = self._batch.column(BAD.name)
        self._bad += len(why) - why.null_count
        rows = int(self._source.layouts[self._file].rows[self._number])
        if self._bad == rows and self._row == int(self._ends[self._number]):
            self._source.say_all_bad(self._file, self._number, rows)

    def _left_out(self, error: Exception) -> pa.RecordBatch:
        """The rows left of the format's block, which cannot be read; raises if they are not left out."""
        rows = int(self._ends[self._number]) - self._next
        if not rows or self._source.rows_schema is None or self._change(self._file):
            raise error
        return self._source.bad_rows(rows, error)

    def _begin(self, number: int) -> Iterator[tuple[int, Any]]:
        # The generator does not refer to the reader.
        source, layout = self._source, self._source.layouts[self._file]
        batches = source.format.decode(self._opened, layout, number, source.columns)
        counted, end = int(layout.rows[number]), int(self._ends[number])
        return _counted(batches, end - counted, end, source.decoder)

    def _explained(self, block: int, row: int, error: BaseException) -> BaseException:
        source, file = self._source, int(self._source.file_of_block[block])
        place = source.place(block, row)
        if isinstance(error, Exception) and not isinstance(
            error, DataError | MemoryError | OSError
        ):
            forget(source.kept_in)  # it may be what is wrong
            try:
                change = self._change(file)
            except Exception as failed:
                error, change = failed, ""
            if change:
                return changed(place, change)
        if isinstance(error, _OtherRowsError):
            return source.other_rows(place, *error.args)
        return explanation(error, place, source.failed, source.kept_in)

    def _change(self, file: int) -> str:
        """How a file differs from the one that was listed and scanned; or ""."""
        data = self._source.data(file, self._requests)
        data.read([(0, min(1, data.size))])
        return self._source.format.change(data, self._source.layouts[file])


def _counted(
    batches: Iterator[Any], begin: int, end: int, decoder: str
) -> Iterator[tuple[int, Any]]:
    """Batches of rows ``begin`` to ``end`` of a file, each with its first row."""
    row = begin
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch | TensorRows):
            kind = type(batch).__name__
            raise BadFileError(f"{decoder} yields pyarrow.RecordBatches, got {kind}")
        rows = len(batch)
        if row + rows > end:
            raise _OtherRowsError("more rows", end - begin)
        if rows:
            yield row, batch
        row += rows
        del batch
    if row < end:
        raise _OtherRowsError(f"{row - begin:,} rows" if row > begin else "no rows", end - begin)


def _part(batch: Any, first: int, last: int) -> Any:
    if last - first == len(batch):
        return batch
    return batch.slice(first, last if isinstance(batch, TensorRows) else last - first)


def _close(opened: Any) -> None:
    if hasattr(opened, "close"):
        opened.close()


def explanation(
    error: BaseException,
    place: Place,
    what: str = "the rows here cannot be read",
    kept_in: str | None = None,
    kinds: tuple[type[Exception], ...] = (Exception,),
) -> BaseException:
    """The error with file and row, in our words; other errors as they are."""
    if isinstance(error, UnreachableError | DataChangedError) and error.row is None:
        return located(place, error)  # type: ignore[no-any-return]
    if isinstance(error, MemoryError):  # a damaged number may be what asks for so much
        error.add_note(f"{place}: {what}")
    if isinstance(error, TrainpipesError | MemoryError):
        return error
    if isinstance(error, FileNotFoundError):
        return gone(place)
    if isinstance(error, PermissionError):
        return unreadable(place, "permission denied")
    if not isinstance(error, Exception) or not isinstance(error, (OtherBytesError, *kinds)):
        return error
    forget(kept_in)
    if isinstance(error, OtherBytesError):
        return changed(place, str(error))
    return unreadable(place, f"{what}: {reason(error)}")


@contextmanager
def explained(place: Place, *how: Any, **more: Any) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        reported = explanation(error, place, *how, **more)
        if reported is error:
            raise
        raise reported from error


class _OtherRowsError(Exception):
    """The number of rows differs from the count."""
