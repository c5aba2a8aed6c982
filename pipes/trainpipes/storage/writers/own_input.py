"""Whether what is written would be read as part of the input: then the next run would read each row twice."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from fsspec.implementations.cached import CachingFileSystem

from trainpipes.errors import ConfigError
from trainpipes.sources.files.list_files import FileList, Listed
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.files.patterns import fixed_root, has_magic, stands_for
from trainpipes.storage.writers.inputs import file_lists
from trainpipes.storage.writers.storage import RemoteStorage, Storage

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
