"""The files that a pipeline reads, which may not be those that are written, nor lie among them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.implementations.cached import CachingFileSystem
from torch.utils.data import ConcatDataset, Subset

from trainpipes.engine.planning.inputs import Inputs
from trainpipes.errors import ConfigError
from trainpipes.filesystems.places import Place, place_at
from trainpipes.filesystems.systems import is_local
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.from_hf import is_table
from trainpipes.sources.from_memmap import MemmapDataset
from trainpipes.writers.epoch_rows import MapDataset

#: Options of file systems that say which server a path is of.
SERVERS = ("endpoint_url", "host", "port", "account_name")


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


def one_path_each(reads: Inputs | None) -> Iterator[str]:
    """A path of each file system, and of each memory map."""
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
    for data in datasets(reads):
        yield from mapped_paths(data)


def datasets(reads: Inputs | None) -> Iterator[Any]:
    """What ``from_dataset``, ``from_iterable`` and ``from_hf`` were given, of all pipelines."""
    if reads is not None:
        opener = reads.chain.opener
        yield getattr(opener, "dataset", getattr(opener, "factory", None))
        for part in reads.parts:
            yield from datasets(part)


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
    target, paths = f"{os.path.realpath(place.path)}/", [*paths]
    if place.is_local and (
        any(f"{os.path.realpath(path)}/".startswith(target) for path in paths)
        or _holds(place, [(_inode(path), path) for path in paths])
    ):
        raise _own_input(place, "holds files that are read")


def _inode(path: str) -> int:
    with suppress(OSError):
        return os.stat(path).st_ino
    return 0


def _holds(place: Place, files: Iterable[tuple[int, str]]) -> bool:
    """Whether one of the files in a folder of this machine is one of these, which a link may lead to."""
    there: dict[int, str] = {}
    with suppress(OSError), os.scandir(place.path) as entries:
        there = {entry.inode(): entry.path for entry in entries}
    for inode, path in files:
        with suppress(OSError):
            if inode in there and os.path.samefile(there[inode], path):
                return True
    return False


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
        if place.is_local and _holds(place, zip(files.inodes.tolist(), files.paths, strict=True)):
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
    there = path.stat().st_ino if os.path.exists(path) else -1
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
