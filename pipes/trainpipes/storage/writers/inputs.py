"""Which files rows are read from: what a finished folder is compared with, and may not be written into."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsspec.implementations.cached import CachingFileSystem

from trainpipes.errors import ConfigError
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.files.patterns import Wanted
from trainpipes.state.cursor import checksum

#: Options of file systems that say which server a path is of.
SERVERS = ("endpoint_url", "host", "port", "account_name")


def about_inputs(source: Any) -> dict[str, str]:
    """What a manifest says of the files that a source reads: "inputs", a checksum of their sizes, and of
    their times or etags.
    """
    stamps: list[object] = []
    for files in file_lists(source):
        for size, stamp in zip(files.sizes.tolist(), files.stamps, strict=True):
            stamps += [size, stamp]
    return {"inputs": checksum(*stamps)} if stamps else {}


def file_lists(source: Any) -> Iterator[FileList]:
    files, mixed = getattr(source, "files", None), getattr(source, "sources", None)
    if isinstance(files, FileList):
        yield files
    if isinstance(mixed, Mapping):
        for name in sorted(mixed):
            yield from file_lists(mixed[name])
    for joined in getattr(source, "joined_inputs", ()):
        yield from file_lists(joined.source)


def places_of(source: Any) -> Iterator[str]:
    for files in file_lists(source):
        systems = files.system_of.tolist()
        yield from (str(files.names[systems.index(system)]) for system in sorted(set(systems)))
    paths = getattr(getattr(source, "_dataset", None), "paths", ())  # of memory maps
    yield from (str(path) for path in paths[:1])


def refuse_own_input(
    source: Any,
    place: Any,
    names: Collection[str],
    caller: str,
    suffixes: Sequence[str] | None = None,
) -> None:
    """Raise ConfigError if a folder holds files that are read, or would hold some that are found with
    them."""
    system, root = getattr(place, "system", None), place.root
    target = place.path if system is not None else os.path.realpath(root)
    if system is None and os.path.isfile(target):
        return  # no folder can be made there, which is said when it is tried
    for files in file_lists(source):
        for path in _paths(files, system):
            if f"{path}/".startswith(f"{target}/"):
                raise ConfigError(
                    f"{caller}(): the folder {root} holds files that are read: give a folder beside the "
                    "input",
                    path=root,
                )
        for listed in files.listed:
            wanted = listed.wanted
            if suffixes is not None:
                wanted = replace(wanted, suffixes=tuple(suffixes))
            if _same_store(listed.system, system) and _finds(wanted, files, target, names, system):
                raise ConfigError(
                    f"{caller}(): the folder {root} is within the input {listed.url!r}, so that the next run "
                    "would read what is written there, too: give a folder beside the input",
                    path=root,
                )


def _paths(files: FileList, system: Any) -> Iterator[str]:
    for number, own in enumerate(files.systems):
        if not _same_store(own, system):
            continue
        paths = (files.paths[n] for n in (files.system_of == number).nonzero()[0].tolist())
        folders = {path.rpartition("/")[0] for path in paths}
        yield from map(os.path.realpath, folders) if system is None else folders


def _finds(
    wanted: Wanted, files: FileList, target: str, names: Collection[str], system: Any
) -> bool:
    if system is not None:
        return any(wanted.stands_for(f"{target}/{name}") for name in names)
    for folder in _folders(wanted.root.rstrip("/"), files.paths):
        real = os.path.realpath(folder or "/").rstrip("/")
        if f"{target}/".startswith(f"{real}/"):
            inner = f"{folder}{target[len(real) :]}"
            if any(wanted.stands_for(f"{inner}/{name}") for name in names):
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
