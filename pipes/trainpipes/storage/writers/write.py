"""Writes the rows of one epoch to files in a folder: what all formats share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Format:
    """How rows are written. Pickles."""

    caller: str
    suffix: str
    open: Callable[[OutputFile, Any], FileWriter]
    #: The next rows for a file: of those that are read, how many fit in it, and how many bytes.
    group: Callable[[Any, int | None, int], Group | None]
    options: dict[str, Any]
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
    stop: int

    def __str__(self) -> str:
        return f"{self.name}, rows {self.start:,} to {self.stop - 1:,}"


@dataclass(frozen=True)
class NextTask:
    """The next file of rows that are read in turn, and the first of them."""

    name: str
    start: int
    length: int | None
    group: Group

    def __str__(self) -> str:
        return f"{self.name}, from row {self.start:,} on"


def write(
    rows: Callable[[], EpochRuns],
    folder: str | os.PathLike[str],
    form: Format,
    num_files: int | None,
    rows_per_file: int | None,
    overwrite: bool,
    executor: Executor | None,
    storage_options: Mapping[str, Any] | None,
) -> Manifest:
    caller = form.caller
    workers = checked_executor(executor, caller, Threads(1))
    with workers:  # before anything is read: Ray starts processes
        found = rows()
        check_lengths(found.count, num_files, rows_per_file, caller)
        is_cut = found.plan.counted and (num_files is not None or rows_per_file is not None)
        alone = workers == Threads(1)
        if not alone:
            _check_cut(found, is_cut, workers)
        source = found.plan.inputs.source
        about: dict[str, Any] = {"options": _options(form, num_files, rows_per_file)}
        about |= {"pipeline": json.loads(found.plan.identity), **about_inputs(source)}
        place = place_at(folder, caller, storage_options)
        refuse_own_input(source, place, form.names, caller)
        workers.check_path(place.root, f"{caller}(folder)")
        for path in places_of(source):
            workers.check_path(path, f"{caller}(pipeline)")
        with OutputFolder(place, caller, about, overwrite=overwrite) as out, closing(found):
            if out.finished is not None:
                return out.finished
            if out.files or not alone:
                found.know_columns()
            if not is_cut:
                return _write_in_turn(found, found.count, out, form, num_files, rows_per_file)
            assert found.count is not None
            edges = file_edges(found.count, num_files, rows_per_file).tolist()
            tasks = (FileTask(form.name_of(n), *edge) for n, edge in enumerate(pairwise(edges)))
            return run(
                tasks, partial(_make, form), out, workers,
                open_state=_Reader(found, alone), total=found.count,
            )  # fmt: skip


def write_once(
    rows: Rows,
    source: Any,
    count: int | None,
    folder: str | os.PathLike[str],
    form: Format,
    num_files: int | None,
    rows_per_file: int | None,
    overwrite: bool,
    storage_options: Mapping[str, Any] | None,
) -> Manifest:
    """Write rows that can be read once, of the source of a plan if of any: where that fails nothing is left,
    and no later run goes on."""
    check_lengths(count, num_files, rows_per_file, form.caller)
    about = {"options": _options(form, num_files, rows_per_file), "pipeline": None}
    place = place_at(folder, form.caller, storage_options)
    refuse_own_input(source, place, form.names, form.caller)
    with OutputFolder(place, form.caller, about, overwrite=overwrite) as out:
        return _write_in_turn(rows, count, out, form, num_files, rows_per_file)


def _options(form: Format, num_files: int | None, rows_per_file: int | None) -> dict[str, Any]:
    options = {"format": form.caller.removeprefix("write_"), **form.options}
    return options | {"num_files": num_files, "rows_per_file": rows_per_file}


def _write_in_turn(
    rows: Rows,
    count: int | None,
    out: OutputFolder,
    form: Format,
    num_files: int | None,
    rows_per_file: int | None,
) -> Manifest:
    length = partial(_length, count or 0, num_files, rows_per_file)
    tasks = _in_turn(rows, out, form, length)
    return run(tasks, partial(_make_next, rows, form), out, Threads(1), total=count)


def _length(rows: int, num_files: int | None, rows_per_file: int | None, number: int) -> int | None:
    if num_files is None:
        return rows_per_file
    return rows // num_files + (number < rows % num_files)


def file_edges(rows: int, files: int | None, rows_per_file: int | None) -> IntArray:
    """The first row of each file, and the end: int64 ``[files + 1]``."""
    if rows_per_file is not None:
        return np.append(np.arange(0, rows, rows_per_file, dtype=np.int64), rows)
    count = files or 1
    numbers = np.arange(count + 1, dtype=np.int64)
    return numbers * (rows // count) + np.minimum(numbers, rows % count)


def _in_turn(
    rows: Rows, out: OutputFolder, form: Format, length: Callable[[int], int | None]
) -> Iterator[NextTask]:
    """The files of rows that are read one after the other, each when the one before it is whole."""
    start = sum(info.rows for info in out.files.values())
    last = next(reversed(out.files.values()), None)
    rows.open(None if last is None else last.cursor, row=start)
    for number in count(len(out.files)):
        most = length(number)
        group = form.group(rows, most, form.file_bytes)
        if group is None:
            return
        name = form.name_of(number)
        yield NextTask(name, start, most, group)
        start += out.files[name].rows


class _Reader:
    def __init__(self, rows: EpochRuns, alone: bool) -> None:
        self._rows, self._alone = rows, alone
        self._at: int | None = None

    def __call__(self) -> _Reader:
        return _Reader(self._rows if self._alone else copy(self._rows), self._alone)

    def open(self, task: FileTask) -> EpochRuns:
        if self._at != task.start:
            self.close()
            if self._alone:
                cursor = self._rows.cursor_at(task.start) if task.start else None
                self._rows.open(cursor, row=task.start)
            else:
                self._rows.open_part(task.start, task.stop)
        self._at = task.stop if self._alone else None
        return self._rows

    def close(self) -> None:
        self._rows.close()


def _make(form: Format, task: FileTask, file: OutputFile, reader: _Reader) -> FileInfo:
    rows, length = reader.open(task), task.stop - task.start
    found = form.group(rows, length, form.file_bytes)
    info = FileInfo(0)
    if found is not None:
        info = _write(rows, form, file, found, length, task.start)
    if info.rows != length:
        raise DataChangedError(
            f"{form.caller}(): the rows of {task.name} end before row {task.stop - 1:,}: the input has "
            "changed; begin anew with overwrite=True"
        )
    return info


def _make_next(rows: Rows, form: Format, task: NextTask, file: OutputFile, _: None) -> FileInfo:
    info = _write(rows, form, file, task.group, task.length, task.start)
    return replace(info, cursor=rows.cursor)


def _write(
    rows: Any, form: Format, file: OutputFile, group: Group | None, length: int | None, first: int
) -> FileInfo:
    done = size = 0
    with closing(form.open(file, rows.schema)) as writer:
        while group is not None:
            writer.write(group[0], first + done)
            done, size = done + len(group[0]), size + group[1]
            file.advance(len(group[0]))
            if done == length or (length is None and size >= form.file_bytes):
                break
            group = form.group(
                rows, None if length is None else length - done, form.file_bytes - size
            )
    return FileInfo(done, writer.columns)


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


def _check_cut(rows: EpochRuns, is_cut: bool, executor: Executor) -> None:
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
