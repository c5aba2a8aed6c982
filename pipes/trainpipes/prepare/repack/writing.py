"""The last step: each output file is written from the rows that belong in it."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trainpipes.columns.content_hash import checksum, row_hashes
from trainpipes.engine.layout import IntArray
from trainpipes.errors import DataError
from trainpipes.prepare.repack.reading import Input, check_rows
from trainpipes.prepare.repack.row_groups import check_file, write_file
from trainpipes.prepare.repack.sorted_runs import RunReader
from trainpipes.prepare.repack.work import Work
from trainpipes.prepare.repack.workers import Tell
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.writers.manifest import check_bytes
from trainpipes.storage.writers.storage import Storage


def file_name(number: int) -> str:
    """Name of an output file."""
    return f"part-{number:05d}.parquet"


def unlike(asker: str, rows: int, written: int) -> DataError:
    """What to raise where rows were lost or changed on their way."""
    return DataError(
        f"{asker}(): what was written is not what was read: {written:,} rows of {rows:,}, or "
        "another checksum; this should never be: begin anew with overwrite=True, and report it"
    )


@dataclass(frozen=True)
class WriteFile:
    """Writes one file: a pure function of the input, the options and its place.

    Attributes:
        work: of which this is a step.
        storage: that files are written to.
        starts: the place of the first row of each file, and the end.
        input: that rows are read from; or
        runs: names of the runs that they are read from, and
        schema: of their rows.
    """

    work: Work
    storage: Storage
    starts: IntArray
    input: Input | None
    runs: Sequence[str] = ()
    schema: pa.Schema | None = None

    def __call__(self, number: int, tell: Tell) -> dict[str, Any]:
        """Write it, and put it in its place when it is whole.

        Returns:
            What the manifest has of it, and "columns".
        """
        name, work = file_name(number), self.work
        first, stop = int(self.starts[number]), int(self.starts[number + 1])
        read = [0]  # checksum of what came from the input
        tables = self._from_runs(first, stop)
        if self.input is not None:
            tables = self._from_input(self.input, first, stop, read)

        def counted() -> Generator[pa.Table, None, None]:
            for table in tables:
                tell(0)
                count = len(table)
                yield table
                del table  # before the next rows are read
                tell(count)

        # No other try of the same file, which may be under way elsewhere, has this token.
        with self.storage.making(name, secrets.token_hex(4)) as part:
            file = OutputFile(part, work.asker)
            with closing(file), closing(tables):
                entry = write_file(file, counted(), work.options.form)
                if entry["rows"] != stop - first or (
                    self.input is not None and entry["checksum"] != read[0] % 2**64
                ):
                    raise unlike(work.asker, stop - first, entry["rows"])
                file.sync()
            if work.options.verify:
                check_file(part, entry, self.storage.at(name), work.asker)
            self.storage.put(part, name)
        entry |= {"file": name, "bytes": file.size, "crc32": f"{file.check:08x}"}
        entry["checksum"] = f"{entry['checksum']:016x}"
        if work.options.verify:
            check_bytes(self.storage, [entry])
        return entry

    def named(self, number: int) -> str:
        """What is made, for messages."""
        return file_name(number)

    def _from_runs(self, first: int, stop: int) -> Generator[pa.Table, None, None]:
        """Rows by their places, of temporary files."""
        reader = RunReader(self.work.files, self.runs, self.schema, first, stop)
        yield from reader.tables(self.work.unit)

    def _from_input(
        self, given: Input, first: int, stop: int, read: list[int]
    ) -> Generator[pa.Table, None, None]:
        """Rows of the input, by their numbers."""
        rows = given.rows()
        rows.open(rows.cursor_at(first))
        with closing(rows):
            at = first
            while at < stop:
                table = rows.some()
                if table is None:
                    raise self.work.changed(first, stop - first, at - first)
                table = table.slice(0, stop - at)
                if at == first:
                    check_rows(table.schema, self.work)
                at += len(table)
                read[0] += checksum(row_hashes(table))
                yield table
