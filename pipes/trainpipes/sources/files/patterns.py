"""Patterns of paths, names of files that are not data, and folders that trainpipes has written."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from trainpipes.errors import ConfigError

log = logging.getLogger("trainpipes")

#: Of a folder that is written: what appears last, the folder of what is not finished, and names of its files.
MANIFEST, WORK = "_manifest.json", "_unfinished"
OURS = re.compile(r"part-\d{5,}\.[\w.]+")


class Told(NamedTuple):
    """What a listing says of a file: bytes, None where that is not known; time of change or etag, ""
    where neither is known; and on this machine its inode."""

    size: int | None
    stamp: str
    inode: int = 0


#: Files by path.
Found = dict[str, Told]


def hidden(name: str) -> bool:
    """Whether the name of a file or folder says that it is not data: ``.cache``, ``_SUCCESS``,
    ``_delta_log``; not ``_lang=en``, which is a partition."""
    return (
        name.startswith(".") or (name.startswith("_") and "=" not in name) or name == "lost+found"
    )


def check_outputs(folder: str, files: Iterable[str], is_there: Callable[[str], bool]) -> None:
    """Look for output of trainpipes among the files that a folder stands for.

    What is not finished is logged. Output below other files was mostly made of them, so that their rows would
    come twice.

    Args:
        folder: its path.
        files: their paths.
        is_there: whether there is a file or folder of a path.

    Raises:
        ConfigError: there is output below the folder, and other files too.
    """
    counts: dict[str, int] = {}
    written: dict[str, int] = {}
    for file in files:
        place, _, name = file.rpartition("/")
        counts[place] = counts.get(place, 0) + 1
        if OURS.fullmatch(name):
            written[place] = written.get(place, 0) + 1
    unfinished = {place for place in written if is_there(f"{place}/{WORK}")}
    outputs = {place for place in written if place in unfinished or is_there(f"{place}/{MANIFEST}")}
    inner = sorted(outputs - {folder.rstrip("/")})
    if inner and outputs < counts.keys() and folder.rstrip("/") not in outputs:
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
    """The characters that make a pattern of a path."""
    return "*" if path.startswith(("http://", "https://")) else "*?["


def has_magic(path: str) -> bool:
    return any(c in path for c in wild(path))


def fixed_root(path: str) -> tuple[list[str], list[str]]:
    """The parts of a pattern before the first that is one, and the rest."""
    parts = path.strip("/").split("/")
    first = next(n for n, part in enumerate(parts) if has_magic(part))
    return parts[:first], parts[first:]


def stands_for(path: str, is_folder: bool, suffixes: Sequence[str], file: str) -> bool:
    """Whether a file would be listed for a folder or a pattern, if it were there.

    Args:
        path: of the folder, or the pattern.
        is_folder: whether it is a folder.
        suffixes: what the names of files found in folders end with, in lower case.
        file: its path.

    >>> names = ["d/a.txt", "d/out/a.txt", "d/out.txt/a.txt"]
    >>> [stands_for("d/*.txt", False, [".txt"], name) for name in names]
    [True, False, True]
    """
    own, root = file.strip("/").split("/"), path.strip("/").split("/")
    parts: list[str] = []
    if not is_folder:
        root, parts = fixed_root(path)
    root = [part for part in root if part]
    inner = own[len(root) :]
    if own[: len(root)] != root or not inner:
        return False
    if parts and _matches(inner, parts):
        return True
    if not file.lower().endswith(tuple(suffixes)) or parts[-1:] == ["**"]:
        return False
    folders = range(1, len(inner)) if parts else [0]
    return any(
        (not parts or _matches(inner[:n], parts)) and not any(map(hidden, inner[n:]))
        for n in folders
    )


def _matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether the names of folders and of a file match a pattern, part by part."""
    if not parts or not names:
        return not parts and not names
    part, rest = parts[0], parts[1:]
    if part == "**":
        if rest and _matches(names, rest):
            return True
        if hidden(names[0]):
            return False
        return _matches(names[1:], parts) or (not rest and len(names) == 1)
    if not has_magic(part):
        return names[0] == part and _matches(names[1:], rest)
    if not fnmatchcase(names[0], part) or (hidden(names[0]) and part[0] not in "._"):
        return False
    return _matches(names[1:], rest)
