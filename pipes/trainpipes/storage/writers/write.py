"""Writes the rows of one epoch to files in a folder: what all formats share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from trainpipes._internal.checks import whole_number
from trainpipes.errors import ConfigError, DataChangedError
from trainpipes.storage.executor import Executor, Threads, checked_executor
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.output_folder import FileInfo, Manifest, OutputFolder, run
from trainpipes.storage.places import place_at
from trainpipes.storage.writers.epoch_rows import EpochRows
from trainpipes.storage.writers.inputs import about_inputs, places_of, refuse_own_input

if TYPE_CHECKING:
    from trainpipes.pipeline import Pipeline

#: Bytes of rows in memory after which a file ends, where neither rows nor files are counted.
FILE_BYTES = 512 << 20


class FileWriter(Protocol):
    """Writes one file."""

    def write(self, group: pa.Table, first_row: int) -> None:
        """Write some rows; the first one's number in the epoch is for messages."""
        ...

    def close(self) -> None:
        """Write what comes after the last rows."""
        ...


@dataclass(frozen=True)
class Format:
    """How rows are written. Pickles.

    Args:
        caller: the method, for messages.
        suffix: of the files' names.
        open: begins a file with rows of a schema.
        options: of the method, of JSON types, which shape the files.
        rows: in a group, at most.
        bytes: in a group, about; None where the user counts its rows.
    """

    caller: str
    suffix: str
    open: Callable[[OutputFile, pa.Schema], FileWriter]
    options: dict[str, Any]
    rows: int
    bytes: int | None

    def name_of(self, number: int) -> str:
        """The name of a file."""
        return f"part-{number:05d}{self.suffix}"

    def group(self, rows: EpochRows, left: int | None) -> tuple[pa.Table, int] | None:
        """The next rows of a file that has room for ``left``, and their bytes."""
        return rows.group(min(self.rows, left or self.rows), self.bytes)


@dataclass(frozen=True)
class FileTask:
    """A file that is to be made of rows ``start`` to ``stop`` of the epoch."""

    name: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.name}, rows {self.start:,} to {self.stop - 1:,}"


@dataclass(frozen=True)
class NextTask:
    """The next file of rows that are read in turn.

    Args:
        name: of the file.
        start: its first row.
        length: how many rows it has at most; None where it ends by its bytes.
        group: its first rows, and their bytes.
    """

    name: str
    start: int
    length: int | None
    group: tuple[pa.Table, int]

    def __str__(self) -> str:
        return f"{self.name}, from row {self.start:,} on"


def write(
    pipeline: Pipeline,
    folder: str | os.PathLike[str],
    form: Format,
    num_files: int | None,
    rows_per_file: int | None,
    overwrite: bool,
    executor: Executor | None,
    storage_options: Mapping[str, Any] | None,
) -> Manifest:
    """Write the rows of a pipeline's first epoch; see ``write_parquet``."""
    caller = form.caller
    workers = checked_executor(executor, caller, Threads(1))
    with workers:  # before anything is read: Ray starts processes
        rows = EpochRows(pipeline, caller)
        check_lengths(rows.count, num_files, rows_per_file, caller)
        is_cut = rows.plan.counted and (num_files is not None or rows_per_file is not None)
        if workers != Threads(1):
            _check_cut(rows, is_cut, workers)
        source = rows.plan.inputs.source
        options = {"format": caller.removeprefix("write_"), **form.options}
        options |= {"num_files": num_files, "rows_per_file": rows_per_file}
        about = {"options": options, "pipeline": json.loads(rows.plan.identity)}
        about |= about_inputs(source)
        place = place_at(folder, caller, storage_options)
        refuse_own_input(source, place, [form.name_of(0)], caller)
        workers.check_path(place.root, f"{caller}(folder)")
        for path in places_of(source):
            workers.check_path(path, f"{caller}(pipeline)")
        with OutputFolder(place, caller, about, overwrite=overwrite) as out, closing(rows):
            if out.finished is not None:
                return out.finished
            length = partial(_length, rows.count or 0, num_files, rows_per_file)
            if not is_cut:
                tasks = _in_turn(rows, out, form, length)
                make = partial(_make_next, rows, form)
                return run(tasks, make, out, Threads(1), total=rows.count)
            assert rows.count is not None
            alone = workers == Threads(1)
            if not alone:
                rows.know_columns()
            return run(
                _cut(rows.count, form, length), partial(_make, form), out, workers,
                open_state=_Reader(rows, alone), total=rows.count,
            )  # fmt: skip


def _length(rows: int, num_files: int | None, rows_per_file: int | None, number: int) -> int | None:
    """Rows of file ``number``; None where it ends by its bytes."""
    if num_files is None:
        return rows_per_file
    return rows // num_files + (number < rows % num_files)


def _cut(rows: int, form: Format, length: Callable[[int], int | None]) -> Iterator[FileTask]:
    """The files of rows that are counted."""
    start = 0
    for number in count():
        if start >= rows:
            return
        stop = min(rows, start + (length(number) or rows))
        yield FileTask(form.name_of(number), start, stop)
        start = stop


def _in_turn(
    rows: EpochRows, out: OutputFolder, form: Format, length: Callable[[int], int | None]
) -> Iterator[NextTask]:
    """The files of rows that are read one after the other, each when the one before it is whole."""
    last = next(reversed(out.files.values()), None)
    rows.open(None if last is None else last.cursor)
    for number in count(len(out.files)):
        group = form.group(rows, length(number))
        if group is None:
            return
        start = sum(info.rows for info in out.files.values())
        yield NextTask(form.name_of(number), start, length(number), group)


class _Reader:
    """Gives a worker the rows; each its own. Pickles.

    Args:
        rows: of the pipeline.
        alone: whether there is one worker, which makes all files in turn.
    """

    def __init__(self, rows: EpochRows, alone: bool) -> None:
        self._rows, self._alone = rows, alone
        self._at: int | None = None

    def __call__(self) -> _Reader:
        return _Reader(self._rows if self._alone else copy(self._rows), self._alone)

    def open(self, task: FileTask) -> EpochRows:
        """The rows, from the first of a task on."""
        if self._at != task.start:
            self.close()
            if self._alone:
                self._rows.open(self._rows.cursor_at(task.start) if task.start else None)
            else:
                self._rows.open_part(task.start, task.stop)
        self._at = task.stop if self._alone else None
        return self._rows

    def close(self) -> None:
        self._rows.close()


def _make(form: Format, task: FileTask, file: OutputFile, reader: _Reader) -> FileInfo:
    rows, length = reader.open(task), task.stop - task.start
    found = form.group(rows, length)
    done = 0 if found is None else _write(rows, form, file, found, length, task.start)
    if done != length:
        raise DataChangedError(
            f"{form.caller}(): the rows of {task.name} end before row {task.stop - 1:,}: the input has "
            "changed; begin anew with overwrite=True"
        )
    return FileInfo(done, _columns(rows.schema))


def _make_next(rows: EpochRows, form: Format, task: NextTask, file: OutputFile) -> FileInfo:
    done = _write(rows, form, file, task.group, task.length, task.start)
    return FileInfo(done, _columns(rows.schema), rows.cursor)


def _write(
    rows: EpochRows,
    form: Format,
    file: OutputFile,
    group: tuple[pa.Table, int] | None,
    length: int | None,
    first_row: int,
) -> int:
    """Write the rows of one file, of which the first are at hand; gives how many."""
    writer = form.open(file, rows.schema)
    try:
        done = size = 0
        while group is not None:
            writer.write(group[0], first_row + done)
            done, size = done + len(group[0]), size + group[1]
            file.advance(len(group[0]))
            if done == length or (length is None and size >= FILE_BYTES):
                break
            group = form.group(rows, None if length is None else length - done)
        writer.close()
    except BaseException:
        with suppress(Exception):
            writer.close()
        raise
    return done


def _columns(schema: pa.Schema) -> dict[str, str]:
    """Names and types, as the manifest has them."""
    return {field.name: str(field.type) for field in schema}


def check_lengths(
    rows: int | None, num_files: int | None, rows_per_file: int | None, caller: str
) -> None:
    if num_files is not None:
        whole_number(num_files, 1, f"{caller}(num_files)", "how many to write")
    if rows_per_file is not None:
        whole_number(rows_per_file, 1, f"{caller}(rows_per_file)", "rows in each file")
    if num_files is None:
        return
    if rows_per_file is not None:
        raise ConfigError(
            f"{caller}() takes num_files or rows_per_file, got num_files={num_files} and "
            f"rows_per_file={rows_per_file}: give one of the two"
        )
    if rows is None:
        raise ConfigError(
            f"{caller}(num_files={num_files}) needs to know how many rows there are, and that is known only "
            "when all are read: give rows_per_file=... instead"
        )
    if num_files > rows:
        raise ConfigError(
            f"{caller}(num_files={num_files}): each file has a row at least, and there are {rows:,} rows: "
            "give fewer files"
        )


def _check_cut(rows: EpochRows, is_cut: bool, executor: Executor) -> None:
    """Raise unless it is known which rows each file has, before any is read."""
    plan, option = rows.plan, f"{rows.asker}(executor={executor})"
    if not plan.counted:
        stages = plan.chain.stages
        odd = next((stage for stage in stages if not stage.keeps_rows), stages[0])
        raise ConfigError(
            f"{option} gives each worker the rows of one file, and how many rows {odd} gives is known only "
            "when all are read: leave executor out, or write the rows before that stage"
        )
    if not is_cut:
        raise ConfigError(
            f"{option} gives each worker the rows of one file: say how many by num_files=... or "
            "rows_per_file=..."
        )
    if isinstance(executor, Threads) and plan.runs_user_code:
        raise ConfigError(
            f"{option} would call functions of yours in several threads at once: give "
            f"Processes({executor.n}), or leave executor out"
        )
