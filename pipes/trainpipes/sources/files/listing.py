from __future__ import annotations

import glob
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from trainpipes import errors
from trainpipes._internal.messages import nearest
from trainpipes._internal.progress import Progress
from trainpipes.filesystems.places import MANIFEST, WORK
from trainpipes.filesystems.retry import Requests
from trainpipes.filesystems.systems import is_local
from trainpipes.sources.files import folders

#: Where folders are looked into.
Folders = folders.LocalFolders | folders.StoreFolders
#: Names shown of a folder that does not hold what was asked for.
SHOWN = 6


def natural(path: str) -> tuple[list[list[str | int]], str]:
    """A sort key: folder by folder, numbers by value.

    >>> sorted(["d/part-10", "d/part-2", "d/a/x"], key=natural)
    ['d/a/x', 'd/part-2', 'd/part-10']
    """
    return [_pieces(name) for name in path.split("/")], path


@lru_cache(1024)  # folders come again with each of their files
def _pieces(name: str) -> list[str | int]:
    return [int(p) if n % 2 else p for n, p in enumerate(re.split("([0-9]+)", name))]


def expand(
    url: str, opened: tuple[Any, str], suffixes: tuple[str, ...], requests: Requests
) -> tuple[folders.Found, folders.Wanted | None]:
    """A path's, folder's, glob's or URL's files in natural order, and the rule that found them, if any."""
    system, path = opened
    tree = folders.LocalFolders() if is_local(system) else folders.StoreFolders(system, requests)
    files: folders.Found = {}
    wanted = None

    def ask(name: str) -> None:
        with suppress(FileNotFoundError):  # whoever reads it says so
            files[name] = folders.reported(requests.call(system, "info", name))

    try:
        there, known = tree.look_up(path), dict[str, list[folders.Entry]]()
        if there is None:
            there, known = _by_exact_name(tree, path)
        if there is None:
            first = min(path.index(c) for c in folders.wild(path) if c in path)
            cut = path.rfind("/", 0, first) + 1
            parts = tuple(path[cut:].split("/"))
            wanted = folders.Wanted(system._strip_protocol(path[:cut]), parts, suffixes)
        elif there.is_folder:
            wanted = folders.Wanted(path, (), suffixes)
        else:
            files = {there.path: tree.reported(there)}
        files = files if wanted is None else _walk(tree, wanted, requests, known)
        unknown = [name for name, report in files.items() if report.size is None]  # of index pages
        requests.map(ask, unknown, tree.many)
    except errors.TrainpipesError:
        raise
    except FileNotFoundError:
        files = {}
    except Exception as error:
        raise _unlistable(url, error) from error
    if not files:
        raise _nothing(url, system, path, suffixes, tree)
    return {name: files[name] for name in sorted(files, key=natural)}, wanted


def by_exact_name(opened: tuple[Any, str], requests: Requests) -> folders.Found:
    """A file whose name is no pattern; raises FileNotFoundError."""
    system, path = opened
    if is_local(system):
        return {path: folders.LocalFolders().reported(folders.Entry(path, False))}
    return {path: folders.reported(requests.call(system, "info", path))}


def _by_exact_name(
    tree: Folders, path: str
) -> tuple[folders.Entry | None, dict[str, list[folders.Entry]]]:
    """What is there by the very name of a pattern; and the folder in which it was looked for. Not where
    ``*`` names that folder.
    """
    folder, _, name = path.rpartition("/")
    if isinstance(tree, folders.LocalFolders) or "*" in folder or "**" in name:
        return None, {}
    try:
        inside = tree.entries(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None, {}
    there = next((entry for entry in inside if entry.path == path), None)
    return there, {} if there is not None else {folder: inside}


def _walk(
    tree: Folders, wanted: folders.Wanted, requests: Requests, known: dict[str, list[folders.Entry]]
) -> folders.Found:
    listed: folders.Found = {}
    marks: set[str] = set()
    in_whole: dict[str, list[str]] = {}  # files by the folder that was named or matched
    level: list[tuple[str, frozenset[int], str | None]] = [(wanted.root, wanted.start(), None)]

    def entries(step: tuple[str, frozenset[int], str | None]) -> list[folders.Entry]:
        folder, reached, _ = step
        if folder in known and not wanted.all_below(reached):
            return known[folder]
        try:
            return tree.entries(folder, wanted.all_below(reached))
        except (FileNotFoundError, NotADirectoryError):
            if folder == wanted.root:
                raise
            return []  # gone meanwhile, or a link to nothing on a web page

    with Progress("listing", None, "files") as progress:
        while level:
            below, so_far = [], len(listed)
            for step, inside in zip(level, requests.map(entries, level, tree.many), strict=True):
                above = len(folders.names_in(step[0]))
                for entry in inside:
                    place, reached, whole = step
                    names = folders.names_in(entry.path)[
                        above:
                    ]  # none if a store lists a file as what is in it
                    for left, name in zip(range(len(names))[::-1], names, strict=True):
                        whole = place if whole is None and wanted.is_whole(reached) else whole
                        place, reached = (
                            entry.path.rsplit("/", left)[0],
                            wanted.after(reached, name),
                        )
                        if name in (MANIFEST, WORK):
                            marks.add(place)
                    if entry.is_folder and reached and names:
                        below.append((entry.path, reached, whole))
                    elif not entry.is_folder and names and wanted.holds(reached, entry.path):
                        listed[entry.path] = tree.reported(entry)
                        if whole is not None:
                            in_whole.setdefault(whole, []).append(entry.path)
            progress.advance(len(listed) - so_far)
            level = below
    for folder, files in in_whole.items():
        folders.check_outputs(folder, files, marks)
    _check_manifests(
        tree, wanted, listed, [mark for mark in marks if mark.endswith(f"/{MANIFEST}")]
    )
    return listed


def _check_manifests(
    tree: Folders, wanted: folders.Wanted, files: folders.Found, manifests: Sequence[str]
) -> None:
    """Raise MissingFilesError if a writer's manifest names files that are wanted, and not there."""
    for manifest in sorted(manifests):
        folder = manifest.rpartition("/")[0]
        named = [f"{folder}/{name}" for name in _named_in(tree, manifest)]
        gone = [path for path in named if path not in files and wanted.stands_for(path)]
        if gone:
            names = ", ".join(path.rpartition("/")[2] for path in gone[:SHOWN])
            more = f" and {len(gone) - SHOWN:,} more" if len(gone) > SHOWN else ""
            raise errors.MissingFilesError(
                f"{folder}: {len(gone):,} of the {len(named):,} files that {MANIFEST} names are not there: "
                f"{names}{more}; copy them again, or write all anew with overwrite=True. To read what is "
                f"there, remove {MANIFEST}",
                path=gone[0],
            )


def _named_in(tree: Folders, manifest: str) -> list[str]:
    """What a manifest names; nothing if it is no writer's, or has just been removed."""
    with suppress(
        FileNotFoundError, IsADirectoryError, PermissionError, ValueError, KeyError, TypeError
    ):
        about = json.loads(tree.content(manifest))
        if "trainpipes_files" in about:
            return [entry["file"] for entry in about["files"]]
    return []


# What to say


def _unlistable(url: str, error: Exception) -> errors.UnreadableError:
    cure = "credentials given (environment, or storage_options={...})?"
    said = f"{url} cannot be listed: {type(error).__name__}: {error}; is the address right, and are"
    if isinstance(error, PermissionError):
        url = str(getattr(error, "filename", None) or url)
        said = f"permission to list {url} is denied ({error}): change it; or are"
    return errors.UnreadableError(f"{said} {cure}", path=url)


def _nothing(
    url: str, system: Any, path: str, suffixes: Sequence[str], tree: Folders
) -> errors.MissingFilesError:
    folder, names = _nearest_folder(tree, path)
    more = f", … ({len(names):,} in all)" if len(names) > SHOWN else ""
    shown = ", ".join(names[:SHOWN]) + more
    if folder == path:
        # Those of compressed files need no mention of their own.
        suffixes = tuple(dict.fromkeys(suffixes))
        packed = tuple(f"{suffix}." for suffix in suffixes)
        plain = [end for end in suffixes if not end.startswith(packed)]
        ends = (
            f" that ends in {' or '.join(', '.join(plain).rsplit(', ', 1))}" if any(plain) else ""
        )
        ends += ", compressed or not," if len(plain) < len(suffixes) else ""
        there = f"there are: {shown}. Name another suffix=, or a glob such as '{url.rstrip('/')}/*'"
        said = (
            f"no file{ends} in the folder {url!r} or below it; {there if names else 'it is empty'}"
        )
        return errors.MissingFilesError(said, path=url)
    what = (
        f"{'no file matches' if folders.has_magic(path) else 'there is no file or folder'} {url!r}"
    )
    if folders.has_magic(path) and "*" not in path:  # it may be meant as a name
        what += f", nor has one this very name, which as a pattern is {glob.escape(url)!r}"
    if folder is None:
        return errors.MissingFilesError(f"{what}, and nothing above it can be listed", path=url)
    missing = path[len(folder) :].strip("/").split("/")[0]
    hint = (
        "" if folders.has_magic(missing) else nearest(missing, [name.rstrip("/") for name in names])
    )
    where = folder if is_local(system) else system.unstrip_protocol(folder)
    return errors.MissingFilesError(
        f"{what}{hint}; the nearest folder that exists is {where}, with: {shown or 'nothing'}",
        path=url,
    )


def _nearest_folder(tree: Folders, path: str) -> tuple[str | None, list[str]]:
    folder = path
    while folder:
        if not folders.has_magic(folder):
            try:
                inside = tree.entries(folder)
                names = [
                    folders.names_in(entry.path)[-1] + "/" * entry.is_folder for entry in inside
                ]
                return folder, sorted(names, key=natural)
            except errors.UnreachableError:
                break
            except Exception:
                pass  # not there, no folder, or not ours to list: look above it
        above = folder.rpartition("/")[0]
        folder = above or ("/" if folder != "/" and folder.startswith("/") else "")
    return None, []
