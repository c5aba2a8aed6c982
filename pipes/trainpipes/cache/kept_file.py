"""Entries of a cache, made by one process, read by all; their files and locks are for their owner alone.

Damaged files are removed, with a warning. Links, and files of other users, are not used.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import mmap
import os
import secrets
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa

from trainpipes import cache
from trainpipes._internal.locks import lock_file
from trainpipes._internal.messages import warn_once

log = logging.getLogger("trainpipes")

#: A pipe in the place of a file would wait for a writer.
FLAGS = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"))
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


#: Entries that are looked at for leftovers, about, for each that is made; and how many more are made in a
#: folder before all there are looked at again.
LOOKED_AT = 16
_unlooked: dict[Path, int] = {}


class NotOwnError(PermissionError):
    """A file or folder that is another user's."""


def open_file(path: str | os.PathLike[str], *, private: bool = True, flags: int = 0) -> int:
    """A handle of a plain file, to read it unless ``flags`` say more."""
    handle = os.open(
        path, flags | FLAGS | (_NO_LINK if private else 0), 0o600 if private else 0o666
    )
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a file", os.fspath(path))
        if private and cache.owner() not in (None, status.st_uid):
            raise NotOwnError(errno.EPERM, f"user {status.st_uid} owns it", os.fspath(path))
    except BaseException:
        os.close(handle)
        raise
    return handle


def make_file(
    path: Path,
    fill: Callable[[BinaryIO], None],
    *,
    private: bool = True,
    room: Callable[[int], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Make a file beside its place and rename it there: of two makers the last one wins."""
    beside = path.with_name(f"{path.stem}.{os.getpid()}.{secrets.token_hex(4)}{cache.PART}")
    _make_folder(path.parent, private)
    handle = open_file(beside, private=private, flags=os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(handle, "r+b") as file:
            fill(file)
        with room(os.stat(beside).st_size):
            os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
    if not private:
        cache.remove_leftovers(path.parent, path.stem)
    elif (left := _unlooked.get(path.parent, 0)) > 0:
        _unlooked[path.parent] = left - 1
    else:
        _unlooked[path.parent] = cache.remove_leftovers(path.parent) // LOOKED_AT


def _make_folder(folder: Path, private: bool = True) -> None:
    """Make a folder. The folder above a cache keeps other users out: it must be owned by this user."""
    mode = 0o700 if private else 0o777
    top = folder.parent if len(folder.name) == 2 else folder  # entries are spread over such
    for above in (top.parent, top):
        os.makedirs(above, mode, exist_ok=True)
    root, status, user = os.lstat(top.parent), os.lstat(top), cache.owner()
    said = ""
    if stat.S_ISLNK(root.st_mode) and root.st_uid not in (user, 0):
        said = f"{top.parent} is a link of user {root.st_uid}"
    elif stat.S_ISLNK(status.st_mode):
        said = f"{top} is a link"
    elif user != status.st_uid:
        said = f"user {status.st_uid} owns {top}"
    if private and user is not None and said:
        raise NotOwnError(errno.EPERM, said, str(top))
    os.makedirs(folder, mode, exist_ok=True)


@contextmanager
def locked(path: Path, patience: float = math.inf, pause: float = 0.05) -> Iterator[bool]:
    """Keep other threads and processes of this machine from the same work; False if another is still at it
    after ``patience`` seconds. Where a file system has no locks, nobody waits.
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
    handle = open_file(path, flags=os.O_RDWR | os.O_CREAT)
    if lock_file(handle, path):
        return handle
    os.close(handle)
    return None


T = TypeVar("T")

#: The key, in a table's schema, of the table's description; and the bytes of a file in which ours have it.
KEY = b"trainpipes:about"
HEAD = 1 << 16
#: A file's last bytes: this, and the CRC-32 of all bytes before both.
MAGIC = b"TPSUM001"
TRAILER = len(MAGIC) + 4
#: Chunks of a column may have dictionaries of their own, which a file that is no stream has not.
OPTIONS = pa.ipc.IpcWriteOptions(unify_dictionaries=True)

#: What the system may lack for a while, of a file that is whole.
SHORT = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
#: Files that this process has found to be whole: device, inode, size and time of the last change.
_whole: set[tuple[int, int, int, int]] = set()


class ForeignError(OSError):
    """A file that the user named, and that nothing of ours has written."""


def write(
    path: Path, tables: Iterable[pa.Table], about: dict[str, Any] | None, *, private: bool = True
) -> bool:
    """Write tables; without ``about`` as a plain Arrow file. False, and no file, if there are none."""
    rest = iter(tables)
    first = next(rest, None)
    if first is not None:
        make_file(path, partial(fill, about, chain([first], rest), first.schema), private=private)
    return first is not None


def fill(
    about: dict[str, Any] | None, tables: Iterable[pa.Table], schema: pa.Schema, file: BinaryIO
) -> None:
    if about is None:
        opened = pa.ipc.new_file(file, schema, options=OPTIONS)
    else:
        schema = schema.with_metadata({**(schema.metadata or {}), KEY: json.dumps(about)})
        opened = pa.ipc.new_stream(file, schema)
    with opened as writer:
        for table in tables:
            writer.write_table(table.replace_schema_metadata(schema.metadata))
    if about is not None:
        add_checksum(file)


def add_checksum(file: BinaryIO) -> None:
    file.flush()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        file.write(_trailer(content))


def _trailer(content: memoryview | mmap.mmap) -> bytes:
    return MAGIC + zlib.crc32(content).to_bytes(4, "little")


def read(path: Path, about: dict[str, Any], *, private: bool = True) -> pa.Table | None:
    """The rows of a file; None if it is not there, not whole, or about something else."""
    return read_content(path, partial(_table, about), private=private)


def read_content(
    path: Path, parse: Callable[[pa.Buffer], T | None], *, private: bool = True
) -> T | None:
    """Parse a file's content; None if the file is not there, or not whole."""
    try:
        handle = open_file(path, private=private)
    except NotOwnError as error:
        warn_once(
            f"{path} is not used, for {error.strerror}: each user keeps files of their own. Name a folder "
            "of yours by TRAINPIPES_CACHE or cache(path=...)",
            ("not own", str(path.parents[1])),
        )
        return None
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        mark = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
        try:
            again = f"/dev/fd/{handle}"  # the same file, under any name
            with pa.memory_map(again if os.path.exists(again) else os.fspath(path)) as source:
                content = source.read_buffer()
            if mark not in _whole:
                view = memoryview(content)
                if bytes(view[-TRAILER:]) != _trailer(view[:-TRAILER]):
                    raise ValueError("the checksum differs")
            parsed = parse(content.slice(0, content.size - TRAILER))
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
            if getattr(error, "errno", 0) in SHORT:
                return None
            if not private and about.st_size and KEY not in file.read(HEAD):
                raise ForeignError(errno.EEXIST, "not a file of ours", os.fspath(path)) from None
            _drop_file(path, about)
            return None
    if parsed is not None and private:
        with suppress(OSError, NotImplementedError):
            # The least recently used ones go first. What tells files apart stays.
            os.utime(path, ns=(time.time_ns(), about.st_mtime_ns), follow_symlinks=False)
    _whole.add(mark)
    return parsed


def _table(about: dict[str, Any], content: pa.Buffer) -> pa.Table | None:
    with pa.ipc.open_stream(content) as reader:
        table = reader.read_all()
    metadata = dict(table.schema.metadata)
    if json.loads(metadata.pop(KEY)) != about:
        return None
    return table.replace_schema_metadata(metadata or None)


def _drop_file(path: Path, status: os.stat_result) -> None:
    with suppress(OSError):
        if os.path.samestat(status, os.lstat(path)):  # no other file has come in its place
            os.unlink(path)
    warn_once(
        f"{path} was damaged: cut short or changed after it was written. It is removed and made again; "
        "if that happens often, check the disk",
        ("damaged", str(path.parents[1])),
    )


#: What is left of the limit when entries were removed.
LEFT = 0.95
#: Seconds that a process waits for others to have kept an entry, before it goes on without keeping its own.
PATIENCE, TICK = 2.0, 0.002
#: After a failure to write, so many entries at most are not tried before the next is.
MOST_UNTRIED = 256


class _NoRoomError(Exception):
    """An entry that is not kept."""


@dataclass(eq=False)
class Store:
    """A folder of entries of a kind.

    Args:
        most: bytes of them, or None; ``limit`` is the option's name.
        caller: whose they are, and ``cure`` how to keep them elsewhere.
    """

    root: Path
    kind: str
    most: int | None
    limit: str
    caller: str
    cure: str
    _failures: int = 0  # in a row
    _untried: int = 0
    _too_large: set[Path] = field(default_factory=set)

    def path(self, digest: str) -> Path:
        return cache.path_of(self.root, self.kind, digest)

    def is_off(self, path: Path) -> bool:
        """Whether an entry is not worth another try: a failure, such as a full disk, may pass."""
        self._untried -= self._untried > 0
        return self._untried > 0 or path in self._too_large

    def make(self, path: Path, fill: Callable[[BinaryIO], None]) -> None:
        """Keep an entry, if there is room."""
        try:
            make_file(path, fill, room=partial(self._room, path))
            self._failures = 0
        except _NoRoomError:
            pass
        except OSError as error:
            self.failed(error)

    def failed(self, error: OSError) -> None:
        """Keep nothing for a while."""
        self._failures += 1
        self._untried = min(2**self._failures, MOST_UNTRIED)
        said = error.strerror or error
        warn_once(
            f"{self.caller}: {self.kind} cannot be kept in {self.root} ({said}); it goes on without the "
            f"cache until they can be kept. Make room there, or {self.cure}",
            ("off", self.kind, str(self.root)),
        )

    @contextmanager
    def _room(self, path: Path, size: int) -> Iterator[None]:
        """Have room for an entry. The bytes that are kept, at most, are noted beside them."""
        below, used = self.root / self.kind, -1
        lock, counter = below / f"room{cache.LOCK}", below / f"room{cache.USED}"
        if self.most is None:
            yield
            if counter.exists():  # others have a limit, and count again what is there
                with suppress(OSError), locked(lock, PATIENCE, TICK):
                    counter.unlink(missing_ok=True)
            return
        if size > self.most:
            self._too_large.add(path)
            warn_once(
                f"{self.caller}: {self.limit} must be at least the size of an entry, got {self.most:,}, and "
                f"one takes {size:,}: such entries are not kept; raise {self.limit}",
                ("too large", self.kind, str(self.root), self.most),
            )
            raise _NoRoomError
        with locked(lock, PATIENCE, TICK) as mine:
            if not mine:
                raise _NoRoomError
            with suppress(OSError, ValueError):
                used = int(counter.read_text())
            if not 0 <= used <= self.most - size:
                used = cache.make_room(self.root, int(LEFT * self.most) - size, self.kind)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with open(open_file(counter, flags=flags), "w") as file:
                file.write(str(used + size))
            yield
