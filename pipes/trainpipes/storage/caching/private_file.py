"""Files and locks for their owner alone, in a folder of mode 0700. Files of other users, and links, are not
used.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

from trainpipes.storage.cache import PART, owner, remove_leftovers

try:
    import fcntl
except ImportError:  # not on this system: all may work at the same time
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("trainpipes")

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


def make_file(
    path: Path,
    fill: Callable[[BinaryIO], None],
    *,
    own: bool = True,
    room: Callable[[int], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Make a file beside its place and rename it there: of two makers the last one wins."""
    beside = path.with_name(f"{path.stem}.{os.getpid()}.{secrets.token_hex(4)}{PART}")
    _make_folder(path.parent, own)
    handle = open_file(beside, own=own, flags=os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(handle, "r+b") as file:
            fill(file)
        with room(os.stat(beside).st_size):
            os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
    if own:
        remove_leftovers(path.parent)


def _make_folder(folder: Path, own: bool = True) -> None:
    """Make a folder; one of a cache only if the one above, which keeps others out, is one's own."""
    top = folder.parent if len(folder.name) == 2 else folder  # entries are spread over such
    for one in (top.parent, top):
        os.makedirs(one, 0o700, exist_ok=True)
    root, found, user = os.lstat(top.parent), os.lstat(top), owner()
    said = ""
    if stat.S_ISLNK(root.st_mode) and root.st_uid not in (user, 0):
        said = f"{top.parent} is a link of user {root.st_uid}"
    elif stat.S_ISLNK(found.st_mode):
        said = f"{top} is a link"
    elif user != found.st_uid:
        said = f"user {found.st_uid} owns {top}"
    if own and user is not None and said:
        raise NotOwnError(errno.EPERM, said, str(top))
    os.makedirs(folder, 0o700, exist_ok=True)


@contextmanager
def locked(path: Path, patience: float = math.inf, pause: float = 0.05) -> Iterator[bool]:
    """Keep other threads and processes of this machine from the same work; False if one is still at it after
    ``patience`` seconds. Where a file system has no locks, nobody waits.
    """
    end = time.monotonic() + patience
    if (handle := _lock(path)) is None and patience:
        log.info("waiting for another thread or process that holds %s", path)
    while handle is None and time.monotonic() < end:
        time.sleep(pause)
        handle = _lock(path)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            with suppress(OSError):
                os.unlink(path)
            os.close(handle)


def _lock(path: Path) -> int | None:
    _make_folder(path.parent)
    handle, taken = open_file(path, flags=os.O_RDWR | os.O_CREAT), True
    with suppress(OSError):  # no locks here
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one who had it may have removed it.
            taken = os.path.samestat(os.fstat(handle), os.stat(path))
        except (BlockingIOError, FileNotFoundError):
            taken = False
    if taken:
        return handle
    os.close(handle)
    return None
