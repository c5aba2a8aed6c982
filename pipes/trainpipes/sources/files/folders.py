"""Which files of a folder are meant, and what folders hold, here and in stores.

Stores are asked by ``info``, ``ls`` and ``find``: fsspec's ``glob`` and walking ``find`` skip errors
silently.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.cached import CachingFileSystem

from trainpipes._internal.checks import refuse_special
from trainpipes.errors import ConfigError, MissingFilesError
from trainpipes.filesystems.places import MANIFEST, OURS, WORK
from trainpipes.filesystems.retry import Requests

log = logging.getLogger("trainpipes")

#: Where a name is that is below a folder that is meant as a whole.
BELOW = -1


def hidden(name: str) -> bool:
    """Whether a name says that it is no data: ``.cache``, ``_SUCCESS``, ``_delta_log``; not the partition
    ``_lang=en``.
    """
    return (
        name.startswith(".") or (name.startswith("_") and "=" not in name) or name == "lost+found"
    )


def check_outputs(folder: str, files: Iterable[str], marks: Collection[str]) -> None:
    placed = [file.rpartition("/") for file in files]
    counts = {place for place, _, _ in placed}
    written = Counter(place for place, _, name in placed if OURS.fullmatch(name))
    finished = {place for place in written if f"{place}/{MANIFEST}" in marks}
    unfinished = {place for place in written if f"{place}/{WORK}" in marks} - finished
    outputs = unfinished | finished
    inner = sorted(outputs - {folder.rstrip("/")})
    if inner and outputs < counts and folder.rstrip("/") not in outputs:
        raise ConfigError(
            f"list_files: below the folder {folder} are files, and output of trainpipes in {inner[0]}: list "
            "the one that is meant, such as the files by a glob, or both in a list",
            path=folder,
        )
    for place in sorted(unfinished):
        log.warning(
            "%s is not finished: %d files are there so far; its writer is at work, or was killed and makes "
            "the rest when it is called again",
            place,
            written[place],
        )


def wild(path: str) -> str:
    return "*" if path.startswith(("http://", "https://")) else "*?["


@lru_cache
def has_magic(path: str) -> bool:
    return any(c in path for c in wild(path))


def names_in(path: str) -> list[str]:
    path = path.strip("/")
    return path.split("/") if path else []


@dataclass(frozen=True)
class Wanted:
    """The files of a folder (without ``parts``) or a pattern, by the parts matched so far.

    >>> pattern = Wanted("d", ("*.txt",), (".txt",))
    >>> [pattern.stands_for(path) for path in ("d/a.txt", "d/out/a.txt", "d/out.txt/a.txt")]
    [True, False, True]
    """

    root: str
    parts: tuple[str, ...]
    suffixes: tuple[str, ...]

    def start(self) -> frozenset[int]:
        return self._without_folders({0})

    def after(self, reached: frozenset[int], name: str) -> frozenset[int]:
        steps: set[int] = set()
        for n in reached:
            part = self.parts[n] if 0 <= n < len(self.parts) else None
            if part is not None and part != "**":
                steps |= {n + 1} if _fits(name, part) else set()
            elif not hidden(name):
                steps |= {BELOW} if part is None else {n, n + 1}
        return self._without_folders(steps)

    def _without_folders(self, reached: set[int]) -> frozenset[int]:
        """Also what follows a ``**``, which may stand for no folder."""
        for n, part in enumerate(self.parts[:-1]):
            if n in reached and part == "**":
                reached.add(n + 1)
        return frozenset(reached)

    def is_whole(self, reached: frozenset[int]) -> bool:
        return len(self.parts) in reached and self.parts[-1:] != ("**",)

    def all_below(self, reached: frozenset[int]) -> bool:
        return any(n in (BELOW, len(self.parts)) or self.parts[n] == "**" for n in reached)

    def holds(self, reached: frozenset[int], path: str) -> bool:
        return len(self.parts) in reached or (
            BELOW in reached and path.lower().endswith(self.suffixes)
        )

    def stands_for(self, path: str) -> bool:
        names, root = names_in(path), names_in(self.root)
        if names[: len(root)] != root or len(names) == len(root):
            return False
        reached = self.start()
        for name in names[len(root) :]:
            reached = self.after(reached, name)
        return self.holds(reached, path)


def _fits(name: str, part: str) -> bool:
    if not has_magic(part):
        return name == part
    return fnmatchcase(name, part) and (part[0] in "._" or not hidden(name))


T = TypeVar("T")

#: Requests to a store at once.
MAX_THREADS = 16
#: What a store's listing may say of a file's content; and what else changes when the file does.
TAGS = ("ETag", "etag", "e_tag", "md5Hash", "content_md5", "blob_id", "sha256", "oid", "sha")
STAMPS = (
    *TAGS, "LastModified", "last_modified", "Last-Modified", "mtime", "modified", "updated",
)  # fmt: skip


class Reported(NamedTuple):
    """A listed file: bytes or None; time of change, etag or ""; a local one's inode."""

    size: int | None
    stamp: str
    inode: int = 0


#: Files by path.
Found = dict[str, Reported]


class Entry(NamedTuple):
    """A file or folder found in a folder."""

    path: str
    is_folder: bool
    info: Mapping[str, Any] = {}


class LocalFolders:
    """Looks into folders of this machine."""

    many = 1  # that are looked into at once

    def look_up(self, path: str) -> Entry | None:
        """The file or folder of a path; None if it is a pattern."""
        there = os.path.lexists(path) or not has_magic(path)
        return Entry(path, os.path.isdir(path)) if there else None

    def entries(self, folder: str, all_below: bool = False) -> list[Entry]:
        with os.scandir(folder) as entries:
            return [
                Entry(entry.path, _is_folder(entry)) for entry in entries if not _leads_back(entry)
            ]

    def reported(self, file: Entry) -> Reported:
        try:
            about = os.stat(file.path)
        except OSError as error:
            if not os.path.islink(file.path) or error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            how = "does not exist" if error.errno == errno.ENOENT else "leads back to it"
            raise MissingFilesError(
                f"{file.path} is a link to {os.readlink(file.path)}, which {how}; repair the link "
                "or remove it",
                path=file.path,
            ) from None
        refuse_special(file.path, about.st_mode)
        return Reported(about.st_size, str(about.st_mtime_ns), about.st_ino)

    def content(self, file: str) -> bytes:
        refuse_special(file)  # a pipe would be waited for
        with open(file, "rb") as opened:
            return opened.read()


class StoreFolders:
    """Looks into folders of an fsspec file system."""

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
            entries = [_entry(info) for info in infos if info["name"].startswith(above)]
            return [entry for entry in entries if not entry.is_folder]
        entries = [*map(_entry, self._requests.call(self._system, "ls", folder, detail=True))]
        return [
            entry for entry in entries if not entry.is_folder or entry.path != folder.rstrip("/")
        ]

    def reported(self, file: Entry) -> Reported:
        return reported(file.info)

    def content(self, file: str) -> bytes:
        content: bytes = self._requests.call(self._system, "cat_file", file)
        return content


def reported(info: Mapping[str, Any]) -> Reported:
    stamp = next((f"{key}={info[key]}" for key in STAMPS if info.get(key)), "")
    return Reported(info.get("size"), stamp)


def _entry(info: Mapping[str, Any]) -> Entry:
    is_folder = info["type"] == "directory"
    return Entry(info["name"].rstrip("/") if is_folder else info["name"], is_folder, info)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, which whoever reads it says
        return False


def _leads_back(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a link to a folder above it."""
    if not entry.is_symlink() or not _is_folder(entry):
        return False
    target = os.path.realpath(entry.path)
    here = os.path.realpath(os.path.dirname(entry.path))
    return os.path.commonpath([target, here]) == target
