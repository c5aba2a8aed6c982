"""What is kept on this machine from run to run: the rows of ``cache()`` and the layouts of files.

All of it can be removed at any time. The folder is that of the environment variable ``TRAINPIPES_CACHE``,
else ``~/.cache/trainpipes`` on Linux; ``TRAINPIPES_CACHE=off`` keeps nothing.

>>> import tempfile, trainpipes as tp
>>> print(tp.cache.info(tempfile.mkdtemp()))  # doctest: +ELLIPSIS
/...: 0 blocks of rows (0 bytes), 0 footer indexes (0 bytes), 0 remote chunks (0 bytes)
"""

from __future__ import annotations

import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainpipes._internal.checks import local_path, require
from trainpipes.errors import ConfigError

__all__ = ["CacheInfo", "clear", "folder", "info"]

VARIABLE = "TRAINPIPES_CACHE"
#: What the variable may say instead of a folder.
OFF = ("off", "0", "no", "false", "none", "disabled")
ROWS, FOOTERS, SCHEMAS, BYTES = "rows", "footers", "schemas", "bytes"
#: Ends of names: of an entry, of a chunk of a remote file, of an unfinished file, of locks, and of counters.
SUFFIX, CHUNK, PART, LOCK, USED = ".arrow", ".chunk", ".part", ".lock", ".used"
#: Seconds after which a part that nobody renamed was left by a process that ended.
PART_AGE = 600.0
_OUR_PART = re.compile(r".+\.\d+\.[0-9a-f]{8}" + re.escape(PART))
#: Names of entries and of their locks, which are digests, and of a folder's lock and counter.
_OURS = re.compile(r"[0-9a-f]{30,}(-\d+)?\.(arrow|chunk|lock)|room\.(lock|used)")


@dataclass(frozen=True)
class CacheInfo:
    """How much the cache on disk holds.

    Attributes:
        folder: where; None if nothing is to be kept.
        blocks, block_bytes: entries with rows, each a row group or a part of a large row group.
        indexes, index_bytes: layouts of files, each of a data set.
        chunks, chunk_bytes: parts of remote files, of ``list_files(cache_dir=...)``.
    """

    folder: Path | None
    blocks: int = 0
    block_bytes: int = 0
    indexes: int = 0
    index_bytes: int = 0
    chunks: int = 0
    chunk_bytes: int = 0

    def __str__(self) -> str:
        where = "off" if self.folder is None else str(self.folder)
        return (
            f"{where}: {self.blocks:,} blocks of rows ({self.block_bytes:,} bytes), "
            f"{self.indexes:,} footer indexes ({self.index_bytes:,} bytes), "
            f"{self.chunks:,} remote chunks ({self.chunk_bytes:,} bytes)"
        )


def folder(path: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder for caches; None where ``TRAINPIPES_CACHE`` says that nothing is kept.

    Args:
        path: a folder of the user's choice; by default that of this machine.

    Raises:
        ConfigError: the variable names no folder of this machine.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named.lower() in OFF:
        return None
    chosen = local_path(path, "the folder for caches") if path is not None else named
    if not chosen:
        return _users()
    rule = "a folder of this machine, since its files are memory-mapped"
    require("://" not in chosen, VARIABLE, rule, chosen, f"name another, or set it to {OFF[0]!r}")
    try:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    except OSError as error:
        raise ConfigError(
            f"the folder for caches {chosen!r} is below the working folder, which is gone; "
            f"name one that starts with '/' by {VARIABLE} or cache(path=...)"
        ) from error


def _users() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if sys.platform == "darwin":
        caches = "~/Library/Caches"
    caches = caches if os.path.isabs(caches) or caches[:1] == "~" else "~/.cache"
    caches = os.path.expanduser(caches)
    if not os.path.isabs(caches):  # nobody's home, as in some containers
        return Path(tempfile.gettempdir()) / f"trainpipes-{os.getuid()}"
    return Path(caches) / "trainpipes"


def owner() -> int | None:
    """The user that this process makes files as; None where files have no owners."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def path_of(root: Path, kind: str, digest: str) -> Path:
    if kind in (ROWS, BYTES):  # many: they are spread over folders
        end = SUFFIX if kind == ROWS else CHUNK
        return root / kind / digest[:2] / f"{digest[2:]}{end}"
    return root / kind / f"{digest}{SUFFIX}"


def info(path: str | os.PathLike[str] | None = None) -> CacheInfo:
    """How much is kept, in the folder of this machine or in ``path``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as empty:
    ...     info(empty).blocks, clear(empty).blocks
    (0, 0)
    """
    root = folder(path)
    if root is None:
        return CacheInfo(None)
    kinds = (ROWS, FOOTERS, BYTES)
    sizes = [[size for _, size, _ in _entries(root / kind)] for kind in kinds]
    return CacheInfo(root, *(count for each in sizes for count in (len(each), sum(each))))


def clear(path: str | os.PathLike[str] | None = None) -> CacheInfo:
    """Remove all that is kept, in the folder of this machine or in ``path``, and say how much it was.

    Only files that a cache made are removed; others may read and write meanwhile.
    """
    summary = info(path)
    for kind in (ROWS, FOOTERS, SCHEMAS, BYTES):
        for below in () if summary.folder is None else _folders(summary.folder / kind):
            for name in _files(below):
                with suppress(FileNotFoundError):
                    os.unlink(name)
            remove_leftovers(below)
    return summary


def make_room(root: Path, most: int, kind: str) -> int:
    """Remove leftovers, and entries used least recently until ``most`` bytes are left."""
    for below in _folders(root / kind):
        remove_leftovers(below)
    entries = sorted(_entries(root / kind), key=lambda entry: (entry[2], entry[0]))
    total = sum(size for _, size, _ in entries)
    for name, size, _ in entries:
        if total <= most:
            break
        with suppress(OSError):
            os.unlink(name)
        total -= size
    return total


def remove_leftovers(below: str | os.PathLike[str], stem: str | None = None) -> int:
    """Remove the parts that killed processes have left in a folder, of all files or of one; how many entries
    were looked at.
    """
    seen = 0
    with suppress(OSError), os.scandir(below) as entries:
        for seen, entry in enumerate(entries, 1):  # noqa: B007
            if not entry.name.endswith(PART):
                continue
            ours = stem in (None, entry.name.rsplit(".", 3)[0])
            if ours and _OUR_PART.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > PART_AGE:
                        os.unlink(entry.path)
    return seen


def _entries(below: Path) -> Iterator[tuple[str, int, int]]:
    for name in (name for place in _folders(below) for name in _files(place)):
        if name.endswith((SUFFIX, CHUNK)):
            with suppress(OSError):
                status = os.lstat(name)
                yield name, status.st_size, status.st_atime_ns


def _files(folder: str) -> list[str]:
    """The files of a folder that a cache made."""
    with suppress(OSError), os.scandir(folder) as entries:
        ours = (entry for entry in entries if _OURS.fullmatch(entry.name))
        return [entry.path for entry in ours if entry.is_file(follow_symlinks=False)]
    return []


def _folders(below: Path) -> list[str]:
    """A folder and its subfolders: owned by this user, and no links."""
    with suppress(OSError):
        about = os.lstat(below)
        if stat.S_ISDIR(about.st_mode) and owner() in (None, about.st_uid):
            return [place for place, _, _ in os.walk(below)]
    return []


def __dir__() -> list[str]:
    return __all__
