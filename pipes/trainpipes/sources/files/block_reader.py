"""Reads rows of blocks in order, of any format, and fetches ahead what is on other machines."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.payload import Payload
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.layout import IntArray
from trainpipes.errors import DataChangedError, DataError, TrainpipesError, UnreachableError
from trainpipes.kinds.source import Place
from trainpipes.sources.files.each_file import BadFileError, reason
from trainpipes.sources.files.file_errors import changed, gone, located, unreadable
from trainpipes.sources.files.format import OtherBytesError
from trainpipes.sources.files.index_store import forget
from trainpipes.sources.remote.ahead import Ahead
from trainpipes.sources.remote.retry import Requests

if TYPE_CHECKING:
    from trainpipes.sources.files.file_source import FileSource


#: Bytes of a block that is worth a request of its own, and of smaller ones that are fetched together.
SMALL, TOGETHER = 1 << 20, 4 << 20
#: Bytes of a block that is fetched ahead, with any limit of the user's.
FETCHED = 16 << 20


class BlockReader:
    """One place in files; for one thread."""

    def __init__(self, source: FileSource) -> None:
        self._source = source
        requests = self._requests = Requests(source.files.retry_seconds)
        weakref.finalize(self, requests.stop)
        wanted: dict[int, list[int]] = {}

        # These do not refer to the reader: it goes, with what it has open, when nobody else does.
        def fetch(first: int) -> Any:
            file, numbers = int(source.file_of_block[first]), wanted.get(first, [])
            data, layout = source.data(file, requests), source.layouts[file]
            return source.format.fetch(data, layout, numbers, source.columns)

        def size(first: int) -> float:
            file, numbers = int(source.file_of_block[first]), wanted.get(first, [])
            return source.format.fetched_bytes(source.layouts[file], numbers, source.columns)

        most = source.files.prefetch_bytes
        self._largest = max(FETCHED, most // 4)
        #: The format's blocks that are fetched at once, by the first block that needs them.
        self._wanted, self._ahead = wanted, Ahead(fetch, size, most)
        self._first: dict[int, int] = {}  # of blocks that are fetched at once, for each
        self._block = self._file = -1
        self._opened: Any = None  # the file, as the format has it
        self._ends: IntArray = np.zeros(0, dtype=np.int64)  # of the format's blocks in it
        self._number = -1  # of the one that is decoded
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None  # the last one
        self._begins = self._row = 0  # in the file: of that batch, and of the next one

    def expect(self, blocks: Sequence[int]) -> None:
        """Have remote blocks that will be read next fetched, several side by side."""
        source, form = self._source, self._source.format
        if source.is_local:
            return
        fetched = {b: first for b, first in self._first.items() if first in self._ahead}
        wanted: dict[int, list[int]] = {}
        self._first = {}
        file, last, before, total = -1, -1, -2, 0.0
        for block in dict.fromkeys(blocks):
            own = int(source.file_of_block[block])
            if source.is_here(own):
                continue
            if block in fetched:
                first = self._first[block] = fetched[block]
                wanted[first] = self._wanted[first]
                continue
            if own != file:
                file, last, before = own, -1, -2
            numbers = [n for n in source.decoded_blocks(block, block) if n != last]
            last = numbers[-1] if numbers else last
            size = form.fetched_bytes(source.layouts[file], numbers, source.columns)
            large = size > self._largest and not form.fetches_parts
            if block == self._block or not size or large:
                continue
            if block - 1 == before and size < SMALL and total + size <= TOGETHER:
                first, total = self._first[before], total + size
            else:
                first, total = block, size
            wanted.setdefault(first, []).extend(numbers)
            self._first[block], before = first, block
        if form.fetches_parts and [len(one) for one in wanted.values()] == [1]:
            # Nothing is read meanwhile, and less is held of it as it is read.
            wanted = {first: one for first, one in wanted.items() if first in self._ahead}
        self._wanted.clear()
        self._wanted.update(wanted)
        self._ahead.expect(list(wanted))

    def read(self, block: int, start: int, stop: int) -> Payload:
        source = self._source
        begin = source.begin_of(block, start, stop)
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
                if row == self._row and row == int(self._ends[self._number]):
                    self._check_count(any(map(len, self._batches)))
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
            self._begin(0)
            return self._next()
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
        opened = self._ahead.take(self._first[block]) if block in self._first else None
        if file != self._file:
            self.close()
            self._ends = np.cumsum(source.layouts[file].rows)
        if opened is not None or file != self._file:
            self._stop_decoding()  # what was decoded last stays: it may be of this block, too
            _close(self._opened)
            self._opened, self._file = opened or source.opened(file, self._requests), file
        self._block = block

    def _decode(self, row: int) -> None:
        number = int(np.searchsorted(self._ends, row, side="right"))
        if number != self._number or row < self._row:
            self._begin(number)
        while not self._begins <= row < self._row:
            batch = self._next()
            self._begins, self._row = self._row, self._row + len(batch)
            self._check_count(self._row > int(self._ends[number]))
            self._batch = self._conform(batch)

    def _begin(self, number: int) -> None:
        self._stop_decoding()
        source, layout = self._source, self._source.layouts[self._file]
        self._batch = None  # two would take twice the memory
        self._begins = self._row = int(self._ends[number] - layout.rows[number])
        self._batches = iter(source.format.decode(self._opened, layout, number, source.columns))
        self._number = number

    def _next(self) -> Any:
        while (batch := next(self._batches, None)) is not None:
            if not isinstance(batch, pa.RecordBatch | TensorRows):
                kind = type(batch).__name__
                raise BadFileError(
                    f"{self._source.decoder} yields pyarrow.RecordBatches, got {kind}"
                )
            if len(batch):
                return batch
        counted = int(self._source.layouts[self._file].rows[self._number])
        given = self._row - int(self._ends[self._number]) + counted
        raise _OtherRowsError(f"{given:,} rows" if given else "no rows", counted)

    def _check_count(self, more: bool) -> None:
        if more:
            counted = int(self._source.layouts[self._file].rows[self._number])
            raise _OtherRowsError("more rows", counted)

    def _conform(self, batch: Any) -> Any:
        begin = int(self._source.begins[self._block])
        row = max(0, self._begins - begin)
        return self._source.conform(batch, lambda: self._source.place(self._block, row))

    def _explained(self, block: int, row: int, error: BaseException) -> BaseException:
        source, file = self._source, int(self._source.file_of_block[block])
        place = source.place(block, row)
        if not isinstance(error, DataError | MemoryError | OSError) and isinstance(
            error, Exception
        ):
            forget(source.kept_in)  # it may be what is wrong
            try:  # how the file differs from the one that was listed and scanned
                data = source.data(file, self._requests)
                data.read([(0, min(1, data.size))])
                change = source.format.change(data, source.layouts[file])
            except Exception as failed:
                error, change = failed, ""
            if change:
                return changed(place, change)
        if isinstance(error, _OtherRowsError):
            return source.other_rows(place, *error.args)
        return explanation(error, place, source.failed, source.kept_in)


def _part(batch: Any, first: int, last: int) -> Any:
    if last - first == len(batch):
        return batch
    return batch.slice(first, last if isinstance(batch, TensorRows) else last - first)


def _close(opened: Any) -> None:
    close: Callable[[], Any] | None = getattr(opened, "close", None)
    if close is not None:
        close()


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
        found = explanation(error, place, *how, **more)
        if found is error:
            raise
        raise found from error


class _OtherRowsError(Exception):
    """The number of rows differs from the count."""
