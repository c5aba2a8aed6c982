"""Reads rows of blocks in order, of any format: goes to a row, gives all files the same columns and types,
says what is wrong and where, and fetches ahead what is on other machines.

A ``BlockReader`` is one place in the files, for one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa

from trainpipes.errors import DataChangedError, DataError, SchemaError, UnreachableError
from trainpipes.kinds.source import Place
from trainpipes.sources.files.each_file import BadFileError, one_line
from trainpipes.sources.files.file_bytes import FileBytes, open_bytes
from trainpipes.sources.files.file_errors import gone, located, unreachable, unreadable
from trainpipes.sources.files.index_store import forget
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.files.schema import cast_to
from trainpipes.sources.remote.ahead import Ahead
from trainpipes.sources.remote.retry import Requests

if TYPE_CHECKING:
    from trainpipes.sources.files.file_source import FileSource


class BlockReader:
    """One place in files. Not for two threads at once.

    Args:
        source: the files and blocks.
    """

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self._requests = Requests(source.files.retry_seconds)
        self._ahead = Ahead(self._fetch, source.fetched_bytes, source.files.prefetch_bytes)
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None
        self._block, self._row = -1, 0

    def expect(self, blocks: Sequence[int]) -> None:
        """Say which blocks will be read next, in order: those on other machines are fetched, several side by
        side."""
        source = self._source
        there = [
            b for b in blocks if not is_local(source.files.system(int(source.file_of_block[b])))
        ]
        self._ahead.expect([b for b in there if b != self._block and source.ranges(b)])

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        """Rows ``start`` to ``stop`` of a block.

        Costs nothing extra where the last call ended. Rows between the place and ``start`` are decoded and
        dropped; for an earlier place the block is decoded anew.

        Raises:
            DataError: they cannot be had; says why and where.
            UnreachableError: the server does not answer, or denies access.
        """
        if start == stop:
            return pa.Table.from_batches([], self._source.schema or pa.schema([]))
        try:
            if block != self._block or start < self._row:
                self._begin(block)
            while self._row < start:
                self._take(start - self._row)
            parts = []
            while self._row < stop:
                parts.append(self._conform(self._take(stop - self._row)))
            if self._row == int(self._source.lengths[block]):
                self._check_end()
        except BaseException as error:
            row = self._row if block == self._block else start
            self.close()
            raise self._explained(block, row, error) from error
        return pa.Table.from_batches(parts)

    def first(self, block: int) -> pa.RecordBatch:
        """The first rows of a block, as the format gives them."""
        try:
            self._begin(block)
            return self._take(int(self._source.lengths[block]))
        except BaseException as error:
            raise self._explained(block, 0, error) from error

    def close(self) -> None:
        """Let go of what is open."""
        close: Callable[[], Any] = getattr(self._batches, "close", lambda: None)
        close()
        self._batches, self._rest, self._block, self._row = iter(()), None, -1, 0

    def _begin(self, block: int) -> None:
        """Go to the first row of a block."""
        self.close()
        source = self._source
        file = int(source.file_of_block[block])
        data = self._ahead.take(block) or open_bytes(source.files, file, self._requests)
        layout, own = source.layouts[file], block - int(source.first_block[file])
        self._block = block
        self._batches = iter(source.format.decode(data, layout, own, source.columns))

    def _fetch(self, block: int) -> FetchedBytes:
        """The bytes of a block, which are here; in any thread."""
        source = self._source
        data = open_bytes(source.files, int(source.file_of_block[block]), self._requests)
        return FetchedBytes(data, source.ranges(block))

    def _take(self, rows: int) -> pa.RecordBatch:
        """The next rows, as many as come easily and no more than ``rows``."""
        while self._rest is None or not len(self._rest):
            self._rest = self._next()
            if self._rest is None:
                raise _OtherRowsError(f"{self._row:,} rows" if self._row else "no rows")
        found, self._rest = self._rest.slice(0, rows), self._rest.slice(rows)
        self._row += len(found)
        return found

    def _next(self) -> pa.RecordBatch | None:
        batch = next(self._batches, None)
        if batch is not None and not isinstance(batch, pa.RecordBatch):
            kind = type(batch).__name__
            raise BadFileError(f"{self._source.decoder} yields pyarrow.RecordBatches, got {kind}")
        return batch

    def _check_end(self) -> None:
        """Raise if there are more rows than were counted."""
        while self._rest is not None:
            if len(self._rest):
                raise _OtherRowsError("more rows")
            self._rest = self._next()

    def _conform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows in the source's columns and types."""
        schema, source = self._source.schema, self._source
        if schema is None or batch.schema.equals(schema):
            return batch
        place = source.place(self._block, self._row - len(batch))
        names = batch.schema.names
        lacking = [name for name in schema.names if names.count(name) != 1]
        if lacking or (source.columns is None and len(names) > len(schema)):
            raise SchemaError(
                f"{place}: {source.decoder} gives the columns {names} here, and {source.said_of_schema} "
                f"{schema.names}: give all rows the same ones",
                **vars(place),
            )
        columns = [cast_to(batch.column(field.name), field, lambda: place) for field in schema]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _explained(self, block: int, row: int, error: BaseException) -> BaseException:
        """What is wrong with a file, in our words; other errors as they are."""
        source = self._source
        place = source.place(block, row)
        if isinstance(error, _OtherRowsError):
            forget(source.kept_in)
            counted = int(source.lengths[block])
            return DataError(
                f"{place}: {source.decoder} gives {error}, and {counted:,} were counted: let both agree; if "
                f"one of them has changed, give another {source.versioned_by}",
                **vars(place),
            )
        what = f"{source.decoder} failed here"
        what += "" if isinstance(error, BadFileError) else f": {type(error).__name__}"
        return explanation(error, place, what, source.kept_in, (Exception,))


def explanation(
    error: BaseException,
    place: Place,
    what: str,
    kept_in: str | None,
    kinds: tuple[type[Exception], ...],
) -> BaseException:
    """What is wrong with a file, in our words, and where; other errors as they are.

    Args:
        error: what was raised as the file was read.
        place: where.
        what: what could not be done there.
        kept_in: the index that tells what to read, if one is kept: it may be what is wrong.
        kinds: errors for which the file is damaged.
    """
    if isinstance(error, UnreachableError):
        return unreachable(place, error)
    if isinstance(error, DataChangedError) and error.row is None:
        return located(place, error)
    if isinstance(error, DataError | MemoryError):
        return error
    if isinstance(error, FileNotFoundError):
        return gone(place)
    if isinstance(error, PermissionError):
        return unreadable(place, "permission denied")
    if not isinstance(error, kinds):
        return error
    forget(kept_in)
    return unreadable(place, f"{what}: {one_line(error)}")


@contextmanager
def explained(
    place: Place,
    what: str = "the rows here cannot be read",
    kept_in: str | None = None,
    kinds: tuple[type[Exception], ...] = (BadFileError, OSError, EOFError, ValueError),
) -> Iterator[None]:
    """Raise errors of what is done as ``explanation`` says."""
    try:
        yield
    except BaseException as error:
        found = explanation(error, place, what, kept_in, kinds)
        if found is error:
            raise
        raise found from error


class FetchedBytes:
    """The bytes of a file, some of which are here.

    Args:
        data: the file.
        ranges: what is fetched.
    """

    def __init__(self, data: FileBytes, ranges: Sequence[tuple[int, int]]) -> None:
        self.name, self.size, self.version = data.name, data.size, data.version
        self.checked, self._data = data.checked, data
        self._here = dict(zip(ranges, data.read(ranges), strict=True))

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        found = [self._part(*one) for one in ranges]
        missing = [n for n, part in enumerate(found) if part is None]
        for n, part in zip(missing, self._data.read([ranges[n] for n in missing]), strict=True):
            found[n] = part
        return [part for part in found if part is not None]

    def _part(self, start: int, stop: int) -> memoryview | None:
        for (first, last), part in self._here.items():
            if first <= start and stop <= last:
                return part[start - first : stop - first]
        return None

    def stream(self, start: int = 0) -> BinaryIO:
        return self._data.stream(start)

    def check(self) -> None:
        self._data.check()


class _OtherRowsError(Exception):
    """There are other than the rows that were counted; says how many."""
