"""Files and locks for their owner alone, in a folder of mode 0700. Files of other users, and links, are not
used.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from trainpipes.storage.cache import PART, owner, remove_leftovers

try:
    import fcntl
except ImportError:  # not on this system: all may work at the same time
    fcntl = None  # type: ignore[assignment]

#: Seconds in which what others remove, as ``tp.cache.clear()`` does, is made anew.
PATIENCE = 10.0
#: A pipe in the place of a file would wait for a writer.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"))
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class NotOwnError(PermissionError):
    """A file or folder that is another user's."""


def open_file(path: str | os.PathLike[str], *, own: bool = True, flags: int = 0) -> int:
    """A handle of a plain file, to read it unless ``flags`` say more."""
    handle = os.open(path, flags | _FLAGS | (_NO_LINK if own else 0), 0o600 if own else 0o666)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a file", os.fspath(path))
        if own and owner() not in (None, found.st_uid):
            raise NotOwnError(errno.EPERM, f"user {found.st_uid} owns it", os.fspath(path))
    except BaseException:
        os.close(handle)
        raise
    return handle


def make_file(path: Path, fill: Callable[[int], None], *, own: bool = True) -> None:
    """Make a file beside its place and rename it there: of two makers the last one wins."""
    for again in _attempts():
        beside = path.with_name(f"{path.stem}.{os.getpid()}.{secrets.token_hex(4)}{PART}")
        handle = _new_file(beside, os.O_EXCL, own)
        try:
            try:
                fill(handle)
            finally:
                os.close(handle)
            with suppress(FileNotFoundError) if again else nullcontext():
                os.replace(beside, path)
                break
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise
    if own:
        remove_leftovers(path.parent)


def _new_file(path: Path, flags: int, own: bool) -> int:
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
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        yield True
    yield False


def _make_own_folder(folder: Path) -> None:
    """Make a folder of a cache, if the one above, which keeps others out, is one's own."""
    top = folder.parent if len(folder.name) == 2 else folder  # entries are spread over such
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
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)


class FileLock:
    """Keeps other threads and processes of this machine from doing the same work. Where a file system has no
    locks, all get it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def take(self) -> bool:
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

    @contextmanager
    def held(self, patience: float, pause: float) -> Iterator[bool]:
        """Wait for it, no longer than ``patience`` seconds; whether it is taken."""
        end = time.monotonic() + patience
        while not (taken := self.take()) and time.monotonic() < end:
            time.sleep(pause)
        try:
            yield taken
        finally:
            self.leave()

    def leave(self) -> None:
        if self._handle is not None:
            with suppress(OSError):
                os.unlink(self._path)
            os.close(self._handle)
            self._handle = None
