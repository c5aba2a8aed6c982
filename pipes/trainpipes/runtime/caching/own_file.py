"""Files that only their owner may write: made beside their place and renamed, opened without following links.

What another user owns, or may have changed, is not used. The folder of a cache may itself be a link of
its user's; nothing in it may. Where the system knows no owners, all files are one's own.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from trainpipes.cache import PART, PART_AGE, owner
from trainpipes.runtime.warn_once import warn_once

__all__ = ["NotOwnError", "in_folder", "make_file", "open_file"]

Made = TypeVar("Made")

#: Times that a folder is made anew which others have removed, as ``trainpipes.cache.clear()`` does.
ATTEMPTS = 10
#: What a rename may fail with and then succeed, how often it is tried, and seconds before the second time.
PASSING = {
    getattr(errno, name)
    for name in ("EAGAIN", "EBUSY", "EINTR", "ESTALE", "ETXTBSY")
    if hasattr(errno, name)
}
RENAMES, PAUSE = 4, 0.01
#: The mode bits that let others write.
OTHERS = stat.S_IWGRP | stat.S_IWOTH
#: Names of parts that ``make_file`` makes.
OUR_PART = re.compile(r".+\.\d+\.[0-9a-f]{8}" + re.escape(PART))
#: The folders that entries are spread over.
SPREAD = re.compile("[0-9a-f]{2}")

_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_swept: set[str] = set()


class NotOwnError(PermissionError):
    """A file or folder that is another user's, or that others may have changed."""


def open_file(path: str | os.PathLike[str], *, own: bool = True, flags: int = 0) -> int:
    """A handle of a plain file, to read it unless ``flags`` say more.

    Args:
        path: the file.
        own: whether it must be one's own, and no link; else it is a file that the user named.
        flags: more flags of ``os.open``; a file that is made has mode 0600.

    Raises:
        NotOwnError: it is another user's.
        OSError: it is not there, is no plain file, may have been changed by others, or cannot be opened.
    """
    wait = getattr(os, "O_NONBLOCK", 0)  # a pipe in its place would wait for a writer
    handle = os.open(path, flags | _BINARY | wait | (_NO_LINK if own else 0), 0o600)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a file", os.fspath(path))
        if own and owner() is not None:
            if found.st_uid != owner():
                raise NotOwnError(errno.EPERM, f"user {found.st_uid} owns it", os.fspath(path))
            if found.st_mode & OTHERS and not flags & os.O_CREAT:
                raise OSError(errno.EPERM, "other users may have changed it", os.fspath(path))
    except BaseException:
        os.close(handle)
        raise
    return handle


def in_folder(path: str | Path, make: Callable[[], Made], *, own: bool = True) -> Made:
    """Make a file of this path, and first the folder that it is in, of mode 0700.

    Raises:
        NotOwnError: the folder is another user's, or a link.
        OSError: the folder cannot be made, or the file.
    """
    for attempt in range(ATTEMPTS + 1):
        try:
            if own:
                _make_own_folders(Path(path))
            else:
                _make_folder(os.path.dirname(path))
            return make()
        except (FileNotFoundError, FileExistsError):  # gone between two steps of it
            if attempt == ATTEMPTS:
                raise
    raise AssertionError


def _make_folder(folder: str) -> None:
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder)
    if above and above != folder:
        _make_folder(above)
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not os.path.isdir(folder):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)


def _make_own_folders(path: Path) -> None:
    """The folders of a cache in which a file lies: one's own, and no links."""
    ours = [path.parent]
    if SPREAD.fullmatch(path.parent.name):
        ours.insert(0, path.parent.parent)
    root = ours[0].parent
    _make_folder(str(root))
    found = os.lstat(root)
    if stat.S_ISLNK(found.st_mode) and owner() is not None and found.st_uid not in (owner(), 0):
        raise NotOwnError(errno.EPERM, f"{root} is a link of user {found.st_uid}", str(root))
    for folder in ours:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode):
            raise NotOwnError(errno.ENOTDIR, f"{folder} is no folder, or a link", str(folder))
        if owner() is None:
            continue
        if found.st_uid != owner():
            raise NotOwnError(errno.EPERM, f"user {found.st_uid} owns {folder}", str(folder))
        if found.st_mode & OTHERS:
            os.chmod(folder, 0o700)


def make_file(path: Path, fill: Callable[[int], None], *, own: bool = True) -> None:
    """Make a file beside its place and rename it there: of two makers the last one wins.

    Args:
        path: the file.
        fill: writes it, to this handle.
        own: whether it has mode 0600, in a folder that must be one's own; else that of other new files.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    if own:
        in_folder(path, lambda: _sweep(path.parent))
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY | _NO_LINK
    for attempt in range(ATTEMPTS + 1):
        beside = path.with_name(f"{path.stem}.{os.getpid()}.{secrets.token_hex(4)}{PART}")
        opened = partial(os.open, beside, flags, 0o600 if own else 0o666)
        handle = in_folder(path, opened, own=own)
        try:
            try:
                fill(handle)
                found = os.fstat(handle)
            finally:
                os.close(handle)
            if own and owner() is not None and found.st_mode & OTHERS:
                _warn_of_modes(path)
            _rename(beside, path)
            return
        except BaseException as error:
            gone = isinstance(error, FileNotFoundError) and error.filename == str(beside)
            with suppress(OSError):
                os.unlink(beside)
            if not gone or attempt == ATTEMPTS:
                raise


def _warn_of_modes(path: Path) -> None:
    warn_once(
        f"{path.parent} is on a file system that lets all users write all files, so that nothing kept there "
        "is used; name another folder by TRAINPIPES_CACHE or cache(path=...)",
        ("modes", str(path.parents[1])),
    )


def _rename(beside: Path, path: Path) -> None:
    for attempt in range(RENAMES):
        try:
            os.replace(beside, path)
            return
        except OSError as error:
            if path.is_dir() and not path.is_symlink():
                os.rmdir(path)  # only if it is empty
            elif error.errno not in PASSING or attempt == RENAMES - 1:
                raise
            time.sleep(PAUSE * 2**attempt)
    os.replace(beside, path)


def _sweep(folder: Path) -> None:
    """Remove, once in each process, what processes that were killed have left in a folder."""
    if str(folder) in _swept:
        return
    _swept.add(str(folder))
    with suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            if OUR_PART.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > PART_AGE:
                        os.unlink(entry.path)
