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
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

import pyarrow as pa

from trainpipes import errors
from trainpipes.cache import kept_file
from trainpipes.filesystems.request import Ranges
from trainpipes.filesystems.systems import FileByParts
from trainpipes.interfaces.source import Place

#: Where the system lists its file systems with their kinds.
MOUNTS = "/proc/self/mountinfo"


def keeps_inodes(device: int) -> bool:
    """Whether a device keeps inodes: some network file systems make them up again."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(MOUNTS) as mounts:
            kinds = [line.split(" - ")[1] for line in mounts if line.split()[2] == number]
    except OSError:
        return True
    return not any(kind.startswith(("fuse", "9p", "cifs", "smb")) for kind in kinds)


def gone(place: Place) -> errors.MissingFilesError:
    return errors.MissingFilesError(
        f"{place}: the file was there when the files were listed, but no longer is; bring it back, "
        "or build the pipeline again without it",
        **vars(place),
    )


def changed(place: Place, how: str) -> errors.DataChangedError:
    return errors.DataChangedError(
        f"{place}: the file has changed since the files were listed: {how}; bring the old one back, "
        "or build the pipeline again",
        **vars(place),
    )


def located(place: Place, error: Any) -> Any:
    names = [name for name in ("attempts", "seconds") if hasattr(error, name)]
    reported = {name: getattr(error, name) for name in names}
    said = error.message.removeprefix(errors.hidden(f"{place.path}: "))
    return type(error)(f"{place}: {said}", **reported, **vars(place))


def without(*paths: str) -> str:
    """The line of code that leaves out files by the names that they are listed by, and no others."""
    if any(errors.hidden(path) != path for path in paths):  # by the parts that are no secret
        ends = tuple(errors.without_query(path).rpartition("://")[2] for path in paths)
        text = f"not p.split('?')[0].endswith({ends!r})"
    else:
        text = f"p != {paths[0]!r}" if len(paths) == 1 else f"p not in {[*paths]!r}"
    return f"tp.list_files(...).filter(lambda p: {text}) before the reader"


def unreadable(place: Place, why: str) -> errors.UnreadableError:
    return errors.UnreadableError(
        f"{place}: {why}; to go on from a checkpoint, restore the file; without it, start a new run, with "
        f"{without(place.path or '')}",
        **vars(place),
    )


T = TypeVar("T")
#: Bytes that a stream reads at a time, at least.
BUFFER_BYTES = 256 << 10
#: Files that stay mapped, at most.
MAPPED = 256
#: Bytes of a remote file that stays in memory once it was fetched whole, and of all of these, at most: what
#: small files hold is not asked for again.
SMALL_FILE, SMALL_FILES = 64 << 10, 32 << 20
#: Bytes held of a file, about; of a part, at least.
HELD_BYTES, LEAST_BYTES = 16 << 20, 256 << 10


class KeptFiles:
    """Mapped local files, small remote ones, and findings, shared by a process. Pickled, it is empty."""

    def __init__(self) -> None:
        self._buffers: dict[int, pa.Buffer] = {}
        self.whole: dict[int, memoryview] = {}  # small remote files
        self.most, self.left = SMALL_FILE, SMALL_FILES
        self._found: dict[tuple[int, Any], Any] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return type(self), ()

    def mapped(self, file: int, path: str) -> pa.Buffer:
        with self._lock:
            buffer = self._buffers.get(file)
            if buffer is None:
                with pa.memory_map(path) as opened:
                    buffer = self._buffers[file] = opened.read_buffer()
                while len(self._buffers) > MAPPED:
                    del self._buffers[next(iter(self._buffers))]
            return buffer

    def keep(self, file: int, content: bytes) -> None:
        with self._lock:
            if file not in self.whole and len(content) <= min(self.most, self.left):
                self.whole[file] = memoryview(content)
                self.left -= len(content)

    def once(self, file: int, key: Any, make: Callable[[], T]) -> T:
        """The result of ``make`` for a file; called once, by one thread."""
        results = self._found
        if (file, key) not in results:
            with self._locks.setdefault(file, threading.Lock()):
                if (file, key) not in results:
                    results[file, key] = make()
        result: T = results[file, key]
        return result


class FileBytes(ABC):
    """The bytes of a file, for any thread.

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

    def __init__(self, file: int, in_memory: KeptFiles) -> None:
        self._file, self._kept = file, in_memory

    @abstractmethod
    def read(self, ranges: Ranges) -> list[memoryview]:
        """Bytes ``start`` to ``stop`` of each range."""

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """The result of ``make`` for the file: called once in a process, while the file is read."""
        return self._kept.once(self._file, key, make)

    def here(self, start: int, stop: int) -> memoryview:
        """The bytes of a range, from its start on, that need no request."""
        return memoryview(b"")

    def stream(self, start: int = 0) -> BinaryIO:
        """All bytes from a place on; it can be sought in."""
        held = 2 * BUFFER_BYTES if self.local else None
        return cast(BinaryIO, io.BufferedReader(RangeFile(self, held).follow(start), BUFFER_BYTES))

    def check(self) -> None:  # noqa: B027  (replies of servers are checked as they come)
        """Raise if bytes read so far without ``read`` may be of another version."""

    def mapped(self) -> pa.Buffer | None:
        """All of it, mapped into memory; None for a file on another machine. Copy at once the bytes needed:
        reading the map kills the process where the file is cut, or its disk fails.
        """
        return None


class LocalBytes(FileBytes):
    """The bytes of a file of this machine."""

    checked = local = True

    def __init__(
        self,
        name: str,
        listed: tuple[int, str, int],
        file: int = 0,
        in_memory: KeptFiles | None = None,
    ) -> None:
        super().__init__(file, in_memory or KeptFiles())
        self.name, self._listed, self.size = name, listed, listed[2]
        self.version = " ".join(map(str, listed))

    def read(self, ranges: Ranges) -> list[memoryview]:
        def read(handle: int) -> list[memoryview]:
            return [memoryview(_read_at(handle, start, stop)) for start, stop in ranges]

        parts = self._opened(read)
        if any(len(part) < b - a for part, (a, b) in zip(parts, ranges, strict=True)):
            raise changed(Place(self.name), "it has become shorter")
        return parts

    def reading(self, work: Callable[[Callable[[int, int], pa.Buffer]], T]) -> T:
        """Call ``work`` with a function that reads a range of the file into Arrow's memory."""

        def opened(handle: int) -> T:
            def read(start: int, stop: int) -> pa.Buffer:
                buffer = pa.allocate_buffer(stop - start)
                if _read_into(handle, start, memoryview(buffer)) < stop - start:
                    raise changed(Place(self.name), "it has become shorter")
                return buffer

            return work(read)

        return self._opened(opened)

    def _opened(self, work: Callable[[int], T]) -> T:
        handle = os.open(self.name, kept_file.FLAGS)  # half the time of open()
        try:
            result = work(handle)
            about = os.fstat(handle)
        except Exception:
            self.check()  # a pipe in place of the file, or other bytes
            raise
        finally:
            os.close(handle)
        self._compare(about)
        return result

    def mapped(self) -> pa.Buffer | None:
        self.check()
        return self._kept.mapped(self._file, self.name)

    def check(self) -> None:
        try:
            self._compare(os.stat(self.name))
        except FileNotFoundError as error:
            raise gone(Place(self.name)) from error

    def _compare(self, now: os.stat_result) -> None:
        """Raise unless it has the inode (0 if unknown), time of change and size that were listed."""
        inode, stamp, size = self._listed
        if now.st_size != size:
            how = f"it had {size:,} bytes, and has {now.st_size:,}"
            raise changed(Place(self.name), how)
        moved = now.st_ino != (inode or now.st_ino) and keeps_inodes(now.st_dev)
        if moved or str(now.st_mtime_ns) != stamp:
            raise changed(Place(self.name), "it has been written since")


def _read_at(handle: int, start: int, stop: int) -> bytes:
    data = os.pread(handle, stop - start, start)
    while len(data) < stop - start:  # more than a single read gives
        more = os.pread(handle, stop - start - len(data), start + len(data))
        if not more:
            break
        data += more
    return data


def _read_into(handle: int, start: int, place: memoryview) -> int:
    done = 0
    while done < len(place) and (more := os.preadv(handle, [place[done:]], start + done)):
        done += more
    return done


def as_bytes(view: memoryview) -> bytes:
    whole = view.obj
    return whole if isinstance(whole, bytes) and len(whole) == len(view) else bytes(view)


def merged(ranges: Ranges, gap: int = 0) -> list[tuple[int, int]]:
    """Ranges in order, joined if at most ``gap`` apart.

    >>> merged([(5, 9), (0, 3), (3, 4)]), merged([(5, 9), (0, 3)], gap=2)
    ([(0, 4), (5, 9)], [(0, 9)])
    """
    spans: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if spans and start - spans[-1][1] <= gap:
            start, stop = spans[-1][0], max(stop, spans.pop()[1])
        spans.append((start, stop))
    return spans


def cut(
    parts: Sequence[memoryview | bytes], starts: Sequence[int], start: int, stop: int
) -> memoryview:
    """A range of parts that begin at ``starts``; copied only if it lies in several."""
    n, views = bisect_right(starts, start) - 1, []
    while start < stop:
        views.append(memoryview(parts[n])[start - starts[n] : stop - starts[n]])
        start, n = start + len(views[-1]), n + 1
    return views[0] if len(views) == 1 else memoryview(b"".join(views))


class FetchedBytes(FileBytes):
    """The bytes of a file, some of which are here."""

    def __init__(self, data: FileBytes, ranges: Ranges) -> None:
        super().__init__(data._file, data._kept)
        self.name, self.size, self.version, self.checked = (
            data.name, data.size, data.version, data.checked
        )  # fmt: skip
        self._source, self._ranges = data, merged(ranges)
        self._parts = data.read(self._ranges)

    def read(self, ranges: Ranges) -> list[memoryview]:
        parts = [self.here(*span) for span in ranges]
        lacks = [len(part) < b - a for part, (a, b) in zip(parts, ranges, strict=True)]
        missing = [span for span, lack in zip(ranges, lacks, strict=True) if lack]
        more = iter(self._source.read(missing) if missing else ())
        return [next(more) if lack else part for part, lack in zip(parts, lacks, strict=True)]

    def here(self, start: int, stop: int) -> memoryview:
        n = bisect_right(self._ranges, (start, self.size)) - 1
        if n < 0:
            return memoryview(b"")
        first, last = self._ranges[n]
        return self._parts[n][min(start, last) - first : stop - first]

    def stream(self, start: int = 0) -> BinaryIO:
        # A buffer would be filled beyond the bytes here.
        return cast(BinaryIO, RangeFile(self).follow(start))


# A file for Arrow, read forward at several places in turn: fsspec's files keep one block


@dataclass
class _Part:
    """Bytes ``start`` to ``stop`` of the file, which are read from front to back."""

    start: int
    stop: int
    least: int  # bytes that are fetched at first, and at a time
    most: int

    def __post_init__(self) -> None:
        self.at = self.first = self.start
        self.step = self.least
        self.data: bytes | memoryview = b""  # from ``first`` on

    @property
    def end(self) -> int:
        return self.first + len(self.data)

    def seek(self, at: int) -> None:
        """Let go of the bytes before ``at``."""
        if self.first <= at <= self.end:
            self.data = self.data[at - self.first :]
        else:
            self.data, self.step = b"", self.least
        self.at = self.first = at


class RangeFile(FileByParts):
    """A file object over ``FileBytes``, for libraries that read files."""

    def __init__(self, source: FileBytes, held: int | None = None) -> None:
        super().__init__(source.size)
        self.name, self._source = source.name, source
        self._held = HELD_BYTES if held is None else held
        self._parts: list[_Part] = []

    def expect(self, ranges: Ranges) -> None:
        """Say which ``(start, stop)`` will be read next, each from front to back."""
        total = sum(stop - start for start, stop in ranges)
        share = 1.0 if total <= self._held else self._held / 2 / total
        steps = [max(LEAST_BYTES, int((stop - start) * share)) for start, stop in ranges]
        self._parts = [_Part(*span, n, n) for span, n in zip(ranges, steps, strict=True)]

    def follow(self, start: int) -> RangeFile:
        """Go to a place, from which most will be read: more is fetched each time."""
        self._parts = [_Part(0, self._source.size, LEAST_BYTES, self._held // 2)]
        self.seek(start)
        return self

    def fetch(self) -> None:
        if self._parts:
            self._fetch(self._parts[0], self._parts[0].start, self._parts[0].start)

    def _part(self, start: int, stop: int) -> bytes | memoryview:
        if here := self._source.here(start, stop):
            return here
        part = next(
            (part for part in self._parts if part.start <= start and stop <= part.stop), None
        )
        if part is None:
            return self._source.read([(start, stop)])[0]
        if start < part.first or stop > part.end:
            self._fetch(part, start, stop)
        part.at = stop
        return memoryview(part.data)[start - part.first : stop - part.first]

    def _fetch(self, caller: _Part, start: int, stop: int) -> None:
        """Fetch the ranges asked for, and the next part of ranges that run low."""
        caller.seek(start)
        low = [
            part for part in self._parts if part is not caller and part.end - part.at < part.step
        ]
        ends = [max(stop, caller.end + caller.step), *(part.end + part.step for part in low)]
        jobs = [
            (part, min(end, part.stop, self._source.size))
            for part, end in zip([caller, *low], ends, strict=True)
        ]
        jobs = [(part, end) for part, end in jobs if part.end < end]
        contents = self._source.read([(part.end, end) for part, end in jobs])
        for (part, _), more in zip(jobs, contents, strict=True):
            part.seek(part.at)
            part.data = b"".join((part.data, more)) if part.data else more
            part.step = min(2 * part.step, part.most)
