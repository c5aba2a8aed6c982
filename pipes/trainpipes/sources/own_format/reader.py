"""Reads rows of files of the user's own format in order, by the user's function.

An ``OwnReader`` is one place in the files, for one thread at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa

from trainpipes._internal.text import shown
from trainpipes.errors import DataChangedError, DataError, SchemaError
from trainpipes.kinds.options import show
from trainpipes.sources.files.each_file import BadFileError, one_line
from trainpipes.sources.files.file_bytes import open_bytes
from trainpipes.sources.files.file_errors import gone, located, unreadable
from trainpipes.sources.files.index_file import forget
from trainpipes.sources.remote.retry import Requests

if TYPE_CHECKING:
    from trainpipes.sources.own_format.read_files import OwnFiles


def tables_of(found: Any, fn: Callable[..., Any]) -> Iterator[pa.Table]:
    """The tables that a function gives, one by one."""
    several = not isinstance(found, pa.Table | pa.RecordBatch)
    if several and not isinstance(found, Iterator | Sequence):
        raise BadFileError(
            f"{show(fn)} returns a pyarrow.Table or an iterator of them, got {shown(found)}"
        )
    for table in found if several else [found]:
        if not isinstance(table, pa.Table | pa.RecordBatch):
            raise BadFileError(f"{show(fn)} yields pyarrow.Tables, got {shown(table)}")
        yield pa.Table.from_batches([table]) if isinstance(table, pa.RecordBatch) else table


class OwnReader:
    """One place in files of the user's own format. Not for two threads at once.

    Args:
        source: the files and blocks.
    """

    def __init__(self, source: OwnFiles) -> None:
        self._source = source
        self._requests = Requests(source.files.retry_seconds)
        self._opened: list[BinaryIO] = []  # none or one
        weakref.finalize(self, _close, self._opened)
        self._tables: Iterator[pa.Table] = iter(())
        self._block, self._row = -1, 0
        self._rest: pa.Table | None = None

    def first(self, block: int) -> pa.Table:
        """The first rows of a block, as the function gives them."""
        try:
            self._begin(block)
            return next(table for table in self._tables if len(table))
        except BaseException as error:
            raise self._explained(block, 0, error) from error

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        """Rows ``start`` to ``stop`` of a block.

        Costs nothing extra where the last call ended. Rows between the place and ``start`` are read and
        dropped; for an earlier place the block is read anew.

        Raises:
            DataError: they cannot be had; says why and where.
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
                parts.append(self._fitted(self._take(stop - self._row), block))
            if self._row == int(self._source.lengths[block]):
                self._at_end()
        except BaseException as error:
            row = self._row if block == self._block else start
            self.close()
            raise self._explained(block, row, error) from error
        return pa.concat_tables(parts)

    def _begin(self, block: int) -> None:
        self.close()
        source = self._source
        file = int(source.file_of_block[block])
        opened = open_bytes(source.files, file, self._requests).stream()
        self._opened.append(opened)
        fn = source.stage.fn
        own = [block - int(source.first_block[file])] if source.in_blocks[file] else []
        self._block = block
        self._tables = tables_of(fn(opened, *own), fn)

    def _take(self, rows: int) -> pa.Table:
        """The next rows, as many as come easily and no more than ``rows``."""
        while self._rest is None or not len(self._rest):
            self._rest = next(self._tables, None)
            if self._rest is None:
                raise _OtherRows(f"{self._row:,} rows")
        found, self._rest = self._rest.slice(0, rows), self._rest.slice(rows)
        self._row += len(found)
        return found

    def _at_end(self) -> None:
        """Raise if there are more rows than were counted."""
        if self._rest is not None and len(self._rest):
            raise _OtherRows("more rows")

    def _fitted(self, table: pa.Table, block: int) -> pa.Table:
        schema = self._source.schema
        if schema is None or table.schema.equals(schema):
            return table
        place = self._source.place(block, self._row - len(table))
        if sorted(table.column_names) != sorted(schema.names):
            raise SchemaError(
                f"{place}: {show(self._source.stage.fn)} gives the columns {table.column_names} here, and "
                f"{'schema=' if self._source.stage.schema is not None else 'the first table'} has "
                f"{schema.names}: give all tables the same ones",
                **vars(place),
            )
        try:
            return table.select(schema.names).cast(schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            raise SchemaError(
                f"{place}: a table's types do not fit {schema.to_string(show_field_metadata=False)!r}: "
                f"{one_line(error)}; give another schema=, or cast them in {show(self._source.stage.fn)}",
                **vars(place),
            ) from error

    def _explained(self, block: int, row: int, error: BaseException) -> BaseException:
        """What is wrong with a file, in our words; other errors as they are."""
        source = self._source
        if isinstance(error, DataChangedError) and error.row is None:
            return located(source.place(block, row), error)
        if isinstance(error, DataError | MemoryError) or not isinstance(error, Exception):
            return error
        place = source.place(block, row)
        fn = show(source.stage.fn)
        if isinstance(error, FileNotFoundError):
            return gone(place)
        if isinstance(error, _OtherRows | StopIteration):
            forget(source.kept_in)
            counted = int(source.lengths[block])
            return DataError(
                f"{place}: {fn} gives {str(error) or 'no rows'}, and {counted:,} were counted: let fn and "
                "count agree; if the functions have changed, give another version=",
                **vars(place),
            )
        return unreadable(place, f"{fn} failed here: {type(error).__name__}: {one_line(error)}")

    def close(self) -> None:
        """Let go of the open file."""
        self._tables, self._rest, self._block, self._row = iter(()), None, -1, 0
        _close(self._opened)


def _close(files: list[BinaryIO]) -> None:
    while files:
        files.pop().close()


class _OtherRows(Exception):
    """A function gives other than the rows that were counted; says how many."""
