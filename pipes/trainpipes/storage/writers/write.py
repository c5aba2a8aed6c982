"""Writes the rows of one epoch to files in a folder: what all formats share."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from fsspec.implementations.cached import CachingFileSystem

from trainpipes._internal.progress import Progress
from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError
from trainpipes.kinds.options import either
from trainpipes.sources.files.list_files import FileList, Listed
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.files.patterns import fixed_root, has_magic, stands_for
from trainpipes.storage.writers.epoch_rows import EpochRows
from trainpipes.storage.writers.inputs import about_inputs, file_lists
from trainpipes.storage.writers.manifest import Opened, Written
from trainpipes.storage.writers.on_ray import HERE, Cluster, check_cut, check_paths, write_on_ray
from trainpipes.storage.writers.one_file import (
    Format,
    Lengths,
    columns_of,
    entry_of,
    first_missing,
    in_order,
    numbered,
    same_columns,
    write_file,
)
from trainpipes.storage.writers.output_folder import OutputFolder
from trainpipes.storage.writers.storage import RemoteStorage, Storage, storage_at

if TYPE_CHECKING:
    from trainpipes.pipeline import Pipeline

#: Options of file systems that say which server a path is of.
SERVERS = ("endpoint_url", "host", "port", "account_name")


def refuse_own_input(
    source: Any,
    out: Storage,
    names: Collection[str],
    asker: str,
    suffixes: Sequence[str] | None = None,
) -> None:
    """Raise ConfigError if a folder holds files that are read, or would hold some that are found with them.

    Args:
        source: of the plan, opened.
        out: the folder.
        names: of files that will be in it, one of each kind.
        asker: who writes.
        suffixes: what the names of files found in folders end with when they are listed again, where that is
            not as they were listed.
    """
    system, root = (out.system, out.root) if isinstance(out, RemoteStorage) else (None, out.root)
    target = out.path if isinstance(out, RemoteStorage) else os.path.realpath(root)
    if system is None and os.path.isfile(target):
        return  # no folder can be made there, which is said when it is tried
    for files in file_lists(source):
        for path in _paths(files, system):
            if f"{path}/".startswith(f"{target}/"):
                raise ConfigError(
                    f"{asker}(): the folder {root} holds files that are read: give a folder beside the input",
                    path=root,
                )
        for listed in files.listed:
            ends = listed.suffixes if suffixes is None else tuple(suffixes)
            if _finds(listed, ends, files, target, names, system):
                raise ConfigError(
                    f"{asker}(): the folder {root} is within the input {listed.url!r}, so that the next run "
                    "would read what is written there, too: give a folder beside the input",
                    path=root,
                )


def _paths(files: FileList, system: Any) -> Iterator[str]:
    """Folders of files that are in the same store as the target."""
    for number, own in enumerate(files.systems):
        if not _same_store(own, system):
            continue
        paths = (files.paths[n] for n in (files.system_of == number).nonzero()[0].tolist())
        folders = {path.rpartition("/")[0] for path in paths}
        yield from map(os.path.realpath, folders) if system is None else folders


def _finds(
    listed: Listed,
    suffixes: tuple[str, ...],
    files: FileList,
    target: str,
    names: Collection[str],
    system: Any,
) -> bool:
    """Whether a file of one of the names would be listed, if it were in the target."""
    if not _same_store(listed.system, system):
        return False
    path = listed.path
    if system is not None:
        is_folder = not has_magic(path)
        return any(stands_for(path, is_folder, suffixes, f"{target}/{name}") for name in names)
    is_folder = os.path.isdir(path)
    base = path if is_folder else "/" + "/".join(fixed_root(path)[0])
    for folder in _folders(base.rstrip("/"), files.paths):
        real = os.path.realpath(folder or "/").rstrip("/")
        if f"{target}/".startswith(f"{real}/"):
            inner = f"{folder}{target[len(real) :]}"
            if any(stands_for(path, is_folder, suffixes, f"{inner}/{name}") for name in names):
                return True
    return False


def _folders(base: str, paths: Sequence[str]) -> set[str]:
    """A folder, and those below it on the way to files: any may be a link."""
    found = {base}
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder not in found and folder.startswith(f"{base}/"):
            found.add(folder)
            folder = folder.rpartition("/")[0]
    return found


def _same_store(own: Any, system: Any) -> bool:
    """Whether a file system is that of the target; None is this machine's."""
    while isinstance(own, CachingFileSystem):
        own = own.fs
    if system is None or is_local(own):
        return system is None and is_local(own)
    return bool(_protocols(own) & _protocols(system)) and _server(own) == _server(system)


def _protocols(system: Any) -> set[str]:
    return {system.protocol} if isinstance(system.protocol, str) else {*system.protocol}


def _server(system: Any) -> list[Any]:
    options = system.storage_options
    options = {**(options.get("client_kwargs") or {}), **options}
    return [options.get(name) for name in SERVERS]


def write(
    pipeline: Pipeline,
    folder: str | os.PathLike[str],
    form: Format,
    num_files: int | None,
    rows_per_file: int | None,
    overwrite: bool,
    cluster: Cluster = HERE,
) -> Written:
    """Write the rows of a pipeline's first epoch.

    Args:
        pipeline: gives rows with columns.
        folder: where the files are to be.
        form: how rows are written.
        num_files: how many of about as many rows; or
        rows_per_file: how many rows each has. If both are left out, a file ends after 512 MiB of rows as they
            are in memory.
        overwrite: whether what was written there before is removed.
        cluster: of Ray, where tasks write.
    """
    with ExitStack() as stack:
        # Before anything is read: Ray starts processes.
        ray = cluster.enter(stack, form.asker)
        rows = EpochRows(pipeline, form.asker)
        lengths = Lengths(rows.count, num_files, rows_per_file, form.asker)
        if ray is not None:
            check_cut(rows, lengths)
        options = {"format": form.asker.removeprefix("write_"), **form.options}
        options |= {"num_files": num_files, "rows_per_file": rows_per_file}
        about = {"options": options, "pipeline": json.loads(rows.plan.identity)}
        about |= about_inputs(rows.plan.inputs.source)
        storage = storage_at(folder, form.asker, urls=ray is not None)
        refuse_own_input(rows.plan.inputs.source, storage, [form.name_of(0)], form.asker)
        out = stack.enter_context(OutputFolder(storage, form.asker, about, overwrite))
        stack.enter_context(closing(rows))
        if ray is not None:
            check_paths(ray, rows, storage.root)
        opened = out.open()
        if opened.written is not None:
            return opened.written
        if ray is not None:
            return write_on_ray(ray, rows, out, opened, form, lengths)
        return _write(rows, out, opened, form, lengths)


def check_codec(compression: object, known: Collection[str], asker: str) -> None:
    """Raise ConfigError unless a compression is a known one, or None."""
    if compression is not None and compression not in known:
        raise ConfigError(
            f"{asker}(compression) is {either([*known])}, or None, got {shown(compression)}"
        )


def _write(
    rows: EpochRows, out: OutputFolder, opened: Opened, form: Format, lengths: Lengths
) -> Written:
    # Tasks on a cluster end in any order, so that later files may be whole before earlier ones.
    known, columns = numbered(opened.files), opened.columns
    rows.open(opened.next)
    done = number = 0
    at = opened.row  # where ``rows`` stands
    if at is None:
        at = sum(known[n]["rows"] for n in range(first_missing(known))) if opened.next else 0
    with Progress(f"writing {out.name}", rows.count, "rows") as progress:
        progress.skip(sum(entry["rows"] for entry in known.values()))
        while True:
            while number in known:
                done, number = done + known[number]["rows"], number + 1
            if done != at:
                rows.close()
                rows.open(rows.cursor_at(done))
            length = lengths.of(number)
            group = rows.group(min(form.rows, length or form.rows), form.bytes)
            if group is None:
                break
            columns = same_columns(form.asker, columns, columns_of(rows.schema))
            name = form.name_of(number)
            with out.file(name) as file:
                count = write_file(rows, form, file, group, length, done, progress.advance)
            known[number] = entry_of(name, count, file)
            at = done = done + count
            number += 1
            out.note(known[number - 1], (at, rows.cursor), columns=columns)
    if columns is None:
        raise ConfigError(
            f"{form.asker}(): the pipeline has no rows, and nothing was written: check what filters it"
        )
    return out.finish(in_order(known), columns)
