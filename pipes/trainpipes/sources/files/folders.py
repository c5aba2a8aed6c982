"""The contents of folders, here and in stores.

Stores are asked by ``info``, ``ls`` and ``find``: fsspec's ``glob`` and walking ``find`` skip errors
silently.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.cached import CachingFileSystem

from trainpipes._internal.checks import refuse_special
from trainpipes.errors import MissingFilesError
from trainpipes.sources.files.patterns import has_magic
from trainpipes.sources.remote.retry import Requests

T = TypeVar("T")

#: Requests to a store at once.
MAX_THREADS = 16
#: What a store's listing may say of a file that changes when the file does, the surest first.
STAMPS = (
    "ETag", "etag", "e_tag", "md5Hash", "content_md5", "blob_id", "sha256", "oid", "sha", "LastModified",
    "last_modified", "Last-Modified", "mtime", "modified", "updated",
)  # fmt: skip


class Reported(NamedTuple):
    """A listed file: bytes or None; time of change, etag or ""; a local one's inode."""

    size: int | None
    stamp: str
    inode: int = 0


#: Files by path.
Found = dict[str, Reported]


class Entry(NamedTuple):
    path: str
    is_folder: bool
    info: Mapping[str, Any] = {}


class LocalFolders:
    many = 1  # that are looked into at once

    def look_up(self, path: str) -> Entry | None:
        """The file or folder of a path; None if it is a pattern."""
        there = os.path.lexists(path) or not has_magic(path)
        return Entry(path, os.path.isdir(path)) if there else None

    def entries(self, folder: str, all_below: bool = False) -> list[Entry]:
        with os.scandir(folder) as found:
            return [Entry(one.path, one.is_dir()) for one in found if not _leads_back(one)]

    def reported(self, file: Entry) -> Reported:
        try:
            about = os.stat(file.path)
        except FileNotFoundError:
            if not os.path.islink(file.path):
                raise
            raise MissingFilesError(
                f"{file.path} is a link to {os.readlink(file.path)}, which does not exist; repair the link "
                "or remove it",
                path=file.path,
            ) from None
        refuse_special(file.path, about.st_mode)
        return Reported(about.st_size, str(about.st_mtime_ns), about.st_ino)


class StoreFolders:
    def __init__(self, system: Any, requests: Requests) -> None:
        self._system = system
        self._requests = requests
        find = getattr(system.find, "__wrapped__", system.find)
        walks = (AsyncFileSystem._find, fsspec.AbstractFileSystem.find)
        #: Stores that know no folders list all levels at once.
        self._finds = getattr(find, "__func__", None) not in walks
        while isinstance(system, CachingFileSystem):
            system = system.fs
        #: Others have one connection, which is for one request at a time.
        self.many = MAX_THREADS if system.async_impl else 1

    def look_up(self, path: str) -> Entry | None:
        if has_magic(path):
            return None
        info = self._requests.call(self._system, "info", path)
        if info["type"] == "directory":
            return Entry(path, True)
        return Entry(info.get("name", path), False, info)

    def entries(self, folder: str, all_below: bool = False) -> list[Entry]:
        """What is in a folder; the files at all levels below it if all are wanted, and are had at once."""
        if all_below and self._finds:
            infos = self._requests.call(self._system, "find", folder, detail=True).values()
            above = folder and f"{folder}/"
            found = [_entry(info) for info in infos if info["name"].startswith(above)]
            return [one for one in found if not one.is_folder]
        found = [*map(_entry, self._requests.call(self._system, "ls", folder, detail=True))]
        return [one for one in found if not one.is_folder or one.path != folder.rstrip("/")]

    def reported(self, file: Entry) -> Reported:
        return reported(file.info)


def reported(info: Mapping[str, Any]) -> Reported:
    stamp = next((f"{key}={info[key]}" for key in STAMPS if info.get(key)), "")
    return Reported(info.get("size"), stamp)


def _entry(info: Mapping[str, Any]) -> Entry:
    is_folder = info["type"] == "directory"
    return Entry(info["name"].rstrip("/") if is_folder else info["name"], is_folder, info)


def _leads_back(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a link to a folder above it."""
    if not entry.is_symlink() or not entry.is_dir():
        return False
    target = os.path.realpath(entry.path)
    here = os.path.realpath(os.path.dirname(entry.path))
    return os.path.commonpath([target, here]) == target
