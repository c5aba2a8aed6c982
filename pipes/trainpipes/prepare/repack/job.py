"""The job as a whole: which steps there are.

The input is read once. Where rows are shuffled or sorted, or duplicates dropped, they go through temporary
files; else each file is written from the input. Every step is made of tasks that depend on the steps before
it alone, and that can be done in any order, by any process, and again after a kill: a part of the input, a
range of hashes, a stretch of keys, a file. What they make does not depend on memory or threads, nor on who
does them: threads of this process, or the processes of a Ray cluster.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, SchemaError
from trainpipes.integrations.on_ray import RayCluster
from trainpipes.pipeline import Pipeline
from trainpipes.prepare.repack.input_parts import Part
from trainpipes.prepare.repack.options import Options
from trainpipes.prepare.repack.placing import sorted_parts
from trainpipes.prepare.repack.reading import Input, ReadParts, part_firsts, read_stream
from trainpipes.prepare.repack.temporary import TemporaryFiles
from trainpipes.prepare.repack.work import FILE_BYTES, Report, Work, unit_bytes
from trainpipes.prepare.repack.workers import RayTasks, Tell, Threads, Workers
from trainpipes.prepare.repack.writing import WriteFile, file_name, unlike
from trainpipes.storage.writers.epoch_rows import EpochRows
from trainpipes.storage.writers.manifest import Opened
from trainpipes.storage.writers.output_folder import OutputFolder

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
        files: temporary files.
        report: told how far it is.
        cluster: that does the tasks; None for threads of this process.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        rows: EpochRows,
        out: OutputFolder,
        opened: Opened,
        options: Options,
        files: TemporaryFiles,
        report: Report,
        cluster: RayCluster | None,
    ) -> None:
        self._rows, self._out, self._report = rows, out, report
        self._opened, self._options, self._asker = opened, options, options.asker
        self._input = Input.of(pipeline, rows)
        self._count = rows.count if rows.plan.counted else None
        row_bytes = getattr(rows.plan.inputs.source, "row_bytes", None) or ROW_BYTES
        self._size = int((self._count or 0) * row_bytes)  # in memory, about
        # Each file is then written from the input. A user's functions are called by one thread at a time.
        self._in_order = self._count is not None and not options.moves_rows
        threads = 1 if self._in_order and rows.plan.runs_user_code else max(1, options.threads)
        self._threads = Threads(threads)
        self._workers: Workers = self._threads
        unit = unit_bytes(options.memory, max(2, threads))
        if cluster is not None:
            self._workers = RayTasks(cluster)
            unit = unit_bytes(options.memory, 1)
        self._cluster = cluster
        self._work = Work(options, files, unit)

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
            return self._write(self._count, self._size, self._count, None, [])
        self._work.files.make()
        parts = self._read()
        pa.default_memory_pool().release_unused()
        rows = kept = sum(part.rows for part in parts)
        if not rows:
            self._work.files.clear()
            raise self._no_rows()
        self._check_columns(parts)
        if self._count is None or self._options.needs_all:
            parts, kept = sorted_parts(self._work, self._workers, parts, self._tell(rows))
        content = sum(part.checksum - part.left_out for part in parts) % 2**64
        return self._write(kept, sum(part.bytes for part in parts), rows, content, parts)

    def _read(self) -> list[Part]:
        """All parts of the input; reads those that are not there yet."""
        work, notes = self._work, self._opened.notes
        if self._count is None:
            return read_stream(work, self._rows, self._tell(None)("reading", 0))
        plan = self._rows.plan
        blocks = plan.inputs.blocks if notes.get("whole_blocks") else None
        firsts = part_firsts(self._count, notes["part_rows"], blocks)
        step = ReadParts(work, self._input, firsts, self._size)
        there = work.parts("read")
        missing = [number for number in range(len(firsts) - 1) if number not in there]
        tell = self._tell(self._count)("reading", sum(part.rows for part in there.values()))
        if self._cluster is not None:
            there |= dict(self._workers.each(step, missing, tell))
        elif missing:
            with self._threads.in_turn() as turn:
                there |= dict(step.read(missing, tell, turn))
        return [there[number] for number in range(len(firsts) - 1)]

    def _tell(self, total: int | None) -> Any:
        """What tells of rows that are done, for a job by its name, of so many in all."""

        def begin(job: str, done: int) -> Tell:
            lock = threading.Lock()

            def tell(rows: int) -> None:
                nonlocal done
                with lock:
                    done += rows
                    self._report(job, done, total)

            tell(0)
            return tell

        return begin

    def _no_rows(self) -> ConfigError:
        return ConfigError(
            f"{self._asker}(): the input has no rows, and nothing was written: check what filters it"
        )

    def _check_columns(self, parts: list[Part]) -> None:
        """Raise SchemaError unless all parts have the same columns."""
        other = next((part for part in parts if part.columns != parts[0].columns), None)
        if other is not None:
            raise SchemaError(
                f"{self._asker}(): rows must all have the same columns, got {_said(other.schema)} from row "
                f"{other.first:,} on, after {_said(parts[0].schema)}; bring them in line by map(), select() "
                "or map_batches()",
                stage=self._asker,
            )

    def _write(
        self, rows: int, size: int, rows_in: int, content: int | None, parts: list[Part]
    ) -> dict[str, Any]:
        """Write the files that are not there yet.

        Args:
            rows: to be written.
            size: their bytes in memory.
            rows_in: rows of the input.
            content: checksum of the rows to be written; None where each file's is compared.
            parts: whose runs rows are read from; none where it is the input.
        """
        starts = self._starts(rows, size)
        names = [file_name(number) for number in range(len(starts) - 1)]
        files = {entry["file"]: entry for entry in self._opened.files}
        columns = self._opened.columns
        runs = [name for part in parts for name in part.runs or ()]
        rows_of = (None, runs, parts[0].schema) if parts else (self._input,)
        step = WriteFile(self._work, self._out.storage, starts, *rows_of)
        missing = [number for number, name in enumerate(names) if name not in files]
        tell = self._tell(rows)("writing", sum(entry["rows"] for entry in files.values()))
        with self._out.sweeping():
            for _, entry in self._workers.each(step, missing, tell):
                columns = entry.pop("columns")
                files[entry["file"]] = entry
                self._out.note(entry, columns=columns)
        there = [files[name] for name in names]
        assert columns is not None
        found = sum(int(entry["checksum"], 16) for entry in there) % 2**64
        written = sum(entry["rows"] for entry in there)
        if written != rows or content not in (None, found):
            raise unlike(self._asker, rows, written)
        notes = {
            "rows_in": rows_in, "duplicates": rows_in - rows, "checksum": f"{found:016x}",
            "row_groups": sum(entry["row_groups"] for entry in there),
        }  # fmt: skip
        return {"files": there, "columns": columns, "notes": notes}

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
            self._work.files.clear()  # nothing could go on with what was read
            raise ConfigError(
                f"{self._asker}(num_files={files}): each file has a row at least, and there are "
                f"{rows:,} rows: give fewer files"
            )


def _said(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
