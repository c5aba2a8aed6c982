"""The bytes of a file: ranges of it, or all from a place on, alike for files here and on other machines."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import BinaryIO, Protocol

from trainpipes.kinds.source import Place
from trainpipes.sources.files.each_file import opened_file, size_of
from trainpipes.sources.files.file_errors import changed, check_unchanged
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.remote.retry import Requests


class FileBytes(Protocol):
    """The bytes of one file, for any thread.

    Attributes:
        name: its path or URL.
        size: bytes of it.
        version: what tells it from another one of that name, in this run; "" where nothing does.

    ``read`` and ``stream`` raise FileNotFoundError where it is gone, DataChangedError where it is another
    one, and UnreachableError where the server does not answer or denies access.
    """

    name: str
    size: int
    version: str

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Bytes ``start`` to ``stop`` of each range."""
        ...

    def stream(self, start: int = 0) -> BinaryIO:
        """All bytes from a place on; it can be sought in."""
        ...


def open_bytes(files: FileList, file: int, requests: Requests | None = None) -> FileBytes:
    """The bytes of a file of a list.

    Args:
        files: the files.
        file: which.
        requests: makes those to servers, and can be stopped.
    """
    return _Bytes(files, file, requests or Requests(files.retry_seconds))


class _Bytes:
    def __init__(self, files: FileList, file: int, requests: Requests) -> None:
        self._files, self._file, self._requests = files, file, requests
        self.name, self.version = files.names[file], files.stamps[file]
        self.size = size_of(files, file, requests)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        system, path = self._files.system(self._file), self._files.paths[self._file]
        if is_local(system):
            with open(path, "rb", 0) as opened:
                found = [_read_at(opened, start, stop) for start, stop in ranges]
            check_unchanged(self._files, self._file, Place(self.name))
        else:
            found = self._requests.ranges(system, path, starts, stops, self.size)[0]
        if any(len(part) < b - a for part, a, b in zip(found, starts, stops, strict=True)):
            raise changed(Place(self.name), "it has become shorter")
        return [memoryview(part) for part in found]

    def stream(self, start: int = 0) -> BinaryIO:
        check_unchanged(self._files, self._file, Place(self.name))
        opened = opened_file(self._files, self._file, self.size, self._requests)
        opened.seek(start)
        return opened


def _read_at(opened: io.FileIO, start: int, stop: int) -> bytes:
    os.lseek(opened.fileno(), start, os.SEEK_SET)
    found = b""
    while len(found) < stop - start and (more := opened.read(stop - start - len(found))):
        found += more
    return found
