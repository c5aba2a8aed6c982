"""Which files of a folder are meant, and the entries of folders, here and in stores.

Stores are asked by ``info``, ``ls`` and ``find``: fsspec's ``glob`` and walking ``find`` skip errors
silently.
"""

from __future__ import annotations

import errno
import glob
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import PurePath
from typing import Any, NamedTuple

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.cached import CachingFileSystem

from trainpipes import errors
from trainpipes._internal.checks import refuse_special
from trainpipes._internal.locks import cached_property
from trainpipes._internal.messages import nearest
from trainpipes._internal.progress import Progress
from trainpipes.filesystems.places import MANIFEST, OURS, WORK
from trainpipes.filesystems.retry import Requests
from trainpipes.filesystems.systems import is_local

log = logging.getLogger("trainpipes")

#: What the log of a Delta table is called, and how an Iceberg table's descriptions end.
DELTA_LOG, METADATA = "_delta_log", ".metadata.json"
#: Of URLs in which "?" begins a query.
HTTP = ("http://", "https://")
#: Where a name is that is below a folder that is meant as a whole.
BELOW = -1
#: How names of pictures, videos and sounds end. Those of cameras may begin with "_".
IMAGES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".avif", ".bmp", ".tif", ".tiff", ".ppm",
    ".pgm", ".jp2",
)  # fmt: skip
VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".gif")
MEDIA = (*IMAGES, *VIDEOS, ".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac", ".aiff")
#: How the path of a file ends that ``cache()`` keeps rows in.
KEPT_ROWS = re.compile(r"/(rows/[0-9a-f]{2}/[0-9a-f]{62}|schemas/[0-9a-f]{64})\.arrow$")
#: Folders that hold none, though their names begin as those of classes may.
NO_CLASSES = (MANIFEST, WORK, DELTA_LOG, "__MACOSX")


def hidden(name: str, among_media: bool = False) -> bool:
    """Whether a name says that it is no data: ``.cache``, ``_SUCCESS``; not the partition ``_lang=en``, nor
    a picture ``_DSC1.jpg``, nor a folder ``_other`` of such files.
    """
    if name[:1] != "_":
        return name[:1] == "." or name == "lost+found"
    data = "=" in name or name.lower().endswith(MEDIA)
    return not data and (not among_media or name in NO_CLASSES)


def check_outputs(tree: Folders, folder: str, files: Iterable[str], marks: Collection[str]) -> None:
    placed = [file.rpartition("/") for file in files]
    counts = {place for place, _, _ in placed}
    written = Counter(place for place, _, name in placed if OURS.fullmatch(name))
    finished = {place for place in written if f"{place}/{MANIFEST}" in marks}
    unfinished = {place for place in written if f"{place}/{WORK}" in marks} - finished
    outputs = unfinished | finished
    inner = sorted(outputs - {folder.rstrip("/")})
    if inner and outputs < counts and folder.rstrip("/") not in outputs:
        above, below = map(tree.address, (folder, inner[0]))
        raise errors.ConfigError(
            f"list_files: below the folder {above} are files, and output of trainpipes in {below}: list the "
            "one that is meant, such as the files by a glob, or both in a list",
            path=above,
        )
    for place in sorted(unfinished):
        log.warning(
            "%s is not finished: %d files are there so far; its writer is at work, or was killed and makes "
            "the rest when it is called again",
            errors.hidden(tree.address(place)),
            written[place],
        )


def check_tables(tree: Folders, files: Sequence[str], marks: Iterable[str]) -> None:
    """Raise ConfigError for the folder of a table with versions, some of whose files hold older rows."""
    for mark in sorted(marks):
        folder, _, name = mark.rpartition("/")
        is_delta, table = name == DELTA_LOG, folder.removesuffix("/metadata")
        data = f"{folder}/" if is_delta else f"{table}/data/"
        if name in (MANIFEST, WORK) or not any(file.startswith(data) for file in files):
            continue
        table = tree.address(folder if is_delta else table)
        kind, reader = ("a Delta table", "delta") if is_delta else ("an Iceberg table", "iceberg")
        raise errors.ConfigError(
            f"list_files: {table} is the folder of {kind}, where files may hold rows that were deleted or "
            f"replaced: take read_{reader}(); or, for all that is in the files, a glob of their names, such "
            f"as {table + '/**/*.parquet'!r}",
            path=table,
        )


def wild(path: str) -> str:
    return "*" if path.startswith(HTTP) else "*?["


@lru_cache
def has_magic(path: str) -> bool:
    named = path.partition("?")[0] if path.startswith(HTTP) else path  # a query is no pattern
    return any(c in named for c in wild(path))


def names_in(path: str) -> list[str]:
    path = path.strip("/")
    return path.split("/") if path else []


@dataclass(frozen=True)
class Wanted:
    """The files of a folder (without ``parts``) or a pattern, by the parts matched so far.

    >>> pattern = Wanted("d", ("*.txt",), (".txt",))
    >>> [pattern.stands_for(path) for path in ("d/a.txt", "d/out/a.txt", "d/out.txt/a.txt")]
    [True, False, True]
    >>> [Wanted("d", (), (end,)).stands_for("d/_x/_1.jpg") for end in (".jpg", "")]
    [True, False]
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
                steps |= {n + 1} if _fits(name, part, self._of_media) else set()
            elif not hidden(name, self._of_media):
                steps |= {BELOW} if part is None else {n, n + 1}
        return self._without_folders(steps)

    @cached_property
    def _of_media(self) -> bool:
        """Whether all files that are wanted are pictures, videos or sounds."""
        by_name = bool(self.parts) and self.parts[-1].lower().endswith(MEDIA)
        return by_name or (bool(self.suffixes) and all(e.endswith(MEDIA) for e in self.suffixes))

    def _without_folders(self, reached: set[int]) -> frozenset[int]:
        """Also the part after a ``**``, which may stand for no folder."""
        for n, part in enumerate(self.parts[:-1]):
            if n in reached and part == "**":
                reached.add(n + 1)
        return frozenset(reached)

    def is_whole(self, reached: frozenset[int]) -> bool:
        return len(self.parts) in reached and self.parts[-1:] != ("**",)

    def all_below(self, reached: frozenset[int]) -> bool:
        return any(n in (BELOW, len(self.parts)) or self.parts[n] == "**" for n in reached)

    def holds(self, reached: frozenset[int], path: str) -> bool:
        if KEPT_ROWS.search(path):
            return False
        matched = len(self.parts) in reached and _fits(path.rpartition("/")[2], self.parts[-1])
        return matched or (BELOW in reached and path.lower().endswith(self.suffixes))

    def stands_for(self, path: str) -> bool:
        names, root = names_in(path), names_in(self.root)
        if names[: len(root)] != root or len(names) == len(root):
            return False
        reached = self.start()
        for name in names[len(root) :]:
            reached = self.after(reached, name)
        return self.holds(reached, path)


def _fits(name: str, part: str, among_media: bool = False) -> bool:
    if not has_magic(part):
        return name == part
    return fnmatchcase(name, part) and (part[0] in "._" or not hidden(name, among_media))


#: Requests to a store at once.
MAX_THREADS = 16
#: Keys of a store's listing that identify a file's content; and others that change when the file does.
TAGS = ("ETag", "etag", "e_tag", "md5Hash", "content_md5", "blob_id", "sha256", "oid", "sha")
STAMPS = (
    *TAGS, "LastModified", "last_modified", "Last-Modified", "mtime", "modified", "updated",
)  # fmt: skip


class Reported(NamedTuple):
    """A listed file: bytes or None; time of change, etag or ""; the inode of a local file."""

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
    address = staticmethod(str)  # what a path is called in messages

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
            raise errors.MissingFilesError(
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
        #: Others have a single connection, for one request at a time.
        self.many = MAX_THREADS if system.async_impl else 1

    def address(self, path: str) -> str:
        return str(self._system.unstrip_protocol(path))

    def look_up(self, path: str) -> Entry | None:
        if has_magic(path):
            return None
        info = self._requests.call(self._system, "info", path)
        if info["type"] == "directory":
            return Entry(path, True)
        return Entry(info.get("name", path), False, info)

    def entries(self, folder: str, all_below: bool = False) -> list[Entry]:
        """The entries of a folder; the files at all levels below if all are wanted, and are had at once."""
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
    # Consoles of stores make a folder by an object of no bytes whose name ends in "/".
    is_folder = info["type"] == "directory" or info["name"].endswith("/")
    return Entry(info["name"].rstrip("/") if is_folder else info["name"], is_folder, info)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, which whoever reads it says
        return False


def _leads_back(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a link to a folder above it, perhaps by way of other links."""
    if not entry.is_symlink() or not _is_folder(entry):
        return False
    target = os.path.realpath(entry.path)
    above = map(os.path.realpath, PurePath(entry.path).parents)
    return any(os.path.commonpath([target, folder]) == target for folder in above)


Folders = LocalFolders | StoreFolders
#: Names shown of a folder that lacks the files asked for.
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
) -> tuple[Found, Wanted | None]:
    """A path's, folder's, glob's or URL's files in natural order, and the rule that found them, if any."""
    system, path = opened
    tree = LocalFolders() if is_local(system) else StoreFolders(system, requests)
    files: Found = {}
    wanted = None

    def ask(name: str) -> None:
        with suppress(FileNotFoundError):  # whoever reads it says so
            files[name] = reported(requests.call(system, "info", name))

    try:
        is_page = url.startswith(HTTP) and url.endswith("/")  # of links, which servers call a file
        there = Entry(path, True) if is_page else tree.look_up(path)
        known = dict[str, list[Entry]]()
        if there is None:
            there, known = _by_exact_name(tree, path)
        if there is None:
            first = min(path.index(c) for c in wild(path) if c in path)
            cut = path.rfind("/", 0, first) + 1
            parts = tuple(path[cut:].split("/"))
            wanted = Wanted(system._strip_protocol(path[:cut]), parts, suffixes)
        elif there.is_folder:
            wanted = Wanted(path, (), suffixes)
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
        raise _nothing(url, path, suffixes, tree)
    return {name: files[name] for name in sorted(files, key=natural)}, wanted


def by_exact_name(opened: tuple[Any, str], requests: Requests) -> Found:
    """A file whose name is no pattern; raises FileNotFoundError."""
    system, path = opened
    if is_local(system):
        return {path: LocalFolders().reported(Entry(path, False))}
    return {path: reported(requests.call(system, "info", path))}


def _by_exact_name(tree: Folders, path: str) -> tuple[Entry | None, dict[str, list[Entry]]]:
    """What is there by the very name of a pattern; and the folder in which it was looked for. Not where
    ``*`` names that folder.
    """
    folder, _, name = path.rpartition("/")
    if isinstance(tree, LocalFolders) or "*" in folder or "**" in name:
        return None, {}
    try:
        inside = tree.entries(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None, {}
    there = next((entry for entry in inside if entry.path == path), None)
    return there, {} if there is not None else {folder: inside}


def _walk(
    tree: Folders, wanted: Wanted, requests: Requests, known: dict[str, list[Entry]]
) -> Found:
    listed: Found = {}
    marks: set[str] = set()
    in_whole: dict[str, list[str]] = {}  # files by the folder that was named or matched
    level: list[tuple[str, frozenset[int], str | None]] = [(wanted.root, wanted.start(), None)]

    def entries(step: tuple[str, frozenset[int], str | None]) -> list[Entry]:
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
                above = len(names_in(step[0]))
                for entry in inside:
                    place, reached, whole = step
                    names = names_in(entry.path)[
                        above:
                    ]  # none where a file is listed as its own folder
                    for left, name in zip(range(len(names))[::-1], names, strict=True):
                        whole = place if whole is None and wanted.is_whole(reached) else whole
                        place = entry.path.rsplit("/", left)[0]
                        reached = wanted.after(reached, name)
                        of_table = name == DELTA_LOG or name.endswith(METADATA)
                        if name in (MANIFEST, WORK) or (of_table and whole is not None):
                            marks.add(place)
                    if entry.is_folder and reached and names:
                        below.append((entry.path, reached, whole))
                    elif not entry.is_folder and names and wanted.holds(reached, entry.path):
                        try:
                            listed[entry.path] = tree.reported(entry)
                        except errors.MissingFilesError:  # a link to nothing
                            raise
                        except FileNotFoundError:
                            continue  # gone meanwhile, as when another program renames it
                        if whole is not None:
                            in_whole.setdefault(whole, []).append(entry.path)
            progress.advance(len(listed) - so_far)
            level = below
    for folder, files in in_whole.items():
        check_tables(tree, files, marks)
        check_outputs(tree, folder, files, marks)
    manifests = [mark for mark in marks if mark.endswith(f"/{MANIFEST}")]
    _check_manifests(tree, wanted, listed, manifests)
    return listed


def _check_manifests(tree: Folders, wanted: Wanted, files: Found, manifests: Sequence[str]) -> None:
    """Raise MissingFilesError if a writer's manifest names files that are wanted, and not there;
    UnreadableError if one is shorter than it was written.
    """
    for manifest in sorted(manifests):
        folder = manifest.rpartition("/")[0]
        named = {f"{folder}/{name}": size for name, size in _named_in(tree, manifest).items()}
        gone = [path for path in named if path not in files and wanted.stands_for(path)]
        short = [path for path in named if path in files and _is_short(files[path], named[path])]
        for odd, how in ((gone, "not there"), (short, "shorter than they were written")):
            if not odd:
                continue
            names = ", ".join(path.rpartition("/")[2] for path in odd[:SHOWN])
            names += f" and {len(odd) - SHOWN:,} more" if len(odd) > SHOWN else ""
            said = (
                f"{len(odd):,} of the {len(named):,} files that {MANIFEST} names are {how}: {names}"
            )
            way = f"write all anew with overwrite=True. To read what is there, remove {MANIFEST}"
            said = f"{tree.address(folder)}: {said}; copy them again, or {way}"
            kind = errors.MissingFilesError if odd is gone else errors.UnreadableError
            raise kind(said, path=tree.address(odd[0]))


def _is_short(file: Reported, written: Any) -> bool:
    return isinstance(written, int) and file.size is not None and file.size < written


def _named_in(tree: Folders, manifest: str) -> dict[str, Any]:
    """The files that a manifest names, with their bytes; none if it is no writer's, or has just been
    removed.
    """
    known = FileNotFoundError, IsADirectoryError, PermissionError, ValueError, KeyError
    with suppress(*known, AttributeError, TypeError):
        about = json.loads(tree.content(manifest))
        if "trainpipes_files" in about:
            return {entry["file"]: entry.get("bytes") for entry in about["files"]}
    return {}


# What to say


def _unlistable(url: str, error: Exception) -> errors.UnreadableError:
    cure = "credentials given (environment, or storage_options={...})?"
    said = f"{url} cannot be listed: {type(error).__name__}: {error}; is the address right, and are"
    if isinstance(error, PermissionError):
        url = str(getattr(error, "filename", None) or url)
        said = f"permission to list {url} is denied ({error}): change it; or are"
    return errors.UnreadableError(f"{said} {cure}", path=url)


def _nothing(
    url: str, path: str, suffixes: Sequence[str], tree: Folders
) -> errors.MissingFilesError:
    folder, names = _nearest_folder(tree, path)
    more = f", … ({len(names):,} in all)" if len(names) > SHOWN else ""
    shown = ", ".join(names[:SHOWN]) + more
    if folder == path:
        # Those of compressed files need no mention of their own.
        suffixes = tuple(dict.fromkeys(suffixes))
        packed = tuple(f"{suffix}." for suffix in suffixes)
        plain = [end for end in suffixes if not end.startswith(packed)]
        either = " or ".join(", ".join(plain).rsplit(", ", 1))
        ends = f" that ends in {either}" if any(plain) else ""
        ends += ", compressed or not," if len(plain) < len(suffixes) else ""
        there = (
            f"there are: {shown}. Name others by list_files(folder, suffix=...), or a glob such as "
        )
        there += f"'{url.rstrip('/')}/*'"
        there = there if names else "it is empty"
        said = f"no file{ends} in the folder {url!r} or below it; {there}"
        return errors.MissingFilesError(said, path=url)
    nothing = f"{'no file matches' if has_magic(path) else 'there is no file or folder'} {url!r}"
    if has_magic(path) and "*" not in path:  # it may be meant as a name
        nothing += f", nor has one this very name, which as a pattern is {glob.escape(url)!r}"
    if folder is None:
        return errors.MissingFilesError(f"{nothing}, and nothing above it can be listed", path=url)
    missing = path[len(folder) :].strip("/").split("/")[0]
    hint = "" if has_magic(missing) else nearest(missing, [name.rstrip("/") for name in names])
    where = tree.address(folder)
    return errors.MissingFilesError(
        f"{nothing}{hint}; the nearest folder that exists is {where}, with: {shown or 'nothing'}",
        path=url,
    )


def _nearest_folder(tree: Folders, path: str) -> tuple[str | None, list[str]]:
    folder = path
    while folder:
        if not has_magic(folder):
            try:
                inside = tree.entries(folder)
                names = [names_in(entry.path)[-1] + "/" * entry.is_folder for entry in inside]
                return folder, sorted(names, key=natural)
            except errors.UnreachableError:
                break
            except Exception:
                pass  # not there, no folder, or not ours to list: look above it
        above = folder.rpartition("/")[0]
        folder = above or ("/" if folder != "/" and folder.startswith("/") else "")
    return None, []
