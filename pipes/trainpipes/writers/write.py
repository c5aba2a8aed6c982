"""Writes the rows of an epoch to files in a folder, which may not hold the files that are read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from fsspec.implementations.cached import CachingFileSystem
from torch.utils.data import ConcatDataset, Subset

from trainpipes._internal.checks import IntArray, require, whole_number
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.processes.executor_options import executor_of
from trainpipes.engine.processes.executors import Executor, Threads
from trainpipes.engine.record import Record
from trainpipes.errors import ConfigError, DataChangedError
from trainpipes.filesystems.places import OutputFile, Place, place_at
from trainpipes.filesystems.retry import NORMAL, Retry
from trainpipes.filesystems.systems import is_local
from trainpipes.interfaces.stage import aside
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.from_dataset import PLAIN
from trainpipes.sources.from_hf import is_table
from trainpipes.sources.from_memmap import MemmapDataset
from trainpipes.state.cursor import checksum, encoded
from trainpipes.writers.epoch_rows import EpochRows, MapDataset
from trainpipes.writers.output_folder import FileInfo, Manifest, OutputFolder, no_rows, run

#: Options of file systems that say which server a path is of.
SERVERS = ("endpoint_url", "host", "port", "account_name")
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
    for path in _paths(inputs):
        workers.check_path(path, f"{place.caller}(pipeline)")
    stamps: list[object] = []
    for files in file_lists(inputs):
        for size, written in zip(files.sizes.tolist(), files.stamps, strict=True):
            stamps += [size, written]
    identity = {} if plan is None else {"pipeline": json.loads(plan.identity)}
    stamp = {"inputs": checksum(*stamps)} if stamps else {}
    held = [_sampled(data) for data in _datasets(inputs) if type(data) in PLAIN]
    stamp |= {"in_memory": checksum(*held)} if held else {}
    return OutputFolder(place, {**identity, **stamp, **about}, overwrite=overwrite)


def file_lists(reads: Any) -> Iterator[FileList]:
    for source in sources_of(reads):
        if isinstance(files := getattr(source, "files", None), FileList):
            yield files


def sources_of(reads: Inputs | None) -> Iterator[Any]:
    """The sources that read, of all pipelines that are combined."""
    if reads is not None:
        yield reads.source
        for part in reads.parts:
            yield from sources_of(part)


def _paths(reads: Inputs | None) -> Iterator[str]:
    for files in file_lists(reads):
        systems = files.system_of.tolist()
        yield from (str(files.names[systems.index(system)]) for system in sorted(set(systems)))
    for source in sources_of(reads):
        paths = getattr(getattr(source, "_dataset", None), "paths", ())  # of memory maps
        yield from (str(path) for path in paths[:1])


def _mapped(reads: Inputs | None) -> Iterator[str]:
    """The files and folders whose rows are mapped into memory."""
    for source in sources_of(reads):
        yield from mapped_paths(getattr(source, "_dataset", None))
    for data in _datasets(reads):
        yield from mapped_paths(data)


def _datasets(reads: Inputs | None) -> Iterator[Any]:
    """What ``from_dataset``, ``from_iterable`` and ``from_hf`` were given, of all pipelines."""
    if reads is not None:
        opener = reads.chain.opener
        yield getattr(opener, "dataset", getattr(opener, "factory", None))
        for part in reads.parts:
            yield from _datasets(part)


def _sampled(rows: Sequence[Any]) -> str:
    """A digest of rows in memory: all of them, or some that are spread; without values that JSON lacks."""
    found: list[object] = [len(rows)]
    for place in np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED)).astype(np.int64).tolist():
        row = rows[place]
        for name, value in row.items() if isinstance(row, dict) else [("", row)]:
            with suppress(TypeError, ValueError, RuntimeError):
                found.append(json.dumps([str(name), encoded(value)]))
    return checksum(*found)


def mapped_paths(data: Any) -> Iterator[str]:
    """The files and folders that a dataset or an array is mapped from, where it says them."""
    if isinstance(data, MemmapDataset):
        yield from data.paths
    elif isinstance(data, np.memmap) and data.filename is not None:
        yield os.fspath(data.filename)
    elif isinstance(data, Subset):
        yield from mapped_paths(data.dataset)
    elif isinstance(data, ConcatDataset):
        for part in data.datasets:
            yield from mapped_paths(part)
    elif isinstance(data, MapDataset):
        yield data.path
    elif is_table(data):
        yield from (file["filename"] for file in data.cache_files)


def refuse_mapped(paths: Iterable[str], place: Place) -> None:
    """Raise ConfigError if a folder holds files that are mapped into memory."""
    target = f"{os.path.realpath(place.path)}/"
    if place.is_local and any(f"{os.path.realpath(path)}/".startswith(target) for path in paths):
        raise _own_input(place, "holds files that are read")


def refuse_own_input(
    reads: Inputs | None, place: Place, names: Collection[str], suffixes: Sequence[str] | None
) -> None:
    """Raise ConfigError if a folder holds, or would hold, files that are read."""
    refuse_mapped(_mapped(reads), place)
    real = os.path.realpath if place.is_local else str
    target, how = real(place.path), ""
    if place.is_local and os.path.isfile(target):
        return  # no folder can be made there, which is said when it is tried
    for files in file_lists(reads):
        mine = [_may_be_same(system, place.system) for system in files.systems]
        which = zip(files.paths, files.system_of.tolist(), strict=True)
        folders = {path.rpartition("/")[0] for path, system in which if mine[system]}
        if any(f"{real(folder)}/".startswith(f"{target}/") for folder in folders):
            how = "holds files that are read"
        how = _listed_with(files, folders, place, names, suffixes) or how
    if how:
        raise _own_input(place, how)


def _listed_with(
    files: FileList, folders: Collection[str], place: Place, names: Collection[str],
    suffixes: Sequence[str] | None = None,
) -> str:  # fmt: skip
    """What listing the input again would find of a place; "" for nothing. ``folders`` are of its files."""
    real = os.path.realpath if place.is_local else str
    for listed in files.listed:
        wanted = listed.wanted
        if suffixes is not None:
            wanted = replace(wanted, suffixes=tuple(suffixes))
        known = _known_as(real(place.path), wanted.root.rstrip("/"), folders, real)
        if _may_be_same(listed.system, place.system) and any(
            wanted.stands_for(f"{folder}/{name}") for folder in known for name in names
        ):
            return (
                f"is within the input {listed.url!r}, so that the next run would read what is written "
                "there, too"
            )
    return ""


def refuse_own_file(reads: Inputs, path: Path, caller: str) -> None:
    """Raise ConfigError if a file of this machine is read, or would be by the next run."""
    place, how = place_at(path.parent, caller), ""
    there = path.stat().st_ino if path.exists() else -1
    read = [*_mapped(reads)]
    for files in file_lists(reads):
        here = [is_local(system) for system in files.systems]
        which = zip(files.paths, files.system_of.tolist(), strict=True)
        folders = {name.rpartition("/")[0] for name, system in which if here[system]}
        how = _listed_with(files, folders, place, [path.name]) or how
        read += [files.paths[n] for n in np.flatnonzero(files.inodes == there).tolist()]
    if any(os.path.realpath(name) == os.path.realpath(path) for name in read):
        how = "is read"
    if how:
        raise ConfigError(f"{caller}(): {path} {how}: give a path beside the input", path=str(path))


def _own_input(place: Place, how: str) -> ConfigError:
    return ConfigError(
        f"{place.caller}(): the folder {place.root} {how}: give a folder beside the input",
        path=place.root,
    )


def _known_as(
    target: str, base: str, folders: Collection[str], real: Callable[[str], str]
) -> Iterator[str]:
    """What a folder is called below another folder, where any folder on the way to files may be a link."""
    above = {base}
    for folder in folders:
        while folder not in above and folder.startswith(f"{base}/"):
            above.add(folder)
            folder = folder.rpartition("/")[0]
    for folder in above:
        its = real(folder or "/").rstrip("/")
        if f"{target}/".startswith(f"{its}/"):
            yield f"{folder}{target[len(its) :]}"


def _may_be_same(this_system: Any, system: Any) -> bool:
    while isinstance(this_system, CachingFileSystem):
        this_system = this_system.fs
    if type(this_system) is not type(system):
        return False
    # What is not named may be set in the environment.
    both = zip(_servers(this_system), _servers(system), strict=True)
    return all(old == new for old, new in both if old and new)


def _servers(system: Any) -> list[Any]:
    options = system.storage_options
    options = {**(options.get("client_kwargs") or {}), **options}
    return [options.get(name) for name in SERVERS]


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
