"""A file for Arrow, read forward at several places in turn: fsspec's files keep one block."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainpipes.filesystems.request import Ranges

if TYPE_CHECKING:
    from trainpipes.sources.files.file_bytes import FileBytes

#: Bytes held of a file, about; of one part, at least.
HELD_BYTES, LEAST_BYTES = 16 << 20, 256 << 10


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
        """Let go of what is before ``at``."""
        if self.first <= at <= self.end:
            self.data = self.data[at - self.first :]
        else:
            self.data, self.step = b"", self.least
        self.at = self.first = at


class RangeFile(io.RawIOBase):
    """A file object over ``FileBytes``, for libraries that read files."""

    def __init__(self, source: FileBytes, held: int | None = None) -> None:
        super().__init__()
        self.name, self._source = source.name, source
        self._held = HELD_BYTES if held is None else held
        self._position = 0
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

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._source.size)[whence]
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        return bytes(self._next(size))

    def readinto(self, buffer: Any) -> int:
        data = self._next(len(buffer))
        buffer[: len(data)] = memoryview(data).cast("B")  # as it is in all buffers but Arrow's
        return len(data)

    def _next(self, size: int | None) -> bytes | memoryview:
        start, stop = self._position, self._source.size
        if size is not None and size >= 0:
            stop = min(stop, start + size)
        if stop <= start:
            return b""
        if here := self._source.here(start, stop):
            self._position += len(here)
            return here
        self._position = stop
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
        """Fetch what is asked for, and the next part of ranges that run low."""
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
