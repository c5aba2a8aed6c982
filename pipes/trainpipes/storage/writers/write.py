"""Writes the rows of one epoch to files in a folder: what all formats share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import Any, Protocol

import numpy as np

from trainpipes._internal.checks import whole_number
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, DataChangedError
from trainpipes.storage.executor import Executor, Threads, checked_executor
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.output_folder import FileInfo, Manifest, OutputFolder, run
from trainpipes.storage.places import place_at
from trainpipes.storage.writers.epoch_runs import EpochRuns
from trainpipes.storage.writers.inputs import about_inputs, places_of, refuse_own_input


class FileWriter(Protocol):
    @property
    def columns(self) -> dict[str, str]:
        """Names and types, as the manifest has them; known when it is closed."""
        ...

    def write(self, group: Any, first_row: int) -> None: ...

    def close(self) -> None: ...


#: Rows, and how many bytes they have.
Group = tuple[Any, int]
#: Rows that are read in turn: ``EpochRows``, ``EpochArrays`` or ``ArrayGroups``.
Rows = Any
#: More rows or bytes than there are.
ANY = 1 << 62


@dataclass(frozen=True)
class Format:
    """How rows are written. Pickles."""

    caller: str
    suffix: str
    open: Callable[[Any, Any], FileWriter]
    options: dict[str, Any]
    #: Rows that are written together, and their bytes, at most; 0 for what a file has room for.
    group_rows: int
    group_bytes: int
    #: After which a file ends, where neither rows nor files are counted.
    file_bytes: int
    #: What the name of another file of each task ends with.
    beside: str = ""

    def name_of(self, number: int) -> str:
        return f"part-{number:05d}{self.suffix}"

    @property
    def names(self) -> list[str]:
        return [f"part-00000{ending}" for ending in (self.suffix, self.beside) if ending]


@dataclass(frozen=True)
class FileTask:
    name: str
    start: int
    length: int | None
    #: Whether these rows must be there; else the file ends with the rows, or with its bytes.
    exact: bool = True

    def __str__(self) -> str:
        if not self.exact or self.length is None:
            return f"{self.name}, from row {self.start:,} on"
        return f"{self.name}, rows {self.start:,} to {self.start + self.length - 1:,}"


@dataclass(frozen=True)
class Output:
    """Where rows are written, and how many go into each file."""

    folder: str | os.PathLike[str]
    num_files: int | None
    rows_per_file: int | None
    overwrite: bool
    storage_options: Mapping[str, Any] | None
    #: What names end with that the next run would read, too, unless the source says so.
    suffixes: Sequence[str] | None = None

    @property
    def is_cut(self) -> bool:
        return self.num_files is not None or self.rows_per_file is not None

    def open(self, form: Format, source: Any, about: Mapping[str, Any]) -> OutputFolder:
        place = place_at(self.folder, form.caller, self.storage_options)
        refuse_own_input(source, place, form.names, form.caller, self.suffixes)
        options = {"format": form.caller.removeprefix("write_"), **form.options}
        options |= {"num_files": self.num_files, "rows_per_file": self.rows_per_file}
        about = {"options": options, **about}
        return OutputFolder(place, form.caller, about, overwrite=self.overwrite)

    def length(self, rows: int | None, number: int) -> int | None:
        """Rows of a file, by its number; None if it ends by its bytes."""
        if self.num_files is None or rows is None:
            return self.rows_per_file
        return rows // self.num_files + (number < rows % self.num_files)

    def check(self, rows: int | None, caller: str) -> None:
        """Raise ConfigError unless that many rows can be cut so."""
        files, each = self.num_files, self.rows_per_file
        if files is not None:
            whole_number(files, 1, f"{caller}(num_files)", "how many to write")
        if each is not None:
            whole_number(each, 1, f"{caller}(rows_per_file)", "rows in each file")
        if files is None:
            return
        if each is not None:
            raise ConfigError(
                f"{caller}() takes num_files or rows_per_file, got num_files={files} and "
                f"rows_per_file={each}: give one of the two"
            )
        if rows is None:
            raise ConfigError(
                f"{caller}(num_files={files}) needs to know how many rows there are, and that is known only "
                "when all are read: give rows_per_file=... instead"
            )
        if files > rows:
            raise ConfigError(
                f"{caller}(num_files={files}): each file has a row at least, and there are {rows:,} rows: "
                "give fewer files"
            )


def file_edges(rows: int, files: int | None, rows_per_file: int | None) -> IntArray:
    """The first row of each file, and the end: int64 ``[files + 1]``."""
    if rows_per_file is not None:
        return np.append(np.arange(0, rows, rows_per_file, dtype=np.int64), rows)
    count = files or 1
    numbers = np.arange(count + 1, dtype=np.int64)
    return numbers * (rows // count) + np.minimum(numbers, rows % count)


def write(
    rows: Callable[[], EpochRuns], form: Format, out: Output, executor: Executor | None
) -> Manifest:
    workers = checked_executor(executor, form.caller, Threads(1))
    with workers:  # before anything is read: Ray starts processes
        found = rows()
        out.check(found.count, form.caller)
        is_cut, alone = found.plan.counted and out.is_cut, workers == Threads(1)
        if not alone:
            _check_cut(found, is_cut, workers)
        source = found.plan.inputs.source
        about = {"pipeline": json.loads(found.plan.identity), **about_inputs(source)}
        folder = out.open(form, source, about)
        workers.check_path(folder.place.root, f"{form.caller}(folder)")
        for path in places_of(source):
            workers.check_path(path, f"{form.caller}(pipeline)")
        with folder, closing(found):
            if folder.finished is not None:
                return folder.finished
            if folder.files or not alone:
                found.know_columns()
            if not is_cut:
                return _write_in_turn(found, found.count, form, out, folder)
            assert found.count is not None
            edges = file_edges(found.count, out.num_files, out.rows_per_file).tolist()
            tasks = (
                FileTask(form.name_of(n), a, b - a) for n, (a, b) in enumerate(pairwise(edges))
            )
            return run(
                tasks, partial(_make, form), folder, workers,
                open_state=_Reader(found, alone), total=found.count,
            )  # fmt: skip


def write_once(rows: Rows, source: Any, count: int | None, form: Format, out: Output) -> Manifest:
    """Write rows that can be read once: where that fails nothing is left, and no later run goes on."""
    out.check(count, form.caller)
    with out.open(form, source, {"pipeline": None}) as folder:
        return _write_in_turn(rows, count, form, out, folder)


def _write_in_turn(
    rows: Rows, count: int | None, form: Format, out: Output, folder: OutputFolder
) -> Manifest:
    reader = _Reader(rows)
    tasks = _in_turn(reader, folder, form, partial(out.length, count))
    make = partial(_make, form, reader=reader)
    return run(tasks, lambda task, file, _: make(task, file), folder, Threads(1), total=count)


def _in_turn(
    reader: _Reader, out: OutputFolder, form: Format, length: Callable[[int], int | None]
) -> Iterator[FileTask]:
    start = sum(info.rows for info in out.files.values())
    last = next(reversed(out.files.values()), None)
    reader.rows.open(None if last is None else last.cursor, row=start)
    for number in count(len(out.files)):
        most = length(number)
        if not reader.has_more(form, most):
            return
        name = form.name_of(number)
        yield FileTask(name, start, most, exact=False)
        start += out.files[name].rows


class _Reader:
    """Opened in each worker; a single one reads on where the file before ended."""

    def __init__(self, rows: Rows, alone: bool = True) -> None:
        self.rows, self._alone = rows, alone
        self._at: int | None = None
        self._next: Group | None = None

    def __call__(self) -> _Reader:
        return self if self._alone else _Reader(copy(self.rows), False)

    def open(self, task: FileTask) -> None:
        stop = task.start + (task.length or 0)
        if task.exact and self._at != task.start:
            self.close()
            if self._alone:
                cursor = self.rows.cursor_at(task.start) if task.start else None
                self.rows.open(cursor, row=task.start)
            else:
                self.rows.open_part(task.start, stop)
        self._at = stop if self._alone else None

    def has_more(self, form: Format, left: int | None) -> bool:
        self._next = self.group(form, left, form.file_bytes)
        return self._next is not None

    def group(self, form: Format, left: int | None, room: int) -> Group | None:
        """The next rows of a file that has so many left, or room for so many bytes."""
        found, self._next = self._next, None
        size = form.group_bytes or (room if left is None else ANY)
        rows = form.group_rows if left is None else min(form.group_rows, left)
        return found or self.rows.group(rows, size)

    def close(self) -> None:
        self.rows.close()


def _make(form: Format, task: FileTask, file: OutputFile, reader: _Reader) -> FileInfo:
    reader.open(task)
    done, room, left = 0, form.file_bytes, task.length
    group = reader.group(form, left, room)
    columns: dict[str, str] = {}
    if group is not None:
        with closing(form.open(file, reader.rows.schema)) as writer:
            while group is not None:
                writer.write(group[0], task.start + done)
                done, room = done + len(group[0]), room - group[1]
                file.advance(len(group[0]))
                left = None if task.length is None else task.length - done
                if left == 0 or (left is None and room <= 0):
                    break
                group = reader.group(form, left, room)
        columns = writer.columns
    if task.exact and done != task.length:
        raise DataChangedError(
            f"{form.caller}(): the rows of {task.name} end before row {task.start + done + 1:,}: the input "
            "has changed; begin anew with overwrite=True"
        )
    return FileInfo(done, columns, None if task.exact else reader.rows.cursor)


def _check_cut(rows: EpochRuns, is_cut: bool, executor: Executor) -> None:
    """Raise unless it is known which rows each file has, before any is read."""
    plan, option = rows.plan, f"{rows.caller}(executor={executor})"
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
