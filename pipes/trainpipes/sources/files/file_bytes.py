"""The bytes of a file, of the version that was listed: else ``DataChangedError``.

A local file is known by inode, time of change and size. On S3 and over HTTP each reply names the version;
elsewhere the size counts, and a repeated listing.
"""

from __future__ import annotations

import io
import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import pyarrow as pa

from trainpipes.errors import DataChangedError
from trainpipes.kinds.source import Place
from trainpipes.sources.files.file_errors import changed, check_unchanged, unreadable
from trainpipes.sources.files.folders import reported
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.files.range_file import RangeFile
from trainpipes.sources.remote.request import Ranges, is_checked
from trainpipes.sources.remote.retry import Requests

if TYPE_CHECKING:
    from trainpipes.sources.files.list_files import FileList

T = TypeVar("T")
#: Bytes of one request at most, so that several connections share the work; ranges closer to each other than
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
#: Bytes of a remote file that stays in memory once it was fetched whole, and of all of these, at most: what
#: small files hold is not asked for again.
SMALL_FILE, SMALL_FILES = 64 << 10, 32 << 20
#: Small files that are fetched by one call.
AT_ONCE = 512


class FileBytes(ABC):
    """The bytes of one file, for any thread.

    ``read`` and ``stream`` raise FileNotFoundError, DataChangedError or UnreachableError.

    Attributes:
        name: its path or URL.
        size: bytes of it.
        version: tells it from others of that name; "" if unknown.
        checked: whether each read is certain to be of this version.
        local: whether it is on this machine.
    """

    name: str
    size: int
    version: str
    checked: bool
    local = False

    def __init__(self, file: int, kept: KeptFiles) -> None:
        self._file, self._kept = file, kept

    @abstractmethod
    def read(self, ranges: Ranges) -> list[memoryview]:
        """Bytes ``start`` to ``stop`` of each range."""

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What ``make`` finds out about the file: called once in a process, while it is read."""
        return self._kept.once(self._file, key, make)

    def here(self, start: int, stop: int) -> memoryview:
        """What needs no request of a range, from its start on."""
        return memoryview(b"")

    def stream(self, start: int = 0) -> BinaryIO:
        """All bytes from a place on; it can be sought in."""
        held = 2 * BUFFER_BYTES if self.local else None
        return cast(BinaryIO, io.BufferedReader(RangeFile(self, held).follow(start), BUFFER_BYTES))

    def check(self) -> None:  # noqa: B027  (replies of servers are checked as they come)
        """Raise if what was read so far without ``read`` may be of another version."""

    def mapped(self) -> pa.Buffer | None:
        """All of it, mapped into memory; None for a file on another machine."""
        return None


class PartlyHere(FileBytes):
    """Bytes of another one, some of which are kept."""

    def __init__(self, source: FileBytes) -> None:
        super().__init__(source._file, source._kept)
        self._source, self.name, self.size = source, source.name, source.size
        self.version, self.checked = source.version, source.checked


def fetch_small(
    files: FileList, numbers: Sequence[int], kept: KeptFiles, requests: Requests, most: int
) -> None:
    """Have small remote files in memory, many by one call, which takes half the time."""
    by_system: dict[int, list[int]] = {}
    for n in numbers if not all(map(is_local, files.systems)) else ():
        if 0 < files.sizes[n] <= SMALL_FILE and is_checked(files.system(n), files.stamps[n]):
            by_system.setdefault(int(files.system_of[n]), []).append(n)
    batches = [
        some[at : at + AT_ONCE]
        for some in by_system.values()
        for at in range(0, len(some), AT_ONCE)
    ]
    for which in batches:
        wanted = [(files.paths[n], files.stamps[n], int(files.sizes[n])) for n in which]
        if kept.has_room(sum(size for *_, size in wanted)):
            found = requests.files(files.system(which[0]), wanted, most)
            for n, (*_, size), content in zip(which, wanted, found, strict=True):
                if isinstance(content, bytes) and len(content) == size:
                    kept.keep(n, content)


def open_bytes(
    files: FileList, file: int, requests: Requests | None = None, kept: KeptFiles | None = None
) -> FileBytes:
    if is_local(files.system(file)):
        return LocalBytes(files, file, kept or KeptFiles())
    requests = requests or Requests(files.retry_seconds)
    remote = RemoteBytes(files, file, requests, kept or KeptFiles())
    return remote if files.cache is None else files.cache.keeping(remote)


class LocalBytes(FileBytes):
    checked = local = True

    def __init__(self, files: FileList, file: int, kept: KeptFiles) -> None:
        super().__init__(file, kept)
        self.name, self.size = files.paths[file], int(files.sizes[file])
        self._listed = files.inode(file), files.stamps[file], self.size
        self.version = " ".join(map(str, self._listed))

    def read(self, ranges: Ranges) -> list[memoryview]:
        handle = os.open(self.name, FLAGS)  # half the time of open()
        try:
            found = [memoryview(_read_at(handle, start, stop)) for start, stop in ranges]
            about = os.fstat(handle)
        except OSError:
            self.check()  # a pipe in place of the file
            raise
        finally:
            os.close(handle)
        self._compare(about)
        if any(len(part) < b - a for part, (a, b) in zip(found, ranges, strict=True)):
            raise changed(Place(self.name), "it has become shorter")
        return found

    def mapped(self) -> pa.Buffer | None:
        self.check()
        return self._kept.mapped(self._file, self.name)

    def check(self) -> None:
        about = None
        with suppress(OSError):
            about = os.stat(self.name)
        self._compare(about)

    def _compare(self, now: os.stat_result | None) -> None:
        if now is None or self._listed != (now.st_ino, str(now.st_mtime_ns), now.st_size):
            check_unchanged(Place(self.name), self._listed)  # which says what it is


def _read_at(handle: int, start: int, stop: int) -> bytes:
    found = os.pread(handle, stop - start, start)
    while len(found) < stop - start:  # more than a single read gives
        more = os.pread(handle, stop - start - len(found), start + len(found))
        if not more:
            break
        found += more
    return found


def as_bytes(view: memoryview) -> bytes:
    whole = view.obj
    return whole if isinstance(whole, bytes) and len(whole) == len(view) else bytes(view)


class KeptFiles:
    """Mapped local files, small remote ones, and findings, shared by a process. Pickled, it is empty."""

    def __init__(self) -> None:
        self._buffers: dict[int, pa.Buffer] = {}
        self.whole: dict[int, memoryview] = {}  # small remote files
        self._left = SMALL_FILES
        self._found: dict[tuple[int, Any], Any] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return type(self), ()

    def mapped(self, file: int, path: str) -> pa.Buffer:
        with self._lock:
            found = self._buffers.get(file)
            if found is None:
                if os.path.getsize(path):
                    with pa.memory_map(path) as opened:
                        found = opened.read_buffer()
                else:
                    found = pa.py_buffer(b"")
                self._buffers[file] = found
                while len(self._buffers) > MAPPED:
                    del self._buffers[next(iter(self._buffers))]
            return found

    def has_room(self, size: int) -> bool:
        return size <= self._left

    def keep(self, file: int, content: bytes) -> None:
        with self._lock:
            small = len(content) <= SMALL_FILE and self.has_room(len(content))
            if small and file not in self.whole:
                self.whole[file] = memoryview(content)
                self._left -= len(content)

    def once(self, file: int, key: Any, make: Callable[[], T]) -> T:
        """What ``make`` found of a file; one thread at a time calls it, once."""
        found = self._found
        if (file, key) not in found:
            with self._lock:
                alone = self._locks.setdefault(file, threading.Lock())
            with alone:
                if (file, key) not in found:
                    found[file, key] = make()
        result: T = found[file, key]
        return result


class RemoteBytes(FileBytes):
    def __init__(self, files: FileList, file: int, requests: Requests, kept: KeptFiles) -> None:
        super().__init__(file, kept)
        self._system, self._path, self._requests = files.system(file), files.paths[file], requests
        self.name, self.version = files.names[file], files.stamps[file]
        size = int(files.sizes[file])
        if size < 0:
            size = requests.call(self._system, "size", self._path)
            if size is None:
                raise unreadable(Place(self.name), "the server does not say how large it is")
        self.size = size
        self.checked = is_checked(self._system, self.version)

    def read(self, ranges: Ranges) -> list[memoryview]:
        whole = self._kept.whole.get(self._file)
        if whole is not None:
            return [whole[start:stop] for start, stop in ranges]
        spans = merged([one for one in ranges if one[0] < one[1]], GAP)
        asked = [
            (start, min(start + PART_BYTES, stop))
            for first, stop in spans
            for start in range(first, stop, PART_BYTES)
        ]
        if not asked:
            return [memoryview(b"")] * len(ranges)
        try:
            about = self._system, self._path, asked, self.size, self.version
            parts, tries = self._requests.ranges(*about)
        except DataChangedError as error:
            how = self._change() or "it changed as it was read"
            raise changed(Place(self.name), how) from error
        if tries > 1:
            self.confirm()
        if asked == [(0, self.size)]:
            self._kept.keep(self._file, parts[0])
        starts = [start for start, _ in asked]
        return [cut(parts, starts, start, stop) for start, stop in ranges]

    def confirm(self) -> None:
        """Raise if the file is another one by now, where replies do not tell."""
        if not self.checked and (how := self._change()):
            raise changed(Place(self.name), how)

    def _change(self) -> str:
        self._system.invalidate_cache()
        now = reported(self._requests.call(self._system, "info", self._path))
        if now.size is not None and now.size != self.size:
            return f"it had {self.size:,} bytes, and has {now.size:,}"
        if self.version and now.stamp != self.version:
            return "it has as many bytes as before, and others"
        return ""


def merged(ranges: Ranges, gap: int = 0) -> list[tuple[int, int]]:
    """Ranges in order, joined if at most ``gap`` apart.

    >>> merged([(5, 9), (0, 3), (3, 4)]), merged([(5, 9), (0, 3)], gap=2)
    ([(0, 4), (5, 9)], [(0, 9)])
    """
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start - found[-1][1] <= gap:
            start, stop = found[-1][0], max(stop, found.pop()[1])
        found.append((start, stop))
    return found


def cut(
    parts: Sequence[memoryview | bytes], starts: Sequence[int], start: int, stop: int
) -> memoryview:
    """A range of parts that begin at ``starts``; copied only if it lies in several."""
    n, found = bisect_right(starts, start) - 1, []
    while start < stop:
        found.append(memoryview(parts[n])[start - starts[n] : stop - starts[n]])
        start, n = start + len(found[-1]), n + 1
    return found[0] if len(found) == 1 else memoryview(b"".join(found))


class FetchedBytes(PartlyHere):
    def __init__(self, data: FileBytes, ranges: Ranges) -> None:
        super().__init__(data)
        self._ranges = merged(ranges)
        self._parts = data.read(self._ranges)

    def read(self, ranges: Ranges) -> list[memoryview]:
        found = [self.here(*one) for one in ranges]
        short = [len(part) < b - a for part, (a, b) in zip(found, ranges, strict=True)]
        missing = [one for one, is_short in zip(ranges, short, strict=True) if is_short]
        more = iter(self._source.read(missing) if missing else ())
        return [next(more) if n else part for part, n in zip(found, short, strict=True)]

    def here(self, start: int, stop: int) -> memoryview:
        n = bisect_right(self._ranges, (start, self.size)) - 1
        if n < 0:
            return memoryview(b"")
        first, last = self._ranges[n]
        return self._parts[n][min(start, last) - first : stop - first]

    def stream(self, start: int = 0) -> BinaryIO:
        # A buffer would be filled beyond what is here.
        return cast(BinaryIO, RangeFile(self).follow(start))
