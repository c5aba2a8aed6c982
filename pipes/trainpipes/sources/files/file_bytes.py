"""The bytes of a file: ranges of it, or all from a place on, alike for files here and on other machines.

What is read is of the file that was listed. One that has changed since, also to the same size, is a
``DataChangedError`` before any byte of it is given: on this machine by inode, time of change and size;
on S3 and over HTTP by the version that each reply tells; elsewhere by its size, and by what the store
lists of it after a request that had to be made again.
"""

from __future__ import annotations

import io
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar, cast

import pyarrow as pa

from trainpipes.errors import DataChangedError
from trainpipes.kinds.source import Place
from trainpipes.sources.files.file_errors import changed, check_unchanged, unreadable
from trainpipes.sources.files.folders import told
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.files.range_file import RangeFile
from trainpipes.sources.remote.request import is_checked
from trainpipes.sources.remote.retry import Requests

if TYPE_CHECKING:
    from trainpipes.sources.files.list_files import FileList

T = TypeVar("T")
#: Bytes of one request at most, so that several connections share the work; two ranges closer to each
# other than
#: the gap are fetched as one: about what the wait for a request costs in bytes.
PART_BYTES, GAP = 4 << 20, 64 << 10
#: Bytes that a stream reads at a time, at least.
BUFFER_BYTES = 256 << 10
#: A pipe that has taken the place of a file is not waited for.
FLAGS = os.O_RDONLY
for _name in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"):
    FLAGS |= getattr(os, _name, 0)
#: Files that stay mapped, at most.
MAPPED = 256


class FileBytes(Protocol):
    """The bytes of one file, for any thread.

    Attributes:
        name: its path or URL.
        size: bytes of it.
        version: what tells it from another one of that name, in this run; "" where nothing does.
        checked: whether each read is certain to be of this version.
        local: whether it is on this machine.

    ``read`` and ``stream`` raise FileNotFoundError where it is gone, DataChangedError where it is
    another one, and UnreachableError where the server does not answer or denies access.
    """

    name: str
    size: int
    checked: bool
    local: bool

    @property
    def version(self) -> str: ...

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Bytes ``start`` to ``stop`` of each range."""
        ...

    def stream(self, start: int = 0) -> BinaryIO:
        """All bytes from a place on; it can be sought in."""
        ...

    def check(self) -> None:
        """Raise if what was read so far without ``read`` may be of another version."""
        ...

    def mapped(self) -> pa.Buffer | None:
        """All of it, mapped into memory; None for a file on another machine."""
        ...

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What ``make`` finds out about the file: called once in a process, while it is read."""
        ...


def open_bytes(
    files: FileList, file: int, requests: Requests | None = None, kept: KeptFiles | None = None
) -> FileBytes:
    """The bytes of a file of a list.

    Args:
        files: the files.
        file: which.
        requests: makes those to servers, and can be stopped.
        kept: what readers of the files share.

    Raises:
        UnreadableError: the server does not say how large it is.
    """
    if is_local(files.system(file)):
        return LocalBytes(files, file, kept or KeptFiles())
    remote = RemoteBytes(
        files, file, requests or Requests(files.retry_seconds), kept or KeptFiles()
    )
    return remote if files.cache is None else files.cache.keeping(remote)


class LocalBytes:
    """A file of this machine, or of one that this machine has mounted."""

    checked = local = True

    def __init__(self, files: FileList, file: int, kept: KeptFiles) -> None:
        self._files, self._file, self._kept = files, file, kept
        self.name, self.size = files.paths[file], int(files.sizes[file])
        self._listed = files.inode(file), int(files.stamps[file]), self.size

    @property
    def version(self) -> str:
        return " ".join(map(str, self._listed))

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        handle = os.open(self.name, FLAGS)  # half the time of open()
        try:
            found = [_read_at(handle, start, stop) for start, stop in ranges]
            about = os.fstat(handle)
        except OSError:
            self.check()  # a pipe in place of the file
            raise
        finally:
            os.close(handle)
        if self._listed != (about.st_ino, about.st_mtime_ns, about.st_size):
            self.check()
        if any(len(part) < b - a for part, (a, b) in zip(found, ranges, strict=True)):
            raise changed(Place(self.name), "it has become shorter")
        return found

    def stream(self, start: int = 0) -> BinaryIO:
        self.check()
        raw = _LocalStream(self, start)
        return cast(BinaryIO, io.BufferedReader(raw, BUFFER_BYTES))

    def mapped(self) -> pa.Buffer | None:
        self.check()
        return self._kept.mapped(self._file, self.name)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        return self._kept.once(self._file, key, make)

    def check(self) -> None:
        try:
            about = os.stat(self.name)
        except OSError:
            about = None
        if about is None or self._listed != (about.st_ino, about.st_mtime_ns, about.st_size):
            check_unchanged(self._files, self._file, Place(self.name))  # which says what it is


def _read_at(handle: int, start: int, stop: int) -> memoryview:
    found = _pread(handle, stop - start, start)
    while len(found) < stop - start:
        more = _pread(handle, stop - start - len(found), start + len(found))
        if not more:
            break
        found += more
    return memoryview(found)


def _pread(handle: int, count: int, start: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(handle, count, start)
    os.lseek(handle, start, os.SEEK_SET)
    return os.read(handle, count)


class _LocalStream(io.FileIO):
    """A local file that was listed: of one that is written meanwhile, nothing is given."""

    def __init__(self, source: LocalBytes, start: int) -> None:
        handle = os.open(source.name, FLAGS)
        super().__init__(handle, closefd=False)  # which warns of one that is let go of
        self.name, self._source = source.name, source
        self.seek(start)

    def close(self) -> None:
        handle = -1 if self.closed else self.fileno()
        super().close()
        if handle >= 0:
            os.close(handle)

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._source.check()
        return count

    def readall(self) -> bytes:
        found = super().readall()
        self._source.check()
        return found


def as_bytes(view: memoryview) -> bytes:
    """Bytes of a view, copied only if they are a part of others."""
    whole = view.obj
    return whole if isinstance(whole, bytes) and len(whole) == len(view) else bytes(view)


def mapped(path: str) -> pa.Buffer:
    """A local file's bytes, which stay mapped for as long as something refers to them."""
    if not os.path.getsize(path):
        return pa.py_buffer(b"")
    with pa.memory_map(path) as opened:
        return opened.read_buffer()


class KeptFiles:
    """What the readers of a process share of files: local ones that are mapped, and what was found out about
    any. Any thread may ask. Pickled, it is empty."""

    def __init__(self) -> None:
        self._buffers: dict[int, pa.Buffer] = {}
        self._found: dict[tuple[int, Any], Any] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return type(self), ()

    def mapped(self, file: int, path: str) -> pa.Buffer:
        """A local file's bytes."""
        with self._lock:
            found = self._buffers.get(file)
            if found is None:
                found = self._buffers[file] = mapped(path)
                while len(self._buffers) > MAPPED:
                    del self._buffers[next(iter(self._buffers))]
            return found

    def once(self, file: int, key: Any, make: Callable[[], T]) -> T:
        """What ``make`` has found of a file, which is called once; by one thread for a file at a time."""
        found = self._found
        if (file, key) not in found:
            with self._lock:
                alone = self._locks.setdefault(file, threading.Lock())
            with alone:
                if (file, key) not in found:
                    found[file, key] = make()
        result: T = found[file, key]
        return result


class RemoteBytes:
    """A file on another machine."""

    local = False

    def __init__(self, files: FileList, file: int, requests: Requests, kept: KeptFiles) -> None:
        self._file, self._kept = file, kept
        self._system, self._path, self._requests = files.system(file), files.paths[file], requests
        self.name, self.version = files.names[file], files.stamps[file]
        size = int(files.sizes[file])
        if size < 0:
            size = requests.call(self._system, "size", self._path)
            if size is None:
                raise unreadable(Place(self.name), "the server does not say how large it is")
        self.size = size
        self.checked = is_checked(self._system, self.version)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        starts, stops = _requests_for(ranges)
        if not starts:
            return [memoryview(b"")] * len(ranges)
        try:
            parts, tries = self._requests.ranges(
                self._system, self._path, starts, stops, self.size, self.version
            )
        except DataChangedError as error:
            raise changed(
                Place(self.name), self._change() or "it changed as it was read"
            ) from error
        if tries > 1:
            self.confirm()
        return [_cut(parts, starts, start, stop) for start, stop in ranges]

    def stream(self, start: int = 0) -> BinaryIO:
        return open_stream(self, start)

    def check(self) -> None:
        pass

    def mapped(self) -> pa.Buffer | None:
        return None

    def once(self, key: Any, make: Callable[[], T]) -> T:
        return self._kept.once(self._file, key, make)

    def confirm(self) -> None:
        """Raise if the file is another one by now, where replies do not tell."""
        if not self.checked and (how := self._change()):
            raise changed(Place(self.name), how)

    def _change(self) -> str:
        """How the file that is there now differs from the one that was listed; "" if it does not."""
        self._system.invalidate_cache()
        now = told(self._requests.call(self._system, "info", self._path))
        if now.size is not None and now.size != self.size:
            return f"it had {self.size:,} bytes, and has {now.size:,}"
        if self.version and now.stamp != self.version:
            return "it has as many bytes as before, and others"
        return ""


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, those that touch as one.

    >>> merged([(5, 9), (0, 3), (3, 4)])
    [(0, 4), (5, 9)]
    """
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            start, stop = found[-1][0], max(stop, found.pop()[1])
        found.append((start, stop))
    return found


class FetchedBytes:
    """The bytes of a file, some of which are here.

    Args:
        data: the file.
        ranges: what is fetched.
    """

    local = False

    def __init__(self, data: FileBytes, ranges: Sequence[tuple[int, int]]) -> None:
        self.name, self.size, self.version = data.name, data.size, data.version
        self.checked, self._data = data.checked, data
        self._ranges = merged(ranges)
        self._parts = data.read(self._ranges)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        found = [self._part(*one) for one in ranges]
        missing = [n for n, part in enumerate(found) if part is None]
        for n, part in zip(missing, self._data.read([ranges[n] for n in missing]), strict=True):
            found[n] = part
        return [part for part in found if part is not None]

    def _part(self, start: int, stop: int) -> memoryview | None:
        n = bisect_right(self._ranges, (start, self.size)) - 1
        if n < 0 or stop > self._ranges[n][1]:
            return None
        first = self._ranges[n][0]
        return self._parts[n][start - first : stop - first]

    def stream(self, start: int = 0) -> BinaryIO:
        n = bisect_right(self._ranges, (start, self.size)) - 1
        if n < 0 or start >= self._ranges[n][1]:
            return self._data.stream(start)
        first, last = self._ranges[n]
        return cast(BinaryIO, _PartAndRest(self._parts[n][start - first :], self._data, last))

    def check(self) -> None:
        self._data.check()

    def mapped(self) -> pa.Buffer | None:
        return None

    def once(self, key: Any, make: Callable[[], T]) -> T:
        return self._data.once(key, make)


class _PartAndRest(io.RawIOBase):
    """Bytes that are here, and then those behind them, which are fetched when they are needed."""

    def __init__(self, part: memoryview, data: FileBytes, stop: int) -> None:
        super().__init__()
        self._part, self._data, self._stop = part, data, stop
        self._rest: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if len(self._part):
            found = bytes(self._part[: len(buffer)])
            self._part = self._part[len(found) :]
        elif self._stop >= self._data.size:
            return 0
        else:
            self._rest = self._rest or self._data.stream(self._stop)
            found = self._rest.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        super().close()
        if self._rest is not None:
            self._rest.close()


def open_stream(source: FileBytes, start: int) -> BinaryIO:
    """Bytes from a place on, fetched some MB at a time."""
    raw = RangeFile(source)
    raw.follow(start)
    return cast(BinaryIO, io.BufferedReader(raw, BUFFER_BYTES))


def _requests_for(ranges: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Starts and stops of the requests that fetch ranges, in order."""
    merged: list[list[int]] = []
    for start, stop in sorted(one for one in ranges if one[0] < one[1]):
        if merged and start - merged[-1][1] <= GAP:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    starts = [at for start, stop in merged for at in range(start, stop, PART_BYTES)]
    ends = [
        at for start, stop in merged for at in [*range(start + PART_BYTES, stop, PART_BYTES), stop]
    ]
    return starts, ends


def _cut(parts: Sequence[bytes], starts: Sequence[int], start: int, stop: int) -> memoryview:
    """A range, of the parts that were fetched; copied only where it lies in several."""
    if start >= stop:
        return memoryview(b"")
    n = bisect_right(starts, start) - 1
    first = memoryview(parts[n])[start - starts[n] : stop - starts[n]]
    if len(first) == stop - start:
        return first
    found = [first]
    while (at := start + sum(map(len, found))) < stop:
        n += 1
        found.append(memoryview(parts[n])[at - starts[n] : stop - starts[n]])
    return memoryview(b"".join(found))
