"""Which of the files that are there are the data, what reads them, and what lies beside them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainpipes._internal.shown import cut
from trainpipes.errors import ConfigError, MissingFilesError
from trainpipes.sources.arrow.saved_dataset import saved_files
from trainpipes.sources.files.formats import ends_of_names, reader_by_name
from trainpipes.sources.files.list_files import FileList, ListFiles
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.files.patterns import hidden

__all__ = ["GivenFiles", "as_arguments", "given_files"]

#: Ends of names that programs give a file until it is whole: browsers, rsync, the Hugging Face hub, and
#: others.
UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".inprogress", ".crdownload")
#: What says of a folder that it is being written: our own writers, and Spark's.
WRITING = ("_unfinished.json", "_temporary")
#: Files of save_to_disk that describe the data beside them.
ABOUT = ("state.json", "dataset_info.json", "dataset_dict.json")
#: Paths that a command is shown with, at most; of more, a pattern.
SPELT_OUT = 3
#: Folders that are looked at for files that are being written, at most: a look costs about 50 us.
MOST_FOLDERS = 1000


@dataclass(frozen=True)
class GivenFiles:
    """The files.

    Args:
        urls: what was asked for.
        reader: what reads them.
        files: those that it reads.
        others: files beside them that another reader reads, by its name; by "" those that none does.
        unfinished: names of files and folders that look as if they were still being written.
    """

    urls: tuple[str, ...]
    reader: str
    files: FileList
    others: dict[str, list[str]] = field(default_factory=dict)
    unfinished: tuple[str, ...] = ()

    @property
    def data(self) -> str:
        """What was asked for, as it is typed in a shell."""
        return as_arguments(self.urls)

    @property
    def remote(self) -> bool:
        """Whether files lie on another machine."""
        return not all(map(is_local, self.files.systems))


def as_arguments(urls: Sequence[str]) -> str:
    """Paths and URLs as they are typed in a shell; many files of one folder as a pattern.

    >>> as_arguments(["my data", "b"]), as_arguments([f"my data/{n}.pq" for n in range(9)])
    ("'my data' b", "'my data'/*.pq")
    """
    if len(urls) <= SPELT_OUT:
        return " ".join(map(shlex.quote, urls))
    folders = {url.rpartition("/")[0] for url in urls}
    ends = {os.path.splitext(url)[1] for url in urls}
    if len(folders) > 1 or len(ends) > 1:
        return " ".join([*map(shlex.quote, urls[:SPELT_OUT]), "…"])
    folder = folders.pop()
    return f"{shlex.quote(folder) + '/' if folder else ''}*{shlex.quote(ends.pop()) if ends != {''} else ''}"


def given_files(urls: Sequence[str], storage_options: Mapping[str, Any] | None) -> GivenFiles:
    """The files that paths, folders, globs and URLs stand for, and what reads them.

    Where there are files of several formats, the one that has most bytes is the data.

    Raises:
        MissingFilesError: there are none.
        ConfigError: no name says how to read a file.
        UnreachableError: a server does not answer, or denies access.
    """
    if not urls:
        raise MissingFilesError(
            "inspect_files(files) takes a path, folder, glob or URL, or a list of them, got none"
        )
    if all(map(_is_memmap, urls)):
        return GivenFiles(tuple(urls), "from_memmap", _none())
    listed = ListFiles(urls=list(urls), suffix="", storage_options=storage_options)
    files = listed.files(storage_options, ("",))
    readers = np.array([reader_by_name(name) for name in files.names], dtype=object)
    if "read_arrow" in readers:
        about = [name.rsplit("/", 1)[-1] in ABOUT for name in files.names]
        readers[about] = "about"
    sizes = np.maximum(files.sizes, 0)
    amounts = {
        reader: (int(sizes[readers == reader].sum()), -place)
        for place, reader in enumerate(dict.fromkeys(sorted(readers, key=_place)))
        if reader not in ("", "about")
    }
    if not amounts:
        raise ConfigError(
            f"files are read by the ends of their names, got {len(files):,}, such as {cut(files.names[0])}; "
            f"known are {', '.join(ends_of_names()[:12])}, …: rename them, or read them with a reader of "
            "trainpipes, such as tp.read_json(...)"
        )
    reader = max(amounts, key=lambda one: amounts[one])
    others: dict[str, list[str]] = {}
    for name, other in zip(files.names, readers.tolist(), strict=True):
        if other not in (reader, "about"):
            others.setdefault(other, []).append(name)
    chosen = files.pick(np.flatnonzero(readers == reader).astype(np.int64))
    if reader == "read_arrow":
        chosen = _saved(chosen)
    unfinished = _unfinished(urls, files)
    others[""] = [name for name in others.get("", []) if name not in unfinished]
    return GivenFiles(
        tuple(urls), reader, chosen, {k: v for k, v in others.items() if v}, tuple(unfinished)
    )


def _place(reader: str) -> int:
    from trainpipes.sources.files.formats import READERS

    return [*READERS, "", "about"].index(reader)


def _none() -> FileList:
    empty = np.empty(0, dtype=np.int64)
    return FileList([], [], empty, empty, (), [])


def _is_memmap(url: str) -> bool:
    """Whether a folder is one of ``write_memmap``, or holds nothing but such folders."""

    def one(folder: str) -> bool:
        names = os.listdir(folder) if os.path.isfile(os.path.join(folder, "manifest.json")) else []
        return any(name.endswith(".npy") for name in names)

    if not os.path.isdir(url):
        return False
    inner = [entry.path for entry in os.scandir(url) if not hidden(entry.name)]
    return one(url) or (bool(inner) and all(os.path.isdir(path) and one(path) for path in inner))


def _saved(files: FileList) -> FileList:
    """Of the files of ``save_to_disk`` those that are data."""
    try:
        return saved_files(files, None, "read_arrow()")
    except ConfigError as error:
        folders = sorted({name.rpartition("/")[0] for name in files.names})
        raise ConfigError(
            f"there are several splits, and one is looked at at a time, got {', '.join(folders)}: give one "
            "of these folders"
        ) from error


def _unfinished(urls: Sequence[str], files: FileList) -> list[str]:
    """What in the files' folders looks as if it were still being written; of this machine only."""
    found = [name for name in files.names if name.lower().endswith(UNFINISHED)]
    folders = dict.fromkeys(os.path.abspath(url) for url in urls if os.path.isdir(url))
    for file, path in enumerate(files.paths):
        if is_local(files.system(file)):
            folders.setdefault(os.path.dirname(path))
    for folder in list(folders)[:MOST_FOLDERS]:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        found += [
            os.path.join(folder, name)
            for name in names
            if name in WRITING or (hidden(name) and name.lower().endswith(UNFINISHED))
        ]
    return list(dict.fromkeys(found))
