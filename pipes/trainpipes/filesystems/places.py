"""Folders that files are put into whole, here or at any fsspec URL, and files while they are written.

Locally a file is made under ``_unfinished``, flushed and renamed. Object stores (S3, GCS, Azure) show an
upload when it is complete; other file systems get the file under another name, and rename it.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from zlib import crc32

from fsspec import AbstractFileSystem

from trainpipes import errors
from trainpipes._internal.checks import local_path, require
from trainpipes._internal.locks import Flag, InterruptibleLock, lock_file, start
from trainpipes.filesystems.retry import NORMAL, WRITING, Requests, Retry
from trainpipes.filesystems.systems import is_local, open_system


class TaskStopped(BaseException):
    """Raised in a task that is to end because another task failed."""


_here = threading.local()


def check_stop() -> None:
    """Raise ``TaskStopped`` in a task that is to end."""
    check = getattr(_here, "check", None)
    if check is not None:
        check()


def set_stop_check(check: Callable[[], None] | None) -> None:
    _here.check = check


class OutputFile:
    """A local file open for writing, whose bytes are counted and checksummed."""

    #: Opens a further file of the same task, by the end of its name.
    beside: Callable[[str], OutputFile]
    closed = False

    def __init__(self, path: Path, caller: str, show: Callable[[int], None] | None) -> None:
        self._path, self._caller, self._show = path, caller, show
        self.size = self.check = 0
        with writing(path, caller):
            self._file = open(path, "wb")  # noqa: SIM115  (``close`` does)

    def advance(self, rows: int) -> None:
        """Show that so many more rows are done."""
        check_stop()
        if self._show is not None:
            self._show(rows)

    def write(self, data: Any) -> int:
        check_stop()
        with writing(self._path, self._caller):
            self._file.write(data)
        count = memoryview(data).nbytes
        self.check, self.size = crc32(data, self.check), self.size + count
        return count

    def write_beginning(self, data: bytes) -> None:
        """Write the first bytes again, of which ``check`` is as it was."""
        with writing(self._path, self._caller):
            self._file.seek(0)
            self._file.write(data)
            self._file.seek(0, os.SEEK_END)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        with writing(self._path, self._caller):
            self._file.flush()

    def sync(self) -> None:
        self.flush()
        with writing(self._path, self._caller):
            os.fsync(self._file.fileno())

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
        with suppress(OSError):
            self._file.close()


@contextmanager
def writing(path: str | Path, caller: str) -> Iterator[None]:
    """Raise ConfigError, with the path, for a disk that is full or a folder that cannot be written to."""
    # A file without a name belongs to a place at a URL, until it is sent there.
    place = f"a file in {tempfile.gettempdir()}" if str(path).startswith("/proc/") else path
    failure = f"{caller}(): {place} cannot be written"
    try:
        yield
    except errors.UnreachableError as error:
        error.message = f"{failure}: {error.message.removeprefix(f'{error.path}: ')}"
        raise
    except (OSError, NotImplementedError) as error:
        why = str(getattr(error, "strerror", None) or error)
        raise errors.ConfigError(
            f"{failure}: {why}; free space there or allow writing, or give another folder",
            path=str(path),
        ) from error


#: Of a folder that is written: the file that appears last, the folder of unfinished files, and names of its
#: files.
MANIFEST, WORK = "_manifest.json", "_unfinished"
OURS = re.compile(
    r"part-\d{5,}\.(parquet|arrow|jsonl|jsonl\.gz|jsonl\.zst|json|bin|pieces|(.+\.)?npy)"
)

log = logging.getLogger("trainpipes")

#: The lock in the folder of unfinished files.
LOCK_NAME = "lock"
LOCK = f"{WORK}/{LOCK_NAME}"
#: Why no folder of this machine can be used, as its path says.
CLOSED = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)
#: Protocols of stores whose objects appear when their upload is complete.
OBJECT_STORES = {
    "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "cos", "r2",
}  # fmt: skip
#: Requests to a server at once.
REQUESTS = 16
#: Seconds between two signs of life of who writes to a URL, and how long a writer without them is waited for.
BEAT, LEASE = 5.0, 15.0


def write_text(path: str | os.PathLike[str], text: str, caller: str) -> None:
    """Write a file of this machine whole, or not at all."""
    place = Path(local_path(path, f"{caller}(path)")).expanduser()
    beside = place.parent / f".{place.name}.{secrets.token_hex(4)}.part"
    with writing(place, caller):
        try:
            beside.write_text(text, encoding="utf-8", newline="\n")
            beside.replace(place)
        finally:
            beside.unlink(missing_ok=True)


def place_at(
    folder: str | os.PathLike[str],
    caller: str,
    storage_options: Mapping[str, Any] | None = None,
    retry: Any = NORMAL,
    cure: tuple[str, str] = WRITING,
) -> Place:
    good = storage_options is None or isinstance(storage_options, Mapping)
    got = type(storage_options).__name__  # no values: secrets
    require(good, f"{caller}(storage_options)", "a dict of fsspec options", got)
    url = str(folder).rstrip("/")
    scheme, _, rest = str(folder).partition("://")
    if not rest or scheme in ("file", "local"):
        url = os.path.abspath(os.path.expanduser(local_path(rest or folder, f"{caller}(folder)")))
    elif "::" in url:
        raise errors.ConfigError(
            f"{caller}(folder) must be a path, or the URL of one file system, got {errors.shown(url)}: leave "
            "out what stands before '::'"
        )
    retry = Retry.of(retry, f"{caller}(retry)")
    system, path = open_system(url, storage_options or {}, retry)
    return Place(url, caller, system, path, retry, cure)


@dataclass(frozen=True)
class Place:
    """A folder on this machine or at a URL, and how it is reached."""

    root: str
    caller: str
    system: Any = field(repr=False)
    path: str = field(repr=False)
    retry: Retry = NORMAL
    cure: tuple[str, str] = field(default=WRITING, repr=False)

    @property
    def is_local(self) -> bool:
        return is_local(self.system)

    @property
    def _is_object_store(self) -> bool:
        protocol = self.system.protocol
        return bool(OBJECT_STORES & ({protocol} if isinstance(protocol, str) else {*protocol}))

    def at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def below(self, name: str) -> Place:
        return replace(self, root=self.at(name), path=f"{self.path}/{name}")

    def put(self, name: str, data: bytes) -> None:
        """A small file at a URL, or all of it anew."""
        if not self._is_object_store:
            self._call("makedirs", self.path, exist_ok=True)
        self._call("pipe_file", f"{self.path}/{name}", data)

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Bytes of the files that are there, by name; of a folder -1."""
        self.system.invalidate_cache()
        path = f"{self.path}/{folder}".rstrip("/")
        try:
            entries = self._call("ls", path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        there = {entry["name"].strip("/"): entry for entry in entries}
        there.pop(path.strip("/"), None)
        return {
            name.rpartition("/")[2]: -1 if about["type"] == "directory" else int(about["size"] or 0)
            for name, about in there.items()
        }

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        content: bytes = self._call("cat_file", f"{self.path}/{name}", start=start, end=stop)
        return content

    def read_all(self, ranges: Sequence[tuple[str, int | None, int | None]]) -> Iterator[bytes]:
        """Several names with ranges; of a server some at once."""
        most = 1 if self.is_local else REQUESTS
        for first in range(0, len(ranges), most):
            some = ranges[first : first + most]
            yield from self._requests().map(lambda part: self.read(*part), some, most)

    @contextmanager
    def file(self, name: str, show: Callable[[int], None] | None = None) -> Iterator[OutputFile]:
        """A file to be written; it gets its name when it is whole."""
        part = f"{WORK}/{name.rpartition('/')[2]}.{secrets.token_hex(4)}.part"
        with ExitStack() as stack:
            path = Path(self.at(part)) if self.is_local else stack.enter_context(_nameless())
            file = stack.enter_context(closing(OutputFile(path, self.caller, show)))
            if self.is_local:
                stack.callback(path.unlink, missing_ok=True)
            yield file
            file.sync() if self.is_local else file.flush()
            with writing(self.at(name), self.caller):
                self._put(path, part, f"{self.path}/{name}")

    def _put(self, written: Path, part: str, path: str) -> None:
        if self.is_local:
            os.replace(written, path)
            with suppress(OSError):  # some file systems cannot for folders
                folder = os.open(os.path.dirname(path), os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
            return
        sent = path if self._is_object_store else f"{self.path}/{part}"
        self._make_work()
        self._call("put_file", str(written), sent, size=written.stat().st_size)
        if sent != path:
            try:
                self._move(sent, path)
            except FileNotFoundError:
                if self._call("info", path)["size"] != written.stat().st_size:
                    raise  # else a try whose answer was lost has moved it

    def _move(self, sent: str, path: str) -> None:
        if type(self.system).mv is not AbstractFileSystem.mv:
            self._call("mv", sent, path)
        else:  # fsspec's own takes names for patterns
            self._call("cp_file", sent, path)
            self._call("rm_file", sent)

    def _make_work(self) -> None:
        if not self._is_object_store:
            self._call("makedirs", f"{self.path}/{WORK}", exist_ok=True)

    def remove(self, *names: str) -> None:
        self.system.invalidate_cache()
        # One by one: a store that removes several at once may leave some, in silence.
        drop = partial(self._drop, "rm_file")
        self._requests().map(drop, names, 1 if self.is_local else REQUESTS)

    def _drop(self, method: str, name: str, **options: Any) -> None:
        with writing(self.at(name), self.caller), suppress(FileNotFoundError):
            self._call(method, f"{self.path}/{name}".rstrip("/"), **options)

    def remove_folder(self, name: str = "") -> None:
        """Remove a folder with all in it."""
        if self.is_local:
            self._drop("rm", name, recursive=True)
            return
        # Without fsspec's rm, which takes names for patterns.
        files, folders = list[str](), [name]
        for folder in folders:
            for inner, size in self.sizes(folder).items():
                (folders if size < 0 else files).append(f"{folder}/{inner}".lstrip("/"))
        self.remove(*files)
        for folder in [] if self._is_object_store else reversed(folders):
            self._drop("rmdir", folder)

    def lock(self) -> Lock:
        """What keeps others out: at a URL an object that its holder renews, free after ``LEASE`` seconds
        without, or when the process on this machine is gone.
        """
        return _LocalLock(self) if self.is_local else _Lease(self)

    def taken(self, who: str) -> errors.ConfigError:
        return errors.ConfigError(
            f"{self.caller}(): {who} writes to {self.root}: let one process write, one rank of several, or "
            "give each a folder of its own",
            path=self.root,
        )

    def _call(self, method: str, *paths: Any, **options: Any) -> Any:
        if self.is_local:
            try:
                return getattr(self.system, method)(*paths, **options)
            except OSError as error:
                if error.errno not in CLOSED:
                    raise
                place, why = paths[0], error.strerror or error
                raise errors.ConfigError(
                    f"{self.caller}(): {place}: {why}; allow reading and writing there, or give another "
                    "folder",
                    path=place,
                ) from error
        return self._requests().call(self.system, method, *paths, **options)

    def _requests(self) -> Requests:
        return Requests(self.retry, self.cure)


class Lock(Protocol):
    """The lock of a folder. Free it wherever it may have been taken: Ctrl-C may come at any moment."""

    def take(self) -> None:
        """Make the folder, and lock it; raises ConfigError if another process writes there."""
        ...

    def free(self) -> None:
        """Let go of it, if it is taken."""
        ...


class _LocalLock:
    """A lock of a file, which ends with the process."""

    def __init__(self, place: Place) -> None:
        self._place, self._work = place, Path(place.at(WORK))
        self._made: list[Path] = []
        self._file: BinaryIO | None = None
        self._is_mine = False

    def take(self) -> None:
        place, work = self._place, self._work
        self._made = [folder for folder in (work, *work.parents) if not os.path.exists(folder)]
        if not self._try():
            gc.collect()  # a lock that Ctrl-C has left
            if not self._try():
                raise place.taken("another process")

    def _try(self) -> bool:
        with writing(self._place.root, self._place.caller):
            self._work.mkdir(parents=True, exist_ok=True)
            self._file = open(self._work / LOCK_NAME, "ab")  # noqa: SIM115
        self._is_mine = lock_file(self._file.fileno(), self._work / LOCK_NAME)
        if not self._is_mine:
            self._file.close()
        return self._is_mine

    def free(self) -> None:
        try:
            if self._is_mine and self._place.sizes(WORK).keys() <= {LOCK_NAME}:
                with suppress(OSError):  # they hold something
                    os.unlink(self._work / LOCK_NAME)
                    for folder in self._made or [self._work]:
                        folder.rmdir()
        finally:
            if self._file is not None:
                self._file.close()


def _pids() -> str:
    """What numbers of processes are of: containers have numbers of their own, and may share a host's name."""
    with suppress(OSError):  # there is no /proc, and there are no containers
        started = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{started.strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


class _Lease:
    """A lock of a URL: an object that names its holder, and counts up while the holder lives."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._me: dict[str, Any] = {
            "host": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8), "beat": 0,
            "pids": _pids(),
        }  # fmt: skip
        self._ended, self._writing = Flag(), InterruptibleLock()
        self._may_be_there = False

    def take(self) -> None:
        place, holder = self._place, self._read()
        if holder is not None:
            if not self._is_over(holder):
                raise self._taken(holder)
            self._remove()
        self._may_be_there = True
        try:
            with writing(place.at(LOCK), place.caller), suppress(FileExistsError):
                self._write("create")
            if holder is not None:  # another that waited for it may be about to remove this one
                self._ended.wait(min(LEASE, 1.0))
            self._check_own()
        except Exception:
            self._may_be_there = False
            raise
        # What takes longer than the lease does not matter any more.
        seconds = min(place.retry.deadline, LEASE)
        self._place = replace(place, retry=replace(place.retry, deadline=seconds))
        start(threading.Thread(target=self._renew, name="trainpipes-lease", daemon=True))

    def free(self) -> None:
        if not self._may_be_there:
            return
        self._ended.set()
        with self._writing, clean_up(self._place.at(LOCK)), suppress(errors.ConfigError):
            self._check_own()
            self._remove()

    def _renew(self) -> None:
        while not self._ended.wait(BEAT):
            with self._writing:
                if self._ended.is_set():
                    return
                self._me["beat"] += 1
                with suppress(Exception):  # the next try may do
                    self._write("overwrite")

    def _is_over(self, holder: dict[str, Any]) -> bool:
        """Whether its process is gone from this machine, or gives no sign of life: another process may have
        its number.
        """
        if all(holder.get(key) == self._me[key] for key in ("host", "pids")):
            with suppress(PermissionError):  # it is another user's
                try:
                    os.kill(int(holder["pid"]), 0)
                except ProcessLookupError:
                    return True
        self._ended.wait(LEASE)
        return self._read() in (holder, None)

    def _check_own(self) -> None:
        holder = self._read()
        if holder is not None and holder["token"] != self._me["token"]:
            raise self._taken(holder)

    def _taken(self, holder: dict[str, Any]) -> errors.ConfigError:
        return self._place.taken(f"process {holder['pid']} of {holder['host']}")

    def _read(self) -> dict[str, Any] | None:
        self._place.system.invalidate_cache()
        try:
            holder = json.loads(self._place.read(LOCK))
            return holder if {"host", "pid", "token"} <= holder.keys() else None
        except (FileNotFoundError, ValueError, AttributeError):
            return None

    def _write(self, mode: str) -> None:
        self._place._make_work()
        path, data = f"{self._place.path}/{LOCK}", json.dumps(self._me).encode()
        try:
            self._place._call("pipe_file", path, data, mode=mode)
        except (TypeError, ValueError, NotImplementedError):  # it knows no modes
            self._place._call("pipe_file", path, data)

    def _remove(self) -> None:
        place = self._place
        with suppress(FileNotFoundError):
            place._call("rm_file", f"{place.path}/{LOCK}")
        if not (place._is_object_store or place.sizes(WORK)):
            with suppress(FileNotFoundError):
                place._call("rmdir", f"{place.path}/{WORK}")


@contextmanager
def clean_up(path: str) -> Iterator[None]:
    """Make failures warnings: all that counts is there."""
    try:
        yield
    except (OSError, errors.TrainpipesError) as error:
        said = f"{path} is of no more use, and cannot be removed: {error}; remove it by hand"
        log.warning("%s", errors.hidden(said))


@contextmanager
def _nameless() -> Iterator[Path]:
    with tempfile.TemporaryFile(prefix="trainpipes-") as file:
        path = Path(f"/proc/self/fd/{file.fileno()}")
        if path.exists():
            yield path
            return
    with tempfile.TemporaryDirectory(prefix="trainpipes-") as folder:
        yield Path(folder, "part")
