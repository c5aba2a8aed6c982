"""Files of stores that fsspec knows: folders, globs, and what is told of each file.

``info``, ``ls`` and ``find`` are asked. ``glob`` is not, nor ``find`` where it walks the folders: fsspec's
own leave out, without a word, what could not be listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.utils import glob_translate

from trainpipes._internal.progress import counted
from trainpipes.sources.files.patterns import (
    Found,
    Told,
    check_outputs,
    fixed_root,
    has_magic,
    hidden,
    wild,
)
from trainpipes.sources.remote.retry import Requests

#: Files that are asked about at once.
MAX_THREADS = 16
#: What a store's listing may say of a file that changes when the file does, the surest first.
STAMPS = (
    "ETag", "etag", "e_tag", "md5Hash", "content_md5", "blob_id", "sha256", "oid", "sha", "LastModified",
    "last_modified", "Last-Modified", "mtime", "modified", "updated",
)  # fmt: skip


def list_remote(system: Any, path: str, suffixes: Sequence[str], requests: Requests) -> Found:
    """What a path, a folder or a glob stands for.

    Raises:
        FileNotFoundError: it is not there.
        UnreachableError: the server does not answer, or denies access.
    """
    if has_magic(path):
        found = _matching(system, path, suffixes, requests)
    else:
        info = requests.call(system, "info", path)
        if info["type"] != "directory":
            return {info.get("name", path): told(info)}
        found = _find(system, path, suffixes, requests)
    unknown = [name for name, one in found.items() if one.size is None]  # of index pages

    def ask(name: str) -> Told:
        try:
            return told(requests.call(system, "info", name))
        except FileNotFoundError:  # whoever reads it says so
            return found[name]

    with ThreadPoolExecutor(MAX_THREADS) as pool:
        try:
            found.update(zip(unknown, pool.map(ask, unknown), strict=True))
        except BaseException:
            requests.stop()  # nobody waits for what is under way
            raise
    return found


def _matching(system: Any, path: str, suffixes: Sequence[str], requests: Requests) -> Found:
    """The files that a pattern stands for."""
    root, parts = fixed_root(path)
    named = "".join(part[0] for part in parts if part)
    found: Found = {}
    for name, info in _glob(system, path, requests):
        inner = name.strip("/").split("/")[len(root) :]
        if any(hidden(part) and part[0] not in named for part in inner):
            continue
        if info["type"] != "directory":
            found[name] = told(info)
        elif parts[-1] != "**":
            found.update(_find(system, name, suffixes, requests))
    return found


def _find(system: Any, folder: str, suffixes: Sequence[str], requests: Requests) -> Found:
    above = len(folder.strip("/").split("/"))
    found: Found = {}
    hidden_ones: set[str] = set()
    inside = _below(system, folder, None, requests, folders=False)
    for name, info in counted(inside, "listing", None, "files"):
        inner = name.strip("/").split("/")[above:]
        if any(map(hidden, inner)):
            hidden_ones |= {name.rstrip("/"), name.rpartition("/")[0]}
        elif info["type"] != "directory" and name.lower().endswith(tuple(suffixes)):
            found[name] = told(info)
    check_outputs(folder, found, hidden_ones.__contains__)
    return found


def _glob(system: Any, path: str, requests: Requests) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Files and folders that match a pattern, as fsspec's ``glob`` understands it."""
    first = next(n for n, c in enumerate(path) if c in wild(path))
    start = path.rfind("/", 0, first) + 1
    depth = None if "**" in path else path.count("/", start) + 1
    matches = re.compile(glob_translate(path)).match
    folder = system._strip_protocol(path[:start])
    for name, info in _below(system, folder, depth, requests, folders=True):
        name = name.rstrip("/") if info["type"] == "directory" else name
        if matches(name):
            yield name, info


def _below(
    system: Any, folder: str, depth: int | None, requests: Requests, folders: bool
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Files below a folder, and the folders if they are wanted, down to so many levels."""
    find = getattr(system.find, "__wrapped__", system.find)
    walks = (AsyncFileSystem._find, fsspec.AbstractFileSystem.find)
    if depth is None and getattr(find, "__func__", None) not in walks:
        # Stores that know no folders list all levels at once.
        options = {"withdirs": True, "detail": True} if folders else {"detail": True}
        yield from requests.call(system, "find", folder, **options).items()
        return
    level, later = [folder], []
    while level and depth != 0:
        for here in level:
            try:
                listed = requests.call(system, "ls", here, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                if here == folder:
                    raise
                continue  # gone meanwhile, or a link to nothing on a web page
            for info in listed:
                name, is_folder = info["name"].rstrip("/"), info["type"] == "directory"
                if is_folder and name == here.rstrip("/"):
                    continue
                if is_folder:
                    later.append(name)
                yield info["name"], info
        level, later = later, []
        depth = None if depth is None else depth - 1


def told(info: Mapping[str, Any]) -> Told:
    """Size and stamp of a file, as a store's listing tells them."""
    stamp = next((f"{key}={info[key]}" for key in STAMPS if info.get(key)), "")
    return Told(info.get("size"), stamp)
