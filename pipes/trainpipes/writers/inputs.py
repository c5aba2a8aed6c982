"""Which files rows are read from: a folder is compared with them, and may not hold them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsspec.implementations.cached import CachingFileSystem

from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError
from trainpipes.filesystems.places import Place
from trainpipes.sources.files.file_list import FileList
from trainpipes.state.cursor import checksum
from trainpipes.writers.executor import Executor
from trainpipes.writers.output_folder import OutputFolder

#: Options of file systems that say which server a path is of.
SERVERS = ("endpoint_url", "host", "port", "account_name")


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


def refuse_own_input(
    reads: Inputs | None, place: Place, names: Collection[str], suffixes: Sequence[str] | None
) -> None:
    """Raise ConfigError if a folder holds, or would hold, files that are read."""
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
        for listed in files.listed:
            wanted = listed.wanted
            if suffixes is not None:
                wanted = replace(wanted, suffixes=tuple(suffixes))
            known = _known_as(target, wanted.root.rstrip("/"), folders, real)
            if _may_be_same(listed.system, place.system) and any(
                wanted.stands_for(f"{folder}/{name}") for folder in known for name in names
            ):
                how = f"is within the input {listed.url!r}, so that the next run would read what is written "
                how += "there, too"
    if how:
        raise ConfigError(
            f"{place.caller}(): the folder {place.root} {how}: give a folder beside the input",
            path=place.root,
        )


def _known_as(
    target: str, base: str, folders: Collection[str], real: Callable[[str], str]
) -> Iterator[str]:
    """What a folder is called below another one, where any folder on the way to files may be a link."""
    above = {base}
    for folder in folders:
        while folder not in above and folder.startswith(f"{base}/"):
            above.add(folder)
            folder = folder.rpartition("/")[0]
    for folder in above:
        its = real(folder or "/").rstrip("/")
        if f"{target}/".startswith(f"{its}/"):
            yield f"{folder}{target[len(its) :]}"


def _may_be_same(own: Any, system: Any) -> bool:
    while isinstance(own, CachingFileSystem):
        own = own.fs
    if type(own) is not type(system):
        return False
    # What is not named may be set in the environment.
    both = zip(_servers(own), _servers(system), strict=True)
    return all(old == new for old, new in both if old and new)


def _servers(system: Any) -> list[Any]:
    options = system.storage_options
    options = {**(options.get("client_kwargs") or {}), **options}
    return [options.get(name) for name in SERVERS]
