"""Files and locks that only their owner may write: made beside their place and renamed.

They lie in a folder of mode 0700 that is one's own, such as ``rows`` of a cache: who can come to it has made
what is in it. The folder of a cache may itself be a link of its user's. Files that another user has put
there all the same, and links, are not used. Where the system knows no owners, all files are one's own. Owns
nothing; called by any thread of any process, also while others clear the cache.
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

#: A pipe in the place of a file would wait for a writer.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"))
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
    handle = os.open(path, flags | _FLAGS | (_NO_LINK if own else 0), 0o600 if own else 0o666)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a file", os.fspath(path))
        if own and owner() not in (None, found.st_uid):
            raise NotOwnError(errno.EPERM, f"user {found.st_uid} owns it", os.fspath(path))
        if own and owner() is not None and found.st_mode & OTHERS and not flags & os.O_CREAT:
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
                shared = own and owner() is not None and os.fstat(handle).st_mode & OTHERS
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
    if shared:
        warn_once(
            f"{path.parent} is on a file system that lets all users write all files, so that nothing kept "
            "there is used; name another folder by TRAINPIPES_CACHE or cache(path=...)",
            ("modes", str(path.parents[1])),
        )
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
                _make_own_folder(path.parent)
            else:
                os.makedirs(path.parent, 0o700, exist_ok=True)
            return open_file(path, own=own, flags=flags | os.O_RDWR | os.O_CREAT)
        except (FileNotFoundError, FileExistsError) as error:  # gone between two steps of it
            there = error.filename
            in_the_way = os.path.lexists(there) and not os.path.isdir(there)
            if not again or (isinstance(error, FileExistsError) and in_the_way):
                raise
    raise AssertionError


def _attempts() -> Iterator[bool]:
    """One for each attempt: whether there is another one."""
    end = time.monotonic() + PATIENCE
    for attempt in count():
        again = attempt < ATTEMPTS or time.monotonic() < end
        yield again
        if not again:
            break


def _make_own_folder(folder: Path) -> None:
    """Make a folder of a cache, if the one that keeps others out of all that is below is one's own."""
    spread = len(folder.name) == 2  # one of those that entries are spread over
    top = folder.parent if spread else folder
    os.makedirs(top.parent, 0o700, exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(top, 0o700)
    root, found, user = os.lstat(top.parent), os.lstat(top), owner()
    said = ""
    if stat.S_ISLNK(root.st_mode) and user is not None and root.st_uid not in (user, 0):
        said = f"{top.parent} is a link of user {root.st_uid}"
    elif not stat.S_ISDIR(found.st_mode):
        said = f"{top} is no folder, or a link"
    elif user not in (None, found.st_uid):
        said = f"user {found.st_uid} owns {top}"
    if said:
        raise NotOwnError(errno.EPERM, said, str(top))
    if user is not None and found.st_mode & OTHERS:
        os.chmod(top, 0o700)
    if spread:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)


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
        taken = True
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken = False
        except OSError:  # no locks here
            pass
        try:  # the one who had it may have removed it
            taken = taken and os.path.samestat(os.fstat(handle), os.stat(self._path))
        except FileNotFoundError:
            taken = False
        if taken:
            self._handle = handle
        else:
            os.close(handle)
        return taken

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
