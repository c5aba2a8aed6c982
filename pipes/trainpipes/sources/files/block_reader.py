"""Reads rows of blocks in order, of any format, and fetches ahead from other machines."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes import errors
from trainpipes._internal import locks
from trainpipes._internal.activity import BYTES
from trainpipes._internal.checks import IntArray
from trainpipes._internal.pool import Future, Pool, waits_for_server
from trainpipes.columns.payload import Payload
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.filesystems.retry import Requests
from trainpipes.interfaces.source import Place
from trainpipes.sources.files import file_bytes
from trainpipes.sources.files.decoded_files import BAD, DecodedFiles
from trainpipes.sources.files.formats import BadFileError, InPieces, OtherBytesError, reason
from trainpipes.sources.files.index_store import forget

#: Threads of a process that wait for servers.
MAX_THREADS = 32
#: Blocks that a reader fetches ahead, at most, however small they are: each further block looks at all of
#: them.
MOST_HELD = 4 * MAX_THREADS


@cache
def waiting() -> Pool:
    """The threads that wait for servers, shared by all readers of the process."""
    return Pool(MAX_THREADS, name="trainpipes-requests", waiting=BYTES)


class _Readers:
    """All readers of a process that read ahead: blocks that somebody waits for come first, then those needed
    next.
    """

    def __init__(self) -> None:
        self.lock = locks.InterruptibleLock()
        self._all: locks.Living[Ahead] = locks.Living()
        self._busy = 0
        self._is_cold = True

    def add(self, reader: Ahead) -> None:
        with self.lock:
            self._all.add(reader)

    def go_on(self, is_cold: bool | None = None) -> None:
        """Begin fetches that there is room for, with the lock. The very first fetch has the line for itself,
        since the first batch waits for it.
        """
        readers = list(self._all)
        coming = [reader for reader in readers if reader.upcoming]
        held = sum(reader.held for reader in readers)
        if is_cold is not None or not (self._busy or held):
            self._is_cold = is_cold is None
        while coming and self._busy < (1 if self._is_cold else MAX_THREADS):
            first = min(coming, key=Ahead.place)
            size = first.begin(held)
            if size is None:
                return
            held += size
            self._busy += 1
            coming = [reader for reader in coming if reader.upcoming]

    def is_done(self) -> None:
        with self.lock:
            self._busy -= 1
            self.go_on(is_cold=False)


_readers = _Readers()


def _forget() -> None:
    global _readers
    _readers = _Readers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # the parent's readers are not the child's


class Ahead:
    """Blocks that a reader has opened ahead, in the order of its need. Any thread may ask."""

    def __init__(
        self, open_block: Callable[[Any], Any], size: Callable[[Any], float], most: float
    ) -> None:
        self._open, self._size, self._most = open_block, size, most
        self._readers = _readers
        #: Blocks to be opened, and their turns; bytes of blocks that are open or being opened.
        self.upcoming: dict[Any, float] = {}
        self.held = 0.0
        self._futures: dict[Any, Future] = {}
        #: Blocks that somebody waits for before their turn; a flag is set once its block is being opened.
        self._wanted: dict[Any, locks.Flag] = {}
        self._readers.add(self)

    def expect(
        self,
        blocks: Iterable[Any],
        more: bool = False,
        turns: Sequence[float] = (),
        most: float = math.inf,
    ) -> None:
        """Name the blocks to be read next, in order; others are forgotten, or come after ``more``.

        Args:
            turns: of each block; the least of all readers come first.
            most: bytes that the process may hold, where that is less than the user's limit.
        """
        with self._readers.lock:
            self._most = min(self._most, most)
            wanted = dict(zip(blocks, turns or repeat(0.0), strict=False))
            held = self.upcoming if more else {n: self.upcoming[n] for n in self._wanted}
            wanted |= {n: turn for n, turn in held.items() if n not in wanted}
            if not more:
                for block in [n for n in self._futures if n not in wanted]:
                    self._pop(block)
            self._set({n: turn for n, turn in wanted.items() if n not in self._futures})
            self._readers.go_on()

    def __contains__(self, block: Any) -> bool:
        return block in self._futures

    def _set(self, upcoming: dict[Any, float]) -> None:
        self.upcoming = dict(sorted(upcoming.items(), key=lambda item: item[0] not in self._wanted))

    def _pop(self, block: Any) -> Future | None:
        future = self._futures.pop(block, None)
        self.held -= 0.0 if future is None else self._size(block)
        return future

    def place(self) -> tuple[bool, float, int]:
        """The turn of the first upcoming block, in the line of the process."""
        block, turn = next(iter(self.upcoming.items()))
        return block not in self._wanted, turn, len(self._futures)

    def begin(self, held: float) -> float | None:
        """Open the first upcoming block; its size, or None if it has to wait. ``held``: by all readers."""
        block = next(iter(self.upcoming))
        size, wanted = self._size(block), self._wanted.pop(block, None)
        full = held + size > self._most or len(self._futures) >= MOST_HELD
        if full and held and wanted is None:
            return None
        del self.upcoming[block]
        work = partial(_opened, self._open, block, self._readers)
        self._futures[block] = waiting().submit(work)
        self.held += size
        if wanted is not None:
            wanted.set()
        return size

    def take(self, block: Any) -> Any:
        """A block that was opened ahead; None if it was not, or was out of reach."""
        readers, wanted = self._readers, None
        with readers.lock:
            if block in self.upcoming:
                wanted = self._wanted.setdefault(block, locks.Flag())
                self._set(self.upcoming)
                readers.go_on()
        if wanted is not None:
            with waits_for_server():
                locks.wait_for(wanted)
        with readers.lock:
            future = self._pop(block)
            readers.go_on()
        if future is None or (future.done and isinstance(future.error, errors.UnreachableError)):
            return None  # the server may be there again
        try:
            with waits_for_server():
                return waiting().result(future)
        except FileNotFoundError:
            return None  # who reads it says so, and where


def _opened(open_block: Callable[[Any], Any], block: Any, readers: _Readers) -> Any:
    try:
        return open_block(block)
    finally:
        readers.is_done()


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
    """A place in files; for a single thread."""

    def __init__(self, source: DecodedFiles) -> None:
        self._source = source
        requests = self._requests = Requests(source.files.retry)
        weakref.finalize(self, requests.stop)

        # This does not refer to the reader: it goes, with its open files, when nobody else does.
        def fetch(blocks: _Fetch) -> Any:
            data, layout = source.data(blocks.file, requests), source.layouts[blocks.file]
            return source.format.fetch(data, layout, blocks.numbers, source.columns)

        most = source.files.prefetch_bytes
        self._largest = max(FETCHED, most // 4)
        self._ahead = Ahead(fetch, lambda blocks: blocks.size, most)
        #: Fetches by block, of blocks that are fetched ahead; set by ``expect``.
        self._fetches: dict[int, _Fetch] = {}
        # The block that is open, its file, the file as the format has it, and where the format's blocks
        # end in it; set where a block is opened.
        self._block = self._file = -1
        self._opened: Any = None
        self._ends: IntArray = np.zeros(0, dtype=np.int64)
        # The format's block that is decoded, its batches and the last batch; set as it is decoded.
        self._number = -1
        self._batches: Iterator[tuple[int, Any]] = iter(())
        self._batch: Any = None
        #: Rows in the file: where the last batch begins, and where the next begins.
        self._begins = self._row = 0
        #: The first row that is not decoded yet.
        self._next = 0
        #: Unreadable rows of the format's block before that row.
        self._bad = 0
        #: Rows that are read at a time; set by ``read``.
        self._wanted = 0

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
            block_file = int(source.file_of_block[block])
            if source.is_here(block_file):
                continue
            if block in known:
                self._fetches[block] = known[block]
                continue
            if block_file != file:
                file, last, before = block_file, -1, -2
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
                fetch = _Fetch(block_file, numbers, size)
            self._fetches[block], before = fetch, block
        turn = dict(zip(blocks, turns or repeat(0.0), strict=False))
        due: dict[_Fetch, float] = {}
        for block, fetch in self._fetches.items():
            due[fetch] = min(turn[block], due.get(fetch, math.inf))
        fetches = list(due)
        if form.fetches_parts and [len(fetch.numbers) for fetch in fetches] == [1]:
            # Nothing is read meanwhile, and less is held of a large block as it is read.
            fetches = [
                fetch for fetch in fetches if fetch in self._ahead or fetch.size <= self._largest
            ]
        self._ahead.expect(fetches, turns=[due[fetch] for fetch in fetches], most=most)

    def read(self, block: int, start: int, stop: int) -> Payload:
        source = self._source
        begin = int(source.begins[block])
        row, end = begin + start, begin + stop
        self._wanted = stop - start
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
        block, rows = int(self._source.first_block[file]), self._source.layouts[file].rows
        number = int(np.flatnonzero(rows)[0])
        try:
            self._go_to(block)
            try:
                return next(self._begin(number))[1]
            except Exception as error:
                return self._source.bad_rows(int(rows[number]), error)
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
            self._stop_decoding()  # the last decoded batch stays: it may be of this block, too
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
        if isinstance(self._opened, InPieces):
            self._opened.wanted = self._wanted
        batches = source.format.decode(self._opened, layout, number, source.columns)
        counted, end = int(layout.rows[number]), int(self._ends[number])
        return _counted(batches, end - counted, end, source.decoder)

    def _explained(self, block: int, row: int, error: BaseException) -> BaseException:
        source, file = self._source, int(self._source.file_of_block[block])
        place = source.place(block, row)
        if isinstance(error, Exception) and not isinstance(
            error, errors.DataError | MemoryError | OSError
        ):
            forget(source.kept_in)  # the index may be wrong
            try:
                change = self._change(file)
            except Exception as failed:
                error, change = failed, ""
            if change:
                return file_bytes.changed(place, change)
        if isinstance(error, _OtherRowsError):
            return source.other_rows(place, *error.args)
        return explanation(error, place, source.failed, source.kept_in)

    def _change(self, file: int) -> str:
        """How a file differs from its listing and its scan; or ""."""
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
    failure: str = "the rows here cannot be read",
    kept_in: str | None = None,
    kinds: tuple[type[Exception], ...] = (Exception,),
) -> BaseException:
    """The error with file and row, in our words; other errors as they are."""
    if isinstance(error, errors.UnreachableError | errors.DataChangedError) and error.row is None:
        return file_bytes.located(place, error)  # type: ignore[no-any-return]
    if isinstance(error, MemoryError):  # a damaged number may ask for so much
        error.add_note(f"{place}: {failure}")
    if isinstance(error, errors.TrainpipesError | MemoryError):
        return error
    if isinstance(error, FileNotFoundError):
        return file_bytes.gone(place)
    if isinstance(error, PermissionError):
        return file_bytes.unreadable(place, "permission denied")
    if not isinstance(error, Exception) or not isinstance(error, (OtherBytesError, *kinds)):
        return error
    forget(kept_in)
    if isinstance(error, OtherBytesError):
        return file_bytes.changed(place, str(error))
    return file_bytes.unreadable(place, f"{failure}: {reason(error)}")


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
