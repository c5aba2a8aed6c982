"""Writes the rows of an epoch to files in a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, repeat
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Protocol

import numpy as np

from trainpipes._internal.checks import IntArray, require, whole_number
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.processes.executor_options import executor_of
from trainpipes.engine.processes.executors import Executor, Threads
from trainpipes.engine.record import Record
from trainpipes.errors import DataChangedError
from trainpipes.filesystems.places import OutputFile, Place, place_at
from trainpipes.filesystems.retry import NORMAL, Retry
from trainpipes.interfaces import contents
from trainpipes.interfaces.options import show
from trainpipes.interfaces.stage import Stage, aside, is_ours
from trainpipes.interfaces.stage_kinds import CombiningSource, stages_within
from trainpipes.sources.from_dataset import PLAIN, FromDataset
from trainpipes.sources.from_iterable import FromIterable
from trainpipes.state.cursor import checksum, encoded
from trainpipes.writers.epoch_rows import EpochRows
from trainpipes.writers.output_folder import FileInfo, Manifest, OutputFolder, no_rows, run
from trainpipes.writers.own_input import datasets, file_lists, one_path_each, refuse_own_input

#: Rows in memory that are looked at for whether they have changed.
SAMPLED = 1024


def open_output(
    place: Place,
    plan: Plan | None,
    names: Collection[str],
    workers: Executor,
    about: Mapping[str, Any],
    overwrite: bool,
    suffixes: Sequence[str] | None = None,
) -> OutputFolder:
    """The folder that rows of a plan, if any, are written to, once that can be done there."""
    inputs = None if plan is None else plan.inputs
    refuse_own_input(inputs, place, names, suffixes)
    workers.check_path(place.root, f"{place.caller}(folder)")
    for path in one_path_each(inputs):
        workers.check_path(path, f"{place.caller}(pipeline)")
    stamps: list[object] = []
    for files in file_lists(inputs):
        for size, written in zip(files.sizes.tolist(), files.stamps, strict=True):
            stamps += [size, written]
    identity = {} if plan is None else {"pipeline": json.loads(plan.identity)}
    stamp = {"inputs": checksum(*stamps)} if stamps else {}
    held = [_sampled(data) for data in datasets(inputs) if type(data) in PLAIN]
    stamp |= {"in_memory": checksum(*held)} if held else {}
    stages = [] if plan is None else stages_within(plan.chain.stages)
    stages = [stage for stage in stages if not isinstance(stage, CombiningSource)]
    code = partial(_code, stages, place.caller)
    return OutputFolder(place, {**identity, **stamp, **about}, overwrite=overwrite, code=code)


def _sampled(rows: Sequence[Any]) -> str:
    """A digest of rows in memory: all of them, or some that are spread; without values that JSON lacks."""
    found: list[object] = [len(rows)]
    for place in np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED)).astype(np.int64).tolist():
        row = rows[place]
        for name, value in row.items() if isinstance(row, dict) else [("", row)]:
            with suppress(TypeError, ValueError, RuntimeError):
                found.append(json.dumps([str(name), encoded(value)]))
    return checksum(*found)


def _code(stages: Sequence[Stage], caller: str) -> list[tuple[str, str]]:
    """What calls the user's code without a ``version``, and a digest of that code and of what it uses."""
    digests = []
    for stage in stages:
        seen, parts = contents.Contents(caller, strict=False), list[str]()
        if stage.options.get("version") is not None:
            continue
        if isinstance(stage, FromDataset | FromIterable):
            used = stage.dataset if isinstance(stage, FromDataset) else stage.factory
            if type(used) not in PLAIN:
                parts = [seen.digest(_bare(used), stage.name)]
        elif (stage._calls_function or not is_ours(type(stage))) and not stage._fixed.holds_data:
            used = stage.options.get(stage._fixed.versioned or "tokenizer")
            # Of a function that holds what has no digest the code is seen, at least.
            parts = [seen.digest(getattr(used, "__code__", None), stage.name)]
            parts.append(contents.digest_of(contents.cache_key([stage], caller, strict=False)))
        if parts:
            digests.append(
                (f"{stage.name}({'' if used is None else show(used)})", checksum(*parts))
            )
    return digests


def _bare(data: Any) -> Any:
    """A function; or of an object its class and plain values, as data sets may hold more than memory does."""
    if isinstance(data, FunctionType | partial):
        return data
    if isinstance(data, MethodType):
        return data.__func__, _bare(data.__self__)
    kinds = {*contents.PLAIN, FunctionType}
    held = getattr(data, "__dict__", {}).items()
    return type(data), {
        name: value
        for name, value in held
        if kinds.issuperset(map(type, value if isinstance(value, list | tuple) else [value]))
    }


class FileWriter(Protocol):
    """Writes a file of a ``Format``, group by group; ``write`` and ``prepare`` open one for each file."""

    @property
    def columns(self) -> dict[str, str]:
        """Names and types, as the manifest has them; known when it is closed."""
        ...

    def write(self, group: Any, first_row: int) -> None: ...

    def close(self) -> None: ...


#: What rows are read from: ``EpochRows`` or ``OnceTables``.
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
    #: Rows that are written together, and their bytes, at most.
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
    """A file to be written, and which rows go into it."""

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
    retry: Retry | Mapping[str, Any] = NORMAL
    #: What names end with that the next run would read, too, unless the source says so.
    suffixes: Sequence[str] | None = None

    @property
    def is_cut(self) -> bool:
        return self.num_files is not None or self.rows_per_file is not None

    def open(
        self, form: Format, plan: Plan | None, workers: Executor, **about: Any
    ) -> OutputFolder:
        """The folder, to be entered; ``plan`` is of the pipeline whose rows are written, if there is a
        pipeline.
        """
        place = place_at(self.folder, form.caller, self.storage_options, self.retry)
        options = {"format": form.caller.removeprefix("write_"), **form.options}
        options |= {"num_files": self.num_files, "rows_per_file": self.rows_per_file}
        return open_output(
            place, plan, form.names, workers, {"options": options, **about}, self.overwrite,
            self.suffixes,
        )  # fmt: skip

    def edges(self, rows: int, files: int = 1) -> IntArray:
        """The first row of each file, and the end: int64 ``[files + 1]``; ``files`` unless the user says."""
        if self.rows_per_file is not None:
            return np.append(np.arange(0, rows, self.rows_per_file, dtype=np.int64), rows)
        files = self.num_files or files
        numbers = np.arange(files + 1, dtype=np.int64)
        return numbers * (rows // files) + np.minimum(numbers, rows % files)

    def check(self, rows: int | None, caller: str) -> None:
        """Raise ConfigError unless that many rows can be cut so."""
        files, each = self.num_files, self.rows_per_file
        if files is not None:
            whole_number(files, 1, f"{caller}(num_files)", "how many to write")
        if each is not None:
            whole_number(each, 1, f"{caller}(rows_per_file)", "rows in each file")
        if files is None:
            return
        option = f"{caller}(num_files)"
        require(each is None, option, "left out where rows_per_file is given", files)
        rule = "left out where it is known only at the end how many rows there are"
        require(rows is not None, option, rule, files, "give rows_per_file=...")
        require(files <= (rows or 0), option, f"at most the number of rows, {rows:,}", files)


def write(
    source: Record | EpochRows, form: Format, out: Output, executor: Executor | None
) -> Manifest:
    workers = executor_of(executor, f"{form.caller}(executor)", Threads(1))
    with workers:  # before anything is read: Ray starts processes
        rows = source if isinstance(source, EpochRows) else EpochRows(source, form.caller)
        out.check(rows.count, form.caller)
        alone = workers == Threads(1)
        if not alone:
            _check_cut(rows, out, workers)
        to = out.open(form, rows.plan, workers)
        if out.overwrite:
            with closing(rows):
                try_first(form, rows)
        with to as folder, closing(rows):
            if folder.finished is None and (folder.files or not alone):
                rows.know_columns()
            if alone:
                return _write_in_turn(rows, rows.count, rows.plan.counted, form, out, folder)
            edges = out.edges(rows.count or 0).tolist()
            tasks = (
                FileTask(form.name_of(n), a, b - a) for n, (a, b) in enumerate(pairwise(edges))
            )
            make, copied = partial(_make_part, form), partial(copy, rows)
            return run(tasks, make, folder, workers, open_state=copied, total=rows.count)


def write_once(rows: Rows, count: int | None, form: Format, out: Output) -> Manifest:
    """Write rows that can be read once: where that fails nothing is left, and no later run goes on."""
    out.check(count, form.caller)
    to = out.open(form, None, Threads(1), pipeline=None)
    if out.overwrite:
        try_first(form, rows)
    with to as folder:
        return _write_in_turn(rows, count, False, form, out, folder)


def try_first(form: Format, rows: Rows) -> None:
    """Raise, before earlier files are removed, where there are no rows, or the first cannot be made or
    written.
    """
    opened: list[OutputFile] = []

    def nowhere(_: str = "") -> OutputFile:
        opened.append(OutputFile(Path(os.devnull), form.caller, None))
        opened[-1].beside = nowhere
        return opened[-1]

    try:
        with aside():
            rows.open(None, 0)
            if not rows.has_rows():
                raise no_rows(form.caller)
            with closing(form.open(nowhere(), rows.schema)) as writer:
                writer.write(rows.next_row(), 0)
    finally:
        for file in opened:
            file.close()


def _write_in_turn(
    rows: Rows, total: int | None, exact: bool, form: Format, out: Output, folder: OutputFolder
) -> Manifest:
    lengths: Iterable[int | None] = repeat(out.rows_per_file)
    exact = exact and bool(total) and out.is_cut
    if total and out.is_cut:
        lengths = np.diff(out.edges(total)).tolist()

    def tasks() -> Iterator[FileTask]:
        """Each is done before the next is asked for."""
        start, at, cursor = 0, -1, None
        for number, length in enumerate(lengths):
            name = form.name_of(number)
            if name not in folder.files:
                if at != start:
                    rows.open(cursor, start)
                if not exact and not rows.has_rows():
                    return
                yield FileTask(name, start, length, exact)
                at = start + folder.files[name].rows
            start, cursor = start + folder.files[name].rows, folder.files[name].cursor

    def make(task: FileTask, file: OutputFile, _: Any) -> FileInfo:
        return _make(form, task, file, rows)

    return run(tasks(), make, folder, Threads(1), total=total)


def _make_part(form: Format, task: FileTask, file: OutputFile, rows: EpochRows) -> FileInfo:
    assert task.length is not None
    rows.open_part(task.start, task.start + task.length)
    with closing(rows):
        return _make(form, task, file, rows)


def _make(form: Format, task: FileTask, file: OutputFile, rows: Rows) -> FileInfo:
    """Write the rows of a file, so many or as many as it has room for."""
    done, columns = 0, {}
    left, room = (ANY, form.file_bytes) if task.length is None else (task.length, ANY)
    if rows.has_rows():
        with closing(form.open(file, rows.schema)) as writer:
            while done < left and room > 0:
                upcoming = rows.group(min(form.group_rows, left - done), form.group_bytes)
                if upcoming is None:
                    break
                group, size = upcoming
                writer.write(group, task.start + done)
                done, room = done + len(group), room - size
                file.advance(len(group))
                del upcoming, group  # before the next rows are read
        columns = writer.columns
    if task.exact and done != task.length:
        raise DataChangedError(
            f"{form.caller}(): the rows of {task.name} end before row {task.start + done + 1:,}: the input "
            "has changed; begin anew with overwrite=True"
        )
    return FileInfo(done, columns, rows.cursor)


def _check_cut(rows: EpochRows, out: Output, executor: Executor) -> None:
    """Raise unless it is known which rows each file has, before any is read."""
    plan, option = rows.plan, f"{rows.caller}(executor)"
    stages = plan.chain.stages
    odd = next((stage for stage in stages if not stage.traits.keeps_rows), stages[0])
    rule = f"left out where it is known only at the end how many rows {odd} gives"
    require(plan.counted, option, rule, executor, "or write the rows before that stage")
    rule = "given with num_files=... or rows_per_file=..., since each worker makes files"
    require(out.is_cut, option, rule, executor)
    refuse_functions(plan, executor, rows.caller)


def refuse_functions(plan: Plan, executor: Executor, caller: str) -> None:
    several = isinstance(executor, Threads) and executor.n > 1
    rule = "Processes(n), or left out, for functions of yours, which threads would call at once"
    require(not (several and plan.runs_user_code), f"{caller}(executor)", rule, executor)
