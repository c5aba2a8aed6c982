"""The job as a whole: which steps there are, and the last one, which writes the files.

The input is read once. Where rows are shuffled or sorted, or duplicates dropped, they go through temporary
files; else each file is written from the input. Every step is made of tasks that depend on the steps before
it alone, and that can be done in any order, by any process, and again after a kill: a part of the input, a
range of hashes, a stretch of keys, a file. What they make does not depend on memory or threads.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.errors import ConfigError, DataError
from trainpipes.order import IntArray
from trainpipes.pipeline import Pipeline
from trainpipes.prepare.repack.placing import sorted_parts
from trainpipes.prepare.repack.reading import InputReader, check_rows
from trainpipes.prepare.repack.row_groups import check_file, write_file
from trainpipes.prepare.repack.sorted_runs import RunReader
from trainpipes.prepare.repack.work import FILE_BYTES, Options, Report, Work, remove_folder
from trainpipes.values.content_hash import checksum, row_hashes
from trainpipes.writers.epoch_rows import EpochRows
from trainpipes.writers.output_folder import Opened, OutputFolder

__all__ = ["ROW_BYTES", "Job"]

#: Bytes of a row of which nothing is known.
ROW_BYTES = 1024


class Job:
    """Does it.

    Args:
        pipeline: gives the rows.
        rows: of the pipeline, not yet opened.
        out: the folder, entered.
        opened: what of it is there, and the plan in its notes.
        options: what to do.
        report: told how far it is.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        rows: EpochRows,
        out: OutputFolder,
        opened: Opened,
        options: Options,
        report: Report,
    ) -> None:
        self._pipeline, self._rows, self._out = pipeline, rows, out
        self._opened, self._options, self._asker = opened, options, options.asker
        self._count = rows.count if rows.plan.counted else None
        row_bytes = getattr(rows.plan.inputs.source, "row_bytes", None) or ROW_BYTES
        self._size = int((self._count or 0) * row_bytes)  # in memory, about
        # Each file is then written from the input. A user's functions are called by one thread at a time.
        self._in_order = self._count is not None and not options.moves_rows
        threads = 1 if self._in_order and rows.plan.runs_user_code else max(1, options.threads)
        self._work = Work(options, Path(opened.notes["temporary"]), threads, report)
        self._runs: list[Path] = []
        self._lock = threading.Lock()
        self._done = sum(entry["rows"] for entry in opened.files)

    def run(self) -> dict[str, Any]:
        """Do what is not done yet.

        Returns:
            "files" as the manifest has them, "columns", and "notes" for it.
        """
        if self._count == 0:
            raise self._no_rows()
        if self._count is not None:
            self._check_files(self._count)
        if self._in_order:
            assert self._count is not None
            return self._write(self._count, self._size, self._count, None)
        self._work.make_folders()
        parts = InputReader(
            self._work, self._rows, self._opened.notes["part_rows"], self._size
        ).read()
        pa.default_memory_pool().release_unused()
        rows = kept = sum(part.rows for part in parts)
        if not rows:
            remove_folder(self._work.temporary)
            raise self._no_rows()
        if self._count is None or self._options.needs_all:
            parts, kept = sorted_parts(self._work, parts)
        folder = self._work.temporary / "runs"
        self._runs = [folder / name for part in parts for name in part.runs or ()]
        content = sum(part.checksum - part.left_out for part in parts) % 2**64
        return self._write(kept, sum(part.bytes for part in parts), rows, content)

    def _no_rows(self) -> ConfigError:
        return ConfigError(
            f"{self._asker}(): the input has no rows, and nothing was written: check what filters it"
        )

    def _write(self, rows: int, size: int, rows_in: int, content: int | None) -> dict[str, Any]:
        """Write the files that are not there yet.

        Args:
            rows: to be written.
            size: their bytes in memory.
            rows_in: rows of the input.
            content: checksum of the rows to be written; None where each file's is compared.
        """
        starts = self._starts(rows, size)
        names = [f"part-{number:05d}.parquet" for number in range(len(starts) - 1)]
        files = {entry["file"]: entry for entry in self._opened.files}
        columns = self._opened.columns

        def write(number: int) -> dict[str, Any]:
            first, stop = int(starts[number]), int(starts[number + 1])
            return self._file(names[number], first, stop, rows)

        missing = [number for number, name in enumerate(names) if name not in files]
        for _, entry in self._work.workers.each(write, missing):
            columns = entry.pop("columns")
            files[entry["file"]] = entry
            there = [files[name] for name in names if name in files]
            self._out.save(Opened(None, there, None, self._opened.notes, columns))
        there = [files[name] for name in names]
        assert columns is not None
        found = sum(int(entry["checksum"], 16) for entry in there) % 2**64
        written = sum(entry["rows"] for entry in there)
        if written != rows or content not in (None, found):
            raise self._unlike(rows, written)
        notes = {
            "rows_in": rows_in, "duplicates": rows_in - rows, "checksum": f"{found:016x}",
            "row_groups": sum(entry["row_groups"] for entry in there),
        }  # fmt: skip
        return {"files": there, "columns": columns, "notes": notes}

    def _file(self, name: str, first: int, stop: int, rows: int) -> dict[str, Any]:
        """Write one file: a pure function of the input, the options and its place."""
        read = [0]  # checksum of what came from the input
        tables = (
            self._from_input(first, stop, read) if self._in_order else self._from_runs(first, stop)
        )

        def counted() -> Generator[pa.Table, None, None]:
            for table in tables:
                self._work.workers.go_on()
                count = len(table)
                yield table
                del table  # before the next rows are read
                with self._lock:
                    self._done += count
                self._work.report("writing", self._done, rows)

        with closing(tables), self._out.file(name) as file:
            entry = write_file(file, counted(), self._options.form)
            unlike = entry["rows"] != stop - first
            if unlike or (self._in_order and entry["checksum"] != read[0] % 2**64):
                raise self._unlike(stop - first, entry["rows"])
        if self._options.verify:
            check_file(str(self._out.path / name), entry, self._asker)
        entry["checksum"] = f"{entry['checksum']:016x}"
        return {"file": name, "bytes": file.size, "crc32": f"{file.check:08x}", **entry}

    def _unlike(self, rows: int, written: int) -> DataError:
        return DataError(
            f"{self._asker}(): what was written is not what was read: {written:,} rows of {rows:,}, or "
            "another checksum; this should never be: begin anew with overwrite=True, and report it"
        )

    def _starts(self, rows: int, size: int) -> IntArray:
        """The first row of each file, and how many there are."""
        self._check_files(rows)
        files, each = self._options.files, self._options.rows_per_file
        if each is not None:
            return np.append(np.arange(0, rows, each), rows)
        count = files or min(rows, max(1, round(size / FILE_BYTES)))
        numbers = np.arange(count + 1)
        return numbers * (rows // count) + np.minimum(numbers, rows % count)

    def _check_files(self, rows: int) -> None:
        """Raise ConfigError where there are fewer rows than files."""
        files = self._options.files
        if files is not None and files > rows:
            remove_folder(self._work.temporary)  # nothing could go on with what was read
            raise ConfigError(
                f"{self._asker}(files={files}): each file has a row at least, and there are {rows:,} rows: "
                "give fewer files"
            )

    def _from_runs(self, first: int, stop: int) -> Generator[pa.Table, None, None]:
        """Rows by their places, of temporary files."""
        with closing(RunReader(self._runs, self._asker)) as reader:
            for low, high in reader.windows(first, stop, self._work.unit):
                yield reader.read(low, high)

    def _from_input(
        self, first: int, stop: int, read: list[int]
    ) -> Generator[pa.Table, None, None]:
        """Rows of the input, by their numbers."""
        rows = EpochRows(self._pipeline, self._asker)
        rows.open(rows.cursor_at(first))
        with closing(rows):
            at = first
            while at < stop:
                table = rows.some()
                if table is None:
                    raise self._work.changed(first, stop - first, at - first)
                table = table.slice(0, stop - at)
                if at == first:
                    check_rows(table.schema, self._work)
                at += len(table)
                read[0] += checksum(row_hashes(table))
                yield table
