"""A file for Arrow, read forward at several places in turn: fsspec's files keep one block."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainpipes.sources.files.file_bytes import FileBytes

#: Bytes held of a file, about; of one part, at least.
HELD_BYTES, LEAST_BYTES = 16 << 20, 256 << 10


class _Part:
    """Bytes ``start`` to ``stop`` of the file, which are read from front to back."""

    def __init__(self, start: int, stop: int, step: int, most: int) -> None:
        self.start, self.stop = start, stop
        self.least, self.step, self.most = step, step, most
        self.at = self.first = start
        self.data: bytes | memoryview = b""

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

    def take(self, stop: int) -> bytes:
        found = memoryview(self.data)[self.at - self.first : stop - self.first]
        self.at += len(found)
        return bytes(found)


class RangeFile(io.RawIOBase):
    def __init__(self, source: FileBytes, held: int | None = None) -> None:
        super().__init__()
        self.name = source.name
        self._source, self._held = source, HELD_BYTES if held is None else held
        self._position = 0
        self._parts: list[_Part] = []

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Say which ``(start, stop)`` will be read next, each from front to back."""
        total = sum(stop - start for start, stop in ranges)
        share = 1.0 if total <= self._held else self._held / 2 / total
        steps = [max(LEAST_BYTES, int((stop - start) * share)) for start, stop in ranges]
        self._parts = [_Part(*one, n, n) for one, n in zip(ranges, steps, strict=True)]

    def follow(self, start: int) -> RangeFile:
        """Go to a place, from which most will be read: more is fetched each time."""
        self._parts = [_Part(0, self._source.size, LEAST_BYTES, self._held // 2)]
        self.seek(start)
        return self

    def fetch(self) -> None:
        if self._parts:
            first = self._parts[0]
            self._fetch(first, first.start, first.start)

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
        start = self._position
        stop = (
            self._source.size if size is None or size < 0 else min(self._source.size, start + size)
        )
        if stop <= start:
            return b""
        inside = (s for s in self._parts if s.start <= start and stop <= s.stop)
        part = next(inside, None)
        if here := self._source.here(start, stop):
            found = bytes(here)
        elif part is None:
            found = bytes(self._source.read([(start, stop)])[0])
        else:
            if start < part.first or stop > part.end:
                self._fetch(part, start, stop)
            part.at = start
            found = part.take(stop)
        self._position = start + len(found)
        return found

    def readinto(self, buffer: Any) -> int:
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def _fetch(self, caller: _Part, start: int, stop: int) -> None:
        """Fetch what is asked for, and the next part of ranges that run low."""
        caller.seek(start)
        low = [s for s in self._parts if s is not caller and s.end - s.at < s.step]
        jobs = [(caller, max(stop, caller.end + caller.step)), *((s, s.end + s.step) for s in low)]
        jobs = [(s, min(end, s.stop, self._source.size)) for s, end in jobs]
        jobs = [(s, end) for s, end in jobs if s.end < end]
        found = self._source.read([(s.end, end) for s, end in jobs])
        for (s, _), more in zip(jobs, found, strict=True):
            s.seek(s.at)
            s.data = b"".join((s.data, more)) if s.data else more
            s.step = min(2 * s.step, s.most)
