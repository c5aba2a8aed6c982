"""Files and locks that only their owner may write: made beside their place and renamed, links not followed.

What another user owns, or may have changed, is not used. The folder of a cache may itself be a link of
its user's; nothing in it may. Where the system knows no owners, all files are one's own. Owns nothing; called
by any thread of any process, also while others clear the cache.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from trainpipes._internal.messages import warn_once
from trainpipes.storage.cache import PART, owner, remove_leftovers

try:
    import fcntl
except ImportError:  # not on this system: all may work at the same time
    fcntl = None  # type: ignore[assignment]

#: Seconds in which what others remove, as ``tp.cache.clear()`` does, is made anew, and how often at
#: least.
PATIENCE = 10.0
ATTEMPTS = 10
#: The mode bits that let others write.
OTHERS = stat.S_IWGRP | stat.S_IWOTH

_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class NotOwnError(PermissionError):
    """A file or folder that is another user's, or that others may have changed."""


def open_file(path: str | os.PathLike[str], *, own: bool = True, flags: int = 0) -> int:
    """A handle of a plain file, to read it unless ``flags`` say more.

    Args:
        path: the file.
        own: whether it must be one's own, and no link; else it is a file that the user named.
        flags: more flags of ``os.open``; a file that is made has mode 0600, if it is to be one's own.

    Raises:
        NotOwnError: it is another user's.
        OSError: it is not there, is no plain file, may have been changed by others, or cannot be opened.
    """
    wait = getattr(os, "O_NONBLOCK", 0)  # a pipe in its place would wait for a writer
    mode = 0o600 if own else 0o666
    handle = os.open(path, flags | _BINARY | wait | (_NO_LINK if own else 0), mode)
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


def make_file(path: Path, fill: Callable[[int], None], *, own: bool = True) -> None:
    """Make a file beside its place and rename it there: of two makers the last one wins.

    Args:
        path: the file.
        fill: writes it, to this handle; again, if others remove the file before it has its name.
        own: whether it has mode 0600, in a folder that must be one's own; else that of other new files.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    for again in _attempts():
        beside = path.with_name(f"{path.stem}.{os.getpid()}.{secrets.token_hex(4)}{PART}")
        handle = _new_file(beside, os.O_EXCL, own)
        try:
            try:
                fill(handle)
                if own and owner() is not None and os.fstat(handle).st_mode & OTHERS:
                    warn_once(
                        f"{path.parent} is on a file system that lets all users write all files, so that "
                        "nothing kept there is used; name another folder by TRAINPIPES_CACHE or "
                        "cache(path=...)",
                        ("modes", str(path.parents[1])),
                    )
            finally:
                os.close(handle)
            try:
                os.replace(beside, path)
                break
            except FileNotFoundError:
                if not again:
                    raise
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise
    if own:
        remove_leftovers(path.parent)


def _new_file(path: Path, flags: int, own: bool) -> int:
    """A handle of a file that is made, and first the folder that it is in, of mode 0700.

    Raises:
        NotOwnError: the folder is another user's, or a link.
        OSError: the folder cannot be made, or the file.
    """
    for again in _attempts():
        try:
            if own:
                _make_own_folders(path)
            else:
                os.makedirs(path.parent, 0o700, exist_ok=True)
            return open_file(path, own=own, flags=flags | os.O_RDWR | os.O_CREAT)
        except (FileNotFoundError, FileExistsError) as error:  # gone between two steps of it
            if not again or _stands_in_the_way(error):
                raise
    raise AssertionError


def _stands_in_the_way(error: OSError) -> bool:
    """Whether something that is no folder is where one should be made: waiting does not help."""
    there = error.filename
    return (
        isinstance(error, FileExistsError) and os.path.lexists(there) and not os.path.isdir(there)
    )


def _attempts() -> Iterator[bool]:
    """One for each attempt: whether there is another one."""
    end = time.monotonic() + PATIENCE
    for attempt in count():
        again = attempt < ATTEMPTS or time.monotonic() < end
        yield again
        if not again:
            break


def _make_own_folders(path: Path) -> None:
    """The folders of a cache in which a file lies: one's own, and no links."""
    ours = [path.parent]
    if len(path.parent.name) == 2:  # one of those that entries are spread over
        ours.insert(0, path.parent.parent)
    root = ours[0].parent
    os.makedirs(root, 0o700, exist_ok=True)
    found = os.lstat(root)
    if stat.S_ISLNK(found.st_mode) and owner() is not None and found.st_uid not in (owner(), 0):
        raise NotOwnError(errno.EPERM, f"{root} is a link of user {found.st_uid}", str(root))
    for folder in ours:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode):
            raise NotOwnError(errno.ENOTDIR, f"{folder} is no folder, or a link", str(folder))
        if owner() is not None:
            if found.st_uid != owner():
                raise NotOwnError(errno.EPERM, f"user {found.st_uid} owns {folder}", str(folder))
            if found.st_mode & OTHERS:
                os.chmod(folder, 0o700)


def _is_at(handle: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


class FileLock:
    """Keeps other threads and processes of this machine from making what its holder makes.

    It dies with its holder. It only saves work: nothing depends on it, so that a file system without locks
    grants it to all.

    Args:
        path: a file of its own; made, and removed at the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None
        self._beaten = -1e9

    def take(self) -> bool:
        """Take it if nobody has it.

        Raises:
            OSError: the folder cannot be written, or is another user's.
        """
        handle = _new_file(self._path, 0, own=True)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        except OSError:  # no locks here
            pass
        if not _is_at(handle, self._path):  # the one who had it has removed it
            os.close(handle)
            return False
        self._handle = handle
        return True

    def beat(self) -> None:
        """Say that its holder goes on. Costs nothing more often than once a second."""
        now = time.monotonic()
        if self._handle is not None and now - self._beaten > 1:
            self._beaten = now
            with suppress(OSError):
                os.utime(self._path)

    def silent(self) -> float:
        """Seconds since its holder last went on."""
        try:
            return time.time() - os.stat(self._path).st_mtime
        except OSError:
            return 0.0

    def leave(self) -> None:
        """Let the next one have it."""
        if self._handle is not None:
            with suppress(OSError):
                os.unlink(self._path)
            os.close(self._handle)
            self._handle = None
