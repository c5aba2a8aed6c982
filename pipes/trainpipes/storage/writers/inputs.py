"""Which files rows are read from: a folder is compared with them, and may not hold them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsspec.implementations.cached import CachingFileSystem

from trainpipes.errors import ConfigError
from trainpipes.sources.files.list_files import FileList
from trainpipes.state.cursor import checksum
from trainpipes.storage.places import Place

#: Options of file systems that say which server a path is of.
SERVERS = ("endpoint_url", "host", "port", "account_name")


def about_inputs(source: Any) -> dict[str, str]:
    """What a manifest says of a source's files: "inputs", a checksum of their sizes and times or etags."""
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
    place: Place,
    names: Collection[str],
    caller: str,
    suffixes: Sequence[str] | None = None,
) -> None:
    """Raise ConfigError if a folder holds, or would hold, files that are read."""
    real = os.path.realpath if place.is_local else str
    root, target = place.root, real(place.path)
    if place.is_local and os.path.isfile(target):
        return  # no folder can be made there, which is said when it is tried
    for files in file_lists(source):
        for number, system in enumerate(files.systems):
            paths = (files.paths[n] for n in (files.system_of == number).nonzero()[0].tolist())
            folders = {path.rpartition("/")[0] for path in paths}
            if _same_store(system, place.system) and any(
                f"{real(folder)}/".startswith(f"{target}/") for folder in folders
            ):
                raise ConfigError(
                    f"{caller}(): the folder {root} holds files that are read: give a folder beside the "
                    "input",
                    path=root,
                )
        for listed in files.listed:
            wanted = listed.wanted
            if suffixes is not None:
                wanted = replace(wanted, suffixes=tuple(suffixes))
            if _same_store(listed.system, place.system) and any(
                wanted.stands_for(f"{inner}/{name}")
                for inner in _known_as(target, wanted.root.rstrip("/"), files.paths, real)
                for name in names
            ):
                raise ConfigError(
                    f"{caller}(): the folder {root} is within the input {listed.url!r}, so that the next run "
                    "would read what is written there, too: give a folder beside the input",
                    path=root,
                )


def _known_as(
    target: str, base: str, paths: Sequence[str], real: Callable[[str], str]
) -> Iterator[str]:
    """What a folder is called below another one, where any folder on the way to files may be a link."""
    folders = {base}
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder not in folders and folder.startswith(f"{base}/"):
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    for folder in folders:
        its = real(folder or "/").rstrip("/")
        if f"{target}/".startswith(f"{its}/"):
            yield f"{folder}{target[len(its) :]}"


def _same_store(own: Any, system: Any) -> bool:
    while isinstance(own, CachingFileSystem):
        own = own.fs
    return bool(_protocols(own) & _protocols(system)) and _server(own) == _server(system)


def _protocols(system: Any) -> set[str]:
    return {system.protocol} if isinstance(system.protocol, str) else {*system.protocol}


def _server(system: Any) -> list[Any]:
    options = system.storage_options
    options = {**(options.get("client_kwargs") or {}), **options}
    return [options.get(name) for name in SERVERS]
